"""The examples run, and print the results that they promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.programs import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


def test_grpo_starts_at_ratio_one_and_increases_its_reward() -> None:
    few = ["--steps", "5", "--epochs", "1", "--learning-rate", "6e-4"]
    out = run_program(EXAMPLES / "grpo.py", *few, "--word", "fire")
    assert "\n  score: 0\n  with gradients, given the scores: 0\n" in out
    assert (own := re.search(r"own forward: (\S+)", out)) is not None
    assert float(own[1]) < 5e-5
    earned = re.search(r"reward: (\S+) over the first 1 steps, (\S+) over the last 1", out)
    assert earned is not None
    assert float(earned[2]) > float(earned[1]) + 0.05


def test_eval_is_bit_identical_at_any_batch_size() -> None:
    out = run_program(EXAMPLES / "eval.py", "--batch-sizes", 1, 5, 32)
    lines = [line.split() for line in out.splitlines() if line.startswith("verbatim")]
    assert len(lines) == 3
    assert len({tuple(line[5:]) for line in lines}) == 1
    assert "the same bits at every batch size" in out


@pytest.mark.parametrize("option", ["--stages=2", "--draft=mtp", "--quantization=int8"])
def test_five_apis_give_the_same_tokens(option: str) -> None:
    out = run_program(EXAMPLES / "five_apis.py", "--tokens=12", option)
    assert ("weights-int8" in out.splitlines()[0]) == (option == "--quantization=int8")
    lines = [line.split() for line in out.splitlines() if " ids " in line]
    steps = {int(line[3]) for line in lines}
    assert len(lines) == 12 and (max(steps) < 12 if "mtp" in option else steps == {12})
    assert len({line[2] for line in lines}) == 2  # greedy, and sampled with a seed
    assert out.endswith("the same tokens through every API\n")
