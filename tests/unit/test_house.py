"""The rooms (layers) of the package: a file imports only from its own and lower rooms, without cycles.

Imports are read from the source. Those in functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

import verbatim

# From low to high: a room imports only from rooms listed before it.
ROOMS = """
    _version storyteller errors common
    options params batch
    kernels quantization
    text sampling
    core protocols
    kv
    model weights
    placement
    engine
    draft
    api
    verbatim
    rl
    verify bench serve cli compat
    __main__
""".split()


def read_imports() -> dict[str, set[str]]:
    """Map each file of the package to the files that it imports, by dotted names."""
    root = Path(verbatim.__file__).parent
    paths = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in root.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        graph[name] = imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name} has a relative import"
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    imported.add(whole if whole in paths else str(node.module))
        imported &= paths.keys() - {name}
    return graph


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return read_imports()


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def test_files_have_no_import_cycles(imports: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_list_of_rooms_is_complete_and_unique(imports: dict[str, set[str]]) -> None:
    assert {room(name) for name in imports} == set(ROOMS)
    assert len(set(ROOMS)) == len(ROOMS)


def test_no_file_imports_from_a_higher_room(imports: dict[str, set[str]]) -> None:
    """As the order is total, rooms have no import cycles either."""
    level = {name: i for i, name in enumerate(ROOMS)}
    upward = [
        f"{a} imports {b}"
        for a in sorted(imports)
        for b in sorted(imports[a])
        if level[room(b)] > level[room(a)]
    ]
    assert not upward, "\n".join(upward)


def test_diagrams_of_placement_match_its_imports(imports: dict[str, set[str]]) -> None:
    """Imports that are implied by others are not drawn."""
    inside = "verbatim.placement."
    files = {a: {b for b in imports[a] if b.startswith(inside)} for a in imports if inside in a}

    def below(name: str) -> set[str]:
        return files[name].union(*map(below, files[name]))

    expected = {
        (a.removeprefix(inside).replace(".", "/"), b.removeprefix(inside).replace(".", "/"))
        for a, direct in files.items()
        for b in direct - set().union(*map(below, direct))
    }
    text = (Path(__file__).parents[2] / "docs/structure.md").read_text(encoding="utf-8")
    drawn = {
        (a, b)
        for a, targets in re.findall(r"^    (\S+) --> (.+)$", text, re.MULTILINE)
        for b in targets.split(" & ")
    }
    assert drawn == expected


def test_no_test_file_imports_another() -> None:
    """Shared code of tests is in `tests/support`, so that a test file can be read, moved and run by itself.

    Read as text, for imports in functions and in programs that tests start. Such a program may import the
    file that starts it.
    """
    tests = Path(__file__).parents[1]
    modules = {path.stem: path for path in tests.rglob("test_*.py")}
    found = [
        f"{path.relative_to(tests)} imports {name}"
        for path in sorted(tests.rglob("*.py"))
        for line in re.findall(
            r"^\W*(?:from|import) .*", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        for name in re.findall(r"\btest_\w+", line)
        if modules.get(name, path) != path
    ]
    assert not found, "\n".join(found)
