"""Reads text of limited size from files, pipes and stdin; writes files atomically; checks hub ids."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from verbatim.errors import InvalidRequest, ModelError, first_line

MAX_TEXT_BYTES = 64 << 20
_HUB_TIMEOUT_S = 5.0  # timeout of the request that checks whether the hub is reachable


def read_file(name: str, path: str | os.PathLike[str], limit: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a file of at most `limit` bytes, without its final newline."""
    try:
        with open(path, "rb", opener=open_nonblocking) as file:
            is_terminal = file.isatty()
            is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
            os.set_blocking(file.fileno(), True)
            data = b"" if is_terminal else file.read(limit + 1)
    except OSError as error:
        raise InvalidRequest(f"can't read {name}: {error.strerror or error}") from None
    if is_terminal:
        raise InvalidRequest(f"{name} is a terminal; must be a file or a pipe")
    if is_pipe and not data:
        raise InvalidRequest(f"{name} is a pipe without a writer")
    return _text(name, data, limit)


def read_stdin() -> str:
    """Return the text on stdin, as `read_file` does."""
    try:
        data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"can't read stdin: {error.strerror or error}") from None
    return _text("stdin", data, MAX_TEXT_BYTES)


def hub_arguments(named: str, revision: str | None) -> dict[str, Any]:
    """Return transformers' arguments for a hub id: from the cache only, if the hub can't be reached.

    The hub is tried once here, as the libraries would repeat each request for half a minute.

    Raises:
        ModelError: not a hub id; or the hub can't be reached, and the cache doesn't have the model.
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.file_download import repo_folder_name

    try:
        folder = repo_folder_name(repo_id=named, repo_type="model")
    except ValueError as error:
        raise ModelError(
            f"no model at {named!r}: there is no such folder, and it is not a hub id: "
            f"{first_line(error)}"
        ) from None
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # from httpx, requests or the user's own session
        cached = Path(constants.HF_HUB_CACHE, folder)
        if not cached.is_dir():
            raise ModelError(
                f"no model at {named!r}: there is no such folder, {cached.parent} has no such hub id, and "
                f"{constants.ENDPOINT} can't be reached: {first_line(error)}"
            ) from None
        return {"revision": revision, "local_files_only": True}
    return {"revision": revision}


def _text(name: str, data: bytes, limit: int) -> str:
    if len(data) > limit:
        raise InvalidRequest(f"{name} is larger than {limit} bytes, the limit")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise InvalidRequest(
            f"{name} is not UTF-8 text: byte 0x{byte:02x} at offset {error.start}"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def lines_of(file: BinaryIO, limit: int) -> Iterator[tuple[bytes | None, int]]:
    """Yield the lines of a file, each with its length in bytes; None for a line longer than `limit`."""
    while line := file.readline(limit + 1):
        length, whole = len(line), len(line) <= limit
        if not whole:
            while not line.endswith(b"\n") and (line := file.readline(limit)):
                length += len(line)
        yield line if whole else None, length


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking, even a pipe without a writer; an `opener` for `open`."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def atomic_write(path: Path, prefix: str = "") -> Iterator[BinaryIO]:
    """Write a file atomically: the block writes to a temporary file, which then replaces `path`.

    A killed process leaves a file that ends in ".part" in the folder of `path`. If `path` is a link, its
    target is replaced; a device or a pipe is written to directly.

    Raises:
        OSError: the file can't be written.
    """
    if path.exists() and not path.is_file():  # such as `/dev/stdout`, perhaps an unnamed pipe
        with open(path, "wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".part")
    try:
        with open(unfinished, "wb", opener=lambda *_: handle) as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
