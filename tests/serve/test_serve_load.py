"""Many clients at once, some of whom go and some of whom send nonsense: nothing breaks, nothing stays."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from support.serving import serving
from verbatim import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = pytest.mark.slow


def test_two_hundred_streams_get_the_words_of_one_alone():
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
