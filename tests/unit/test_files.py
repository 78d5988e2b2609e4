"""Texts that the user names: what is no text, has no end, or never comes is refused by name."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.checkpoints import hub_snapshot
from support.programs import VERBATIM
from support.scripted_llm import ScriptedLLM, run
from support.toy_tokenizers import byte_level
from support.toys import make_toy
from verbatim import LLM
from verbatim.errors import InvalidRequest, ModelError
from verbatim.files import MAX_TEXT_BYTES, read_file, replacing
from verbatim.model.kempner.config import KempnerConfig
from verbatim.params import MAX_STRUCTURE_CHARS
from verbatim.serve.records import Records


@pytest.fixture
def sparse(tmp_path):
    """A file of 10 GB that takes no disk."""
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 10**10)
    return path


@pytest.mark.parametrize("source", ["/dev/zero", "/dev/urandom", "sparse"])
@pytest.mark.parametrize(
    "args",
    [
        ["generate", "x", "--json-schema", "@{}"],
        ["chat", "--grammar", "@{}"],
        ["generate", "--file", "{}"],
        ["score", "--file", "{}"],
        ["serve", "--api-key-file", "{}"],
    ],
    ids=lambda args: args[-2],
)
def test_a_file_without_end_is_refused(args, source, sparse):
    path = str(sparse) if source == "sparse" else source
    done = run(*(arg.format(path) for arg in args))
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    limit = 4 * MAX_STRUCTURE_CHARS if args[-1].startswith("@") else 64 << 20
    assert line == f"verbatim: {args[-1].format(path)} is larger than {limit} bytes, the limit"


def test_a_toml_without_end_is_refused(sparse):
    with pytest.raises(ModelError, match=r"sparse is larger than 67108864 bytes"):
        KempnerConfig.read(sparse)


def test_a_pipe_is_read_to_its_end_or_refused(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InvalidRequest, match=r"^@p is a pipe without a writer"):
        read_file("@p", path)
    read_end, write_end = os.pipe()  # as a shell's <(...)
    late = threading.Timer(0.2, lambda: (os.write(write_end, b"late\n"), os.close(write_end)))
    late.start()
    assert read_file("@p", f"/dev/fd/{read_end}") == "late"
    late.join()
    os.close(read_end)


def test_a_terminal_and_a_folder_are_refused(tmp_path):
    controller, terminal = os.openpty()
    try:
        with pytest.raises(InvalidRequest, match=r"^@x is a terminal"):
            read_file("@x", os.ttyname(terminal))
    finally:
        os.close(controller)
        os.close(terminal)
    with pytest.raises(InvalidRequest, match=r"^can't read @x: Is a directory"):
        read_file("@x", tmp_path)


def test_a_structure_of_the_largest_size_is_read(tmp_path):
    path = tmp_path / "grammar"
    grammar = 'start: "' + "é" * (MAX_STRUCTURE_CHARS - 9) + '"'
    path.write_text(grammar + "\n")
    assert run("generate", "x", "--grammar", f"@{path}").exit_code == 0
    assert ScriptedLLM.last.params[0].grammar == grammar
    path.write_text(grammar + " ")
    done = run("generate", "x", "--grammar", f"@{path}")
    assert f"grammar has {MAX_STRUCTURE_CHARS + 1} characters" in done.stderr


def test_a_chat_whose_line_has_no_end_is_refused():
    done = run("chat", input=b"Hi\n" + bytes(MAX_TEXT_BYTES + 1))
    assert done.exit_code == 1
    assert done.stderr.endswith("verbatim: stdin: line 2 is larger than 67108864 bytes\n")


def test_answers_that_are_none_are_refused_by_their_beginning(sparse):
    with pytest.raises(InvalidRequest, match=r"sparse, line 1: not a batch answer"):
        Records(sparse, __file__)


@pytest.mark.slow
def test_stdin_without_end_is_refused():
    with open("/dev/zero") as zero:
        done = subprocess.run([*VERBATIM, "generate"], stdin=zero, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "verbatim: stdin is larger than 67108864 bytes, the limit\n"


@pytest.mark.parametrize("error", [OSError("no route"), TimeoutError("timed out")])
def test_a_hub_id_without_a_network_is_looked_for_once(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries repeat each request for half a minute."""

    def no_request(*_: object) -> None:
        raise AssertionError("the hub was asked again")

    asked: list[str] = []

    def head(url: str, timeout: float) -> None:
        asked.append(url)
        raise error

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr("huggingface_hub.utils._http.get_session", no_request)
    snapshot = hub_snapshot(tmp_path, monkeypatch, offline=False)
    expected = f"no such hub id, and https://huggingface.co can't be reached: {error}"
    for call in (lambda: LLM("no/model"), lambda: LLM(tokenizer="no/model")):
        with pytest.raises(ModelError, match=expected):
            call()
    make_toy("llama").save_pretrained(snapshot)
    LLM("some/model", tokenizer=byte_level().hf).close()
    assert asked == ["https://huggingface.co"] * 3


def test_a_file_that_is_replaced_keeps_links_and_devices(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with replacing(tmp_path / "pipe") as file:
        file.write(b"new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "pipe"]


def test_a_pipe_without_a_name_and_a_link_to_itself_are_written_to(tmp_path):
    reader, writer = os.pipe()
    with replacing(Path(f"/dev/fd/{writer}")) as file:
        file.write(b"new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    os.close(writer)
    (tmp_path / "loop").symlink_to("loop")
    with replacing(tmp_path / "loop") as file:
        file.write(b"new")
    assert (tmp_path / "loop").read_bytes() == b"new"
