"""A server under load: a fuzzer of its OpenAPI document, and many concurrent clients.

`benchmarks/clients` runs client packages and lm-evaluation-harness.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.serving import Served, serving
from verbatim import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = pytest.mark.slow
POSTS = [
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/generate", "/v1/logprobs",
    "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
]  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LLM() as llm, serving(llm) as server:
        yield server


@pytest.mark.skipif(not importlib.util.find_spec("schemathesis"), reason="needs schemathesis")
def test_fuzzed_requests_cause_no_5xx(served, tmp_path):
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json",
            "--checks", "not_a_server_error", "--max-examples", "40", "--mode", "all",
            "--phases", "examples,coverage,fuzzing", "--seed", "1", "--generation-database", "none",
            "--request-timeout", "30", "--continue-on-failure", "--no-color",
        ],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    served.until_idle()
    assert served.client.get("/health").status_code == 200
    text = served.client.get("/metrics").text
    for path in POSTS:  # the fuzzer has reached every endpoint
        for status in (200, 400):
            assert f'verbatim_http_answers_total{{path="{path}",status="{status}"}}' in text
    assert 'status="5' not in text


def test_200_streams_match_generate_and_leak_nothing():
    """Some clients disconnect early, and some send invalid requests."""
    from serve import held, load

    with LLM() as llm, serving(llm) as server:
        asyncio.run(load(server.url, 20, 1.0, seed=1))
        server.until_idle()
        before = held(server)
        found = asyncio.run(load(server.url, 200, 10.0))
        after = held(server)
        for what in ("tasks", "connections", "descriptors", "blocks"):
            assert after[what] <= before[what], what
        assert after["MB"] - before["MB"] < 200
        assert found.left > 10
        assert set(found.statuses) == {200, 400}
        sample = random.Random(1).sample(sorted(found.texts), 40)
        for prompt, seed, length in sample:
            (result,) = llm.generate([prompt], SamplingParams(seed=seed, max_tokens=length))
            assert result.outputs[0].text == found.texts[prompt, seed, length]
