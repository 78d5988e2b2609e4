"""Files and streams of the user: endless, unreadable and missing input is rejected by name."""

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
from verbatim.common.files import MAX_TEXT_BYTES, atomic_write, read_file
from verbatim.errors import InvalidRequest, ModelError
from verbatim.model.kempner.config import KempnerConfig
from verbatim.params import MAX_STRUCTURE_CHARS
from verbatim.serve.records import Records


@pytest.fixture
def sparse(tmp_path):
    """A sparse file of 10 GB, which takes no disk space."""
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
def test_cli_rejects_files_larger_than_the_limit(args, source, sparse):
    path = str(sparse) if source == "sparse" else source
    done = run(*(arg.format(path) for arg in args))
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    limit = 4 * MAX_STRUCTURE_CHARS if args[-1].startswith("@") else 64 << 20
    assert line == f"verbatim: {args[-1].format(path)} is larger than {limit} bytes, the limit"


def test_config_toml_larger_than_the_limit_is_rejected(sparse):
    with pytest.raises(ModelError, match=r"sparse is larger than 67108864 bytes"):
        KempnerConfig.read(sparse)


def test_pipe_is_read_to_its_end_or_rejected_without_a_writer(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InvalidRequest, match=r"^@p is a pipe without a writer"):
        read_file("@p", path)
    read_end, write_end = os.pipe()  # as for <(...) in a shell
    writer = threading.Timer(0.2, lambda: (os.write(write_end, b"late\n"), os.close(write_end)))
    writer.start()
    assert read_file("@p", f"/dev/fd/{read_end}") == "late"
    writer.join()
    os.close(read_end)


def test_terminal_and_folder_are_rejected(tmp_path):
    controller, terminal = os.openpty()
    try:
        with pytest.raises(InvalidRequest, match=r"^@x is a terminal"):
            read_file("@x", os.ttyname(terminal))
    finally:
        os.close(controller)
        os.close(terminal)
    with pytest.raises(InvalidRequest, match=r"^can't read @x: Is a directory"):
        read_file("@x", tmp_path)


def test_grammar_file_is_accepted_up_to_the_size_limit(tmp_path):
    path = tmp_path / "grammar"
    grammar = 'start: "' + "é" * (MAX_STRUCTURE_CHARS - 9) + '"'
    path.write_text(grammar + "\n")
    assert run("generate", "x", "--grammar", f"@{path}").exit_code == 0
    assert ScriptedLLM.last.params[0].grammar == grammar
    path.write_text(grammar + " ")
    done = run("generate", "x", "--grammar", f"@{path}")
    assert f"grammar has {MAX_STRUCTURE_CHARS + 1} characters" in done.stderr


def test_chat_rejects_a_line_larger_than_the_limit():
    done = run("chat", input=b"Hi\n" + bytes(MAX_TEXT_BYTES + 1))
    assert done.exit_code == 1
    assert done.stderr.endswith("verbatim: stdin: line 2 is larger than 67108864 bytes\n")


def test_invalid_file_of_batch_answers_is_rejected_from_its_first_line(sparse):
    with pytest.raises(InvalidRequest, match=r"sparse, line 1: not a batch answer"):
        Records(sparse, __file__)


@pytest.mark.slow
def test_endless_stdin_is_rejected():
    with open("/dev/zero") as zero:
        done = subprocess.run([*VERBATIM, "generate"], stdin=zero, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "verbatim: stdin is larger than 67108864 bytes, the limit\n"


@pytest.mark.parametrize("error", [OSError("no route"), TimeoutError("timed out")])
def test_hub_id_is_requested_only_once_without_a_network(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub libraries would retry each request for half a minute."""

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


def test_replacing_a_file_keeps_symlinks_and_named_pipes(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(tmp_path / "pipe") as file:
        file.write(b"new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "pipe"]


def test_replacing_writes_to_anonymous_pipes_and_self_links(tmp_path):
    reader, writer = os.pipe()
    with atomic_write(Path(f"/dev/fd/{writer}")) as file:
        file.write(b"new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    os.close(writer)
    (tmp_path / "loop").symlink_to("loop")
    with atomic_write(tmp_path / "loop") as file:
        file.write(b"new")
    assert (tmp_path / "loop").read_bytes() == b"new"
