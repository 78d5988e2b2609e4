"""`Records`: the answer file of a batch, which can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from verbatim.common.files import open_nonblocking
from verbatim.errors import InvalidRequest, VerbatimError
from verbatim.serve.errors import json_pieces

_HEAD = b'{"id":"batch_req_'
# Errors of lines without a unique custom_id, which are identified by line number.
NAMELESS = ("invalid_line", "duplicate_custom_id")


class Records:
    """The answers of a batch, one JSON object per line, in order of completion.

    A second run on the same file resumes it: a line cut by a killed run is removed, the others are kept.

    Attributes:
        path: path of the answer file, created if missing.
        source: path of the request file.
        done: custom_ids of all answered lines.
        answered_lines: numbers of answered lines without a unique custom_id.
        num_records: lines in the file.
        num_errors: lines without an answer of status 200.
        first_identity: model name and numerics key of the first answer, or None.

    Raises:
        InvalidRequest: not an answer file, or one of the two is not a regular file.
        VerbatimError: one can't be opened, or another run writes to the answers.
    """

    def __init__(self, path: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
        self.path, self.source = Path(path), Path(source)
        self._check_source()
        self.done: set[str] = set()
        self.answered_lines: set[int] = set()
        self.num_records = self.num_errors = 0
        self.first_identity: tuple[str, str] | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise VerbatimError(f"can't write to {path}: {error.strerror}") from None
        try:
            self._begin()
        except BaseException:
            os.close(self._fd)
            raise

    def _check_source(self) -> None:
        try:
            with open(self.source, "rb", opener=open_nonblocking) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise InvalidRequest(f"{self.source} must be a regular file")
        except OSError as error:
            raise VerbatimError(f"can't read {self.source}: {error.strerror}") from None
        if os.path.exists(self.path) and os.path.samefile(self.path, self.source):
            raise InvalidRequest(f"{self.source}: answers can't be written to the request file")

    def _begin(self) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise InvalidRequest(
                f"{self.path} must be a regular file, so that a batch can be resumed"
            )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the process
        except BlockingIOError:
            raise VerbatimError(f"another run is writing to {self.path}") from None
        except OSError as error:
            raise VerbatimError(f"can't lock {self.path}: {error.strerror}") from None
        self._size = 0
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            number = 0
            # The start is checked first, because other files may have lines of any length.
            while head := file.readline(len(_HEAD)):
                number += 1
                if not _HEAD.startswith(head):
                    raise self._not_an_answer(number)
                line = head + file.readline()
                if line.endswith(b"\n"):
                    try:
                        self._count(json.loads(line))
                    except (ValueError, LookupError, TypeError, RecursionError):
                        raise self._not_an_answer(number) from None
                    self._size += len(line)
        self._cut()

    def _count(self, record: dict[str, Any]) -> None:
        """Count a record; raise LookupError, TypeError or ValueError if it is not a record."""
        custom_id, response, error = (record[name] for name in ("custom_id", "response", "error"))
        if (response is None) == (error is None):
            raise ValueError
        status = None if response is None else response["status_code"]
        if error is not None and error["code"] in NAMELESS:
            self.answered_lines.add(error["line"])
        else:
            self.done.add(custom_id)
        if status == 200 and self.first_identity is None:
            body = response["body"]
            self.first_identity = body["model"], body["system_fingerprint"]
        self.num_records += 1
        self.num_errors += status != 200

    def _not_an_answer(self, number: int) -> InvalidRequest:
        return InvalidRequest(
            f"{self.path}, line {number}: not a batch answer; use another output file"
        )

    def answer(self, custom_id: str, status: int, body: dict[str, Any]) -> None:
        """Append an answer."""
        response = {"status_code": status, "request_id": f"req_{uuid4().hex}", "body": body}
        self._add({"custom_id": custom_id, "response": response, "error": None})

    def fault(self, custom_id: str | None, code: str, message: str, line: int) -> None:
        """Append the error of an invalid line of the batch."""
        error = {"code": code, "message": message, "line": line}
        self._add({"custom_id": custom_id, "response": None, "error": error})

    def _add(self, record: dict[str, Any]) -> None:
        """Append a line, completely or not at all; raise VerbatimError if it can't be written."""
        line = b"".join(json_pieces({"id": f"batch_req_{uuid4().hex}"} | record, tail=b"\n"))
        remaining = memoryview(line)
        try:
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
        except OSError as failed:
            with suppress(OSError):
                self._cut()
            raise VerbatimError(f"can't write to {self.path}: {failed.strerror}") from None
        self._size += len(line)
        self._count(record)

    def _cut(self) -> None:
        """Truncate the file after the last complete line."""
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, self._size)

    def close(self) -> None:
        """Flush to disk, and release the file's lock."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                os.fsync(fd)
            os.close(fd)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
