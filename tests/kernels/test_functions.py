"""The argument table of the kernel functions: equal to the declarations in the C++ sources."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from verbatim import kernels
from verbatim.errors import NotSupported
from verbatim.kernels import functions
from verbatim.kernels.functions import in_team
from verbatim.model.products import linear

SOURCES = Path(__file__).parents[2] / "verbatim" / "kernels"  # not in an installed package
LETTERS = {"int64_t": "L", "int": "I", "uint64_t": "Q", "uint32_t": "U", "float": "F"}


def letters(arguments: str) -> str:
    """Return a letter for each argument, without the number of threads."""
    each = [a.split() for a in arguments.split(",") if a.split() != ["int", "threads"]]
    return "".join("P" if "*" in "".join(words) else LETTERS[words[0]] for words in each)


def declared() -> dict[str, str]:
    """Return the arguments of every function in the sources, by name."""
    found: dict[str, str] = {}
    for file in SOURCES.glob("*.cpp"):
        source = file.read_text().replace("\\\n", " ")
        by_macro = dict(
            re.findall(r'#define (\w+)\(name, T\)\s+extern "C" void name\(([^)]*)\)', source)
        )
        uses = re.findall(r"^(\w+)\((vb_\w+), \w+\)", source, re.MULTILINE)
        named = [(name, by_macro[macro]) for macro, name in uses if macro in by_macro]
        named += re.findall(r"\b(?:void|int|int64_t) (vb_[\w#]+)\(([^)]+)\)\s*\{", source)
        for name, arguments in named:
            found[re.sub("_(f32|bf16|##suffix)$", "", name)] = letters(arguments)
    return found


def test_argument_table_matches_the_cpp_sources() -> None:
    assert declared() == functions._ARGUMENTS


@pytest.mark.parametrize("name", kernels.available())
def test_every_library_has_every_function(name: str) -> None:
    library = kernels.load(name)
    for function in functions._ARGUMENTS:
        assert any(hasattr(library, function + end) for end in ("", "_f32")), function


@pytest.mark.skipif(
    kernels.library() is None, reason="there are no kernels to run on several threads"
)
def test_team_runs_kernels_and_passes_on_results_and_errors() -> None:
    x, weight = torch.randn(2, 2048), torch.randn(1024, 2048)
    torch.set_num_threads(1)
    expected = linear(x, weight)
    torch.set_num_threads(2)

    def work() -> list[torch.Tensor]:
        large = torch.ones(1 << 18).exp().sum()  # torch would share it among threads of its own
        return [linear(x, weight), in_team(lambda: linear(x, weight)), large]

    def fail(error: BaseException) -> None:
        linear(x, weight)
        raise error

    for _ in range(20):
        once, twice, _ = in_team(work)
        assert torch.equal(once, expected) and torch.equal(twice, expected)
        assert torch.equal(linear(x, weight), expected)
    for error in NotSupported("this"), KeyboardInterrupt(), SystemExit(3):
        with pytest.raises(type(error)) as raised:
            in_team(partial(fail, error))
        assert raised.value is error
    with ThreadPoolExecutor(3) as pool:
        for once, _, _ in pool.map(lambda _: in_team(work), range(30)):
            assert torch.equal(once, expected)
