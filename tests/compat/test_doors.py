"""What every door of `verbatim.compat` must keep to: it translates, and the engine generates."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import verbatim.compat

MODEL_CALLS = {
    "forward",
    "run_one_forward_step",
    "multinomial",
    "softmax",
    "log_softmax",
    "argmax",
    "topk",
}
MODEL_NAMES = {"model", "module", "actor"}
STEPS = {"step", "run", "sample", "sample_rows", "draw_rows", "generate", "dummy_forward", "peek"}
LENGTHS = ("max", "num_tokens", "new_tokens", "length")


def names_in(*nodes):
    """Every name and attribute that is read, and every one that is called."""
    inside = [node for root in nodes for node in ast.walk(root)]
    named = {getattr(node, "attr", getattr(node, "id", "")) for node in inside}
    called = {
        getattr(node.func, "attr", getattr(node.func, "id", ""))
        for node in inside
        if isinstance(node, ast.Call)
    }
    return named, called


def sins(source):
    """What a door may not do: call a model, sample by hand, or loop over tokens."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if any(
                f"{start}{alias.name}".startswith("torch.nn.functional") for alias in node.names
            ):
                found.append("functional")
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += [f"call of {name}"] * (name in MODEL_CALLS | MODEL_NAMES)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            head = node.test if isinstance(node, ast.While) else node.iter
            named, called = names_in(head)
            if (called | names_in(*node.body)[1]) & STEPS:
                found.append("loop of steps")
            if "range" in called and any(word in name for word in LENGTHS for name in named):
                found.append("loop over tokens")
    return found


DOORS = sorted(Path(verbatim.compat.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", DOORS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_door_has_a_token_loop_or_calls_a_model(path):
    assert sins(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.nn.functional as F",
        "from torch.nn import functional",
        "y = self.model(ids)",
        "y = model.forward(ids)",
        "y = torch.multinomial(p, 1)",
        "while driver.step(): pass",
        "while True:\n    ids.append(draw_rows(x))",
        "for _ in range(max_new_tokens):\n    pass",
        "for i in range(params.num_tokens_to_generate - 1):\n    pass",
    ],
)
def test_the_rule_for_doors_notices(source):
    assert sins(source)
