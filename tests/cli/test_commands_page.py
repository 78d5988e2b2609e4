"""Every command line of docs/commands.md runs, in a folder with the models and files that it names."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import verbatim.storyteller
from verbatim.cli.commands import app

PAGE = Path(__file__).parents[2] / "docs/commands.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STORYTELLER = Path(verbatim.storyteller.__file__).parent
FOX = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
BODY = {"prompt": "The fox", "max_tokens": 4}
REQUEST = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": BODY}
# Lines that do not run here, and why.
NOT_RUN = {
    "cluster start": "Ray on several machines",
    "cluster join": "Ray on several machines",
    "cluster status": "Ray on several machines",
    "cluster stop": "it stops every Ray process of this machine",
    "--cluster": "Ray on several machines",
    "--openvino": "an export of the model, and OpenVINO",
}


def lines() -> list[str]:
    text = PAGE.read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```sh")
    return [line for block in blocks for line in block.splitlines() if line]


def run(line: str) -> Result:
    """Run a shell line: `verbatim ...`, optionally with a trailing comment or an echo piped into it."""
    text, _, command = line.rpartition(" | ")
    name, *arguments = shlex.split(command, comments=True)
    assert name == "verbatim"
    echoed = " ".join(shlex.split(text)[1:]) + "\n" if text else None
    return CliRunner().invoke(app, arguments, input=echoed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Qwen").mkdir()
    for name in ("Qwen/Qwen3-0.6B", "big-model", "my-model"):
        (tmp_path / name).symlink_to(STORYTELLER, target_is_directory=True)
    for name in ("prompt.txt", "story.txt"):
        (tmp_path / name).write_text("Once upon a time\n")
    (tmp_path / "fox.json").write_text(json.dumps(FOX))
    (tmp_path / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_excluded_lines_are_on_the_page() -> None:
    for part in NOT_RUN:
        assert any(part in line for line in lines()), part
    assert sum(not any(part in line for part in NOT_RUN) for line in lines()) > 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for line in lines() if not any(part in line for part in NOT_RUN)]
)
def test_command_line_of_docs_page_runs(line: str, folder: Path) -> None:
    if "--plot" in line:
        pytest.importorskip("matplotlib")
    done = run(line)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() or (folder / "answers.jsonl").stat().st_size
