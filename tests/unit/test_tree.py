"""`Tree` detects every edit of a module that changes how it runs, and nothing else."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from verbatim.model.fingerprint import Tree


def model() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3))
    )


def move_a_child(m: nn.Sequential) -> None:
    """Change the parent of one module; the modules and their order stay."""
    child = m[0][2]
    del m[0][2]
    m[1].insert(0, child)


EDITS: dict[str, Callable[[nn.Sequential], object]] = {
    "append": lambda m: m.append(nn.ReLU()),
    "replace": lambda m: m[1].__setitem__(0, nn.Linear(4, 4)),
    "same class, other object": lambda m: m.__setitem__(2, copy.deepcopy(m[2])),
    "remove": lambda m: m[1].__delitem__(1),
    "move": move_a_child,
    "parametrize": lambda m: nn.utils.parametrizations.weight_norm(m[1][0]),
    "own forward": lambda m: setattr(m[2][1], "forward", lambda x: x),
    "dtype": lambda m: m.to(torch.bfloat16),
    "class": lambda m: setattr(m[2][1], "__class__", nn.SiLU),
}


@pytest.mark.parametrize("edit", EDITS)
def test_module_edit_is_detected(edit: str) -> None:
    module = model()
    tree = Tree(module)
    assert tree.unchanged()
    EDITS[edit](module)
    assert not tree.unchanged()
    assert Tree(module).unchanged()


def test_changes_of_weights_modes_and_hooks_are_not_edits() -> None:
    module = model()
    tree = Tree(module)
    with torch.no_grad():
        module[0][0].weight.mul_(2)
    module.eval()
    handle = module[1][1].register_forward_hook(lambda *args: None)
    assert tree.unchanged() and tree.has_hooks()
    handle.remove()
    assert not tree.has_hooks()
    handle = module.register_forward_pre_hook(lambda *args: None)
    assert tree.has_hooks()
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert tree.has_hooks()
    handle.remove()
    assert not tree.has_hooks()


def test_modules_in_training_mode_are_listed() -> None:
    module = model().eval()
    tree = Tree(module)
    assert tree.in_training() == []
    module[1].train()
    assert tree.in_training() == list(module[1].modules())
    assert tree.modules == list(module.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_module_is_treated_as_a_leaf() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    module = nn.Sequential(nn.ReLU(), scripted).eval()
    tree = Tree(module)
    assert tree.unchanged() and not tree.has_hooks() and tree.in_training() == []
    scripted.train()
    assert tree.in_training() == [scripted]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_training_mode_of_a_compiled_module_is_detected() -> None:
    compiled = torch.compile(nn.Linear(4, 4))
    module = nn.Sequential(nn.ReLU(), compiled).eval()
    tree = Tree(module)
    assert tree.unchanged() and tree.in_training() == []
    compiled.train()
    assert compiled in tree.in_training()


def test_root_is_held_by_a_weak_reference() -> None:
    module = model()
    tree, gone = Tree(module), weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None and not tree.has_hooks()
