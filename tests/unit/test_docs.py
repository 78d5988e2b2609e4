"""Every Python block of the README, the quickstart and the Python page runs, with the built-in model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's, of dcp.save
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/python.md"])
def test_python_blocks_of_page_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run all blocks in one namespace and a fresh folder, as a reader would paste them."""
    text = (ROOT / page).read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```py") > 0
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        # Empty lines before the block make tracebacks give line numbers of the page.
        exec(compile("\n" * line + block[1], str(ROOT / page), "exec"), namespace)
    assert len(capsys.readouterr().out.split()) > 10
