"""Programs against a server: an evaluation harness, a fuzzer of its document, and many clients at once."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.serving import Served, serving
from verbatim import LLM, SamplingParams, storyteller

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = pytest.mark.slow
TASKS = Path(__file__).with_name("lm_eval_tasks")
POSTS = [
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/generate", "/v1/logprobs",
    "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
]  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LLM() as llm, serving(llm) as server:
        yield server


@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="needs lm-eval[api]")
@pytest.mark.timeout(600)
def test_lm_evaluation_harness_finds_what_is_found_in_process(served, tmp_path):
    for file in TASKS.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("DATA", str(tmp_path)))
    given = f"model=storyteller,base_url={served.url}/v1/completions,tokenizer={storyteller.path()}"
    subprocess.run(
        [
            sys.executable, "-m", "lm_eval", "run", "--model", "local-completions",
            "--model_args", f"{given},tokenizer_backend=huggingface,num_concurrent=4,max_length=1024",
            "--tasks", "verbatim_choice,verbatim_free", "--include_path", str(tmp_path),
            "--batch_size", "2", "--output_path", str(tmp_path / "out"), "--log_samples",
        ],
        check=True, timeout=500, capture_output=True, text=True,
        env=os.environ | {
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"),
            "OPENAI_API_KEY": "none",
        },
    )  # fmt: skip
    (report,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(report.read_text())["results"]

    def samples(task: str) -> list[dict[str, object]]:
        (file,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        found = [json.loads(line) for line in file.read_text().splitlines()]
        return sorted(found, key=lambda sample: sample["doc_id"])

    llm, encode = served.llm, served.llm.tokenizer.encode
    right = []
    for sample in samples("verbatim_choice"):
        doc, scores = sample["doc"], []
        for choice, told in zip(doc["choices"], sample["filtered_resps"], strict=True):
            ids = encode(f"{doc['story']} {choice}")
            scores.append(sum(llm.score([ids])[0][len(encode(doc["story"])) :]))
            assert float(told[0]) == scores[-1]
        right.append(scores.index(max(scores)) == doc["answer"])
    assert results["verbatim_choice"]["acc,none"] == sum(right) / len(right)
    assert 0 < sum(right) < len(right)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=["."])
    for sample in samples("verbatim_free"):
        (result,) = llm.generate([sample["doc"]["story"]], params)
        assert sample["resps"][0][0] == result.outputs[0].text
    assert served.idle()


@pytest.mark.skipif(not importlib.util.find_spec("schemathesis"), reason="needs schemathesis")
@pytest.mark.timeout(240)
def test_whatever_the_document_allows_is_no_5xx(served, tmp_path):
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json",
            "--checks", "not_a_server_error", "--max-examples", "100", "--mode", "all",
            "--phases", "examples,coverage,fuzzing", "--seed", "1", "--generation-database", "none",
            "--request-timeout", "30", "--continue-on-failure", "--no-color",
        ],
        cwd=tmp_path, timeout=150, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert served.idle()
    assert served.client.get("/health").status_code == 200
    text = served.client.get("/metrics").text
    for path in POSTS:  # it did reach the endpoints
        for status in (200, 400):
            assert f'verbatim_http_answers_total{{path="{path}",status="{status}"}}' in text
    assert 'status="5' not in text


def test_two_hundred_streams_get_the_words_of_one_alone():
    """Some of whom go, and some send nonsense."""
    from serve import held, load

    with LLM() as llm, serving(llm) as server:
        asyncio.run(load(server.url, 20, 1.0, seed=1))
        assert server.idle()
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
