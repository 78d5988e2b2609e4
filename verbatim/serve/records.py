"""`Records`: a batch's answers in a file that grows by whole lines, and what is in it already."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from verbatim.errors import InvalidRequest, VerbatimError
from verbatim.files import without_waiting
from verbatim.serve.errors import to_bytes

_HEAD = b'{"id":"batch_req_'
# Of lines that have no custom_id of their own, so that the number of the line tells them apart.
NAMELESS = ("invalid_line", "duplicate_custom_id")


class Records:
    """The answers to the lines of a batch, one JSON object a line, in the order in which they end.

    A second run on the same file goes on: what a killed one left of a line is cut off, the rest stays.

    Attributes:
        path: of the file; it is made where it isn't there.
        done: the custom_ids of all lines that are answered.
        told: the numbers of the lines of the batch that are answered and have none.
        num_records: lines in the file.
        num_errors: of those, the ones that are no answer of status 200.
        begun_with: the model's name and numerics key of the first answer; None where there is none.

    Raises:
        InvalidRequest: the file is something else than a batch's answers, or no plain file.
        VerbatimError: it can't be opened, or another run writes to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.done: set[str] = set()
        self.told: set[int] = set()
        self.num_records = self.num_errors = 0
        self.begun_with: tuple[str, str] | None = None
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

    def _begin(self) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise InvalidRequest(
                f"{self.path} must be a regular file, so that a batch can be resumed"
            )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it goes with the process
        except BlockingIOError:
            raise VerbatimError(f"another run is writing to {self.path}") from None
        except OSError as error:
            raise VerbatimError(f"can't lock {self.path}: {error.strerror}") from None
        self._size = 0
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            number = 0
            # The beginning first: a file of something else may have a line of any length.
            while head := file.readline(len(_HEAD)):
                number += 1
                if not _HEAD.startswith(head):
                    raise self._foreign(number)
                line = head + file.readline()
                if line.endswith(b"\n"):
                    self._read(number, line)
                    self._size += len(line)
        self._cut()

    def _read(self, number: int, line: bytes) -> None:
        """Note a whole line that was there."""
        try:
            record = json.loads(line)
            custom_id, response, error = (
                record[name] for name in ("custom_id", "response", "error")
            )
            ours = record["id"].startswith("batch_req_")
            status = None if response is None else response["status_code"]
            code = None if error is None else error["code"]
            if not ours or (code is None) == (status is None):
                raise ValueError
            if code in NAMELESS:
                self.told.add(error["line"])
            else:
                self.done.add(custom_id)
            if status == 200 and self.begun_with is None:
                body = response["body"]
                self.begun_with = body["model"], body["system_fingerprint"]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise self._foreign(number) from None
        self.num_records += 1
        self.num_errors += status != 200

    def _foreign(self, number: int) -> InvalidRequest:
        return InvalidRequest(
            f"{self.path}, line {number}: not a batch answer; use another output file"
        )

    def answer(self, custom_id: str, status: int, body: dict[str, Any]) -> None:
        """Write what a server would have answered."""
        response = {"status_code": status, "request_id": f"req_{uuid4().hex}", "body": body}
        self._add(custom_id, response, None)
        self.num_errors += status != 200

    def fault(self, custom_id: str | None, code: str, message: str, line: int) -> None:
        """Write why a line of the batch is no request."""
        self._add(custom_id, None, {"code": code, "message": message, "line": line})
        self.num_errors += 1

    def _add(
        self, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> None:
        """A whole line, or nothing of it.

        Raises:
            VerbatimError: the disk is full, or the like.
        """
        record = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id}
        line = to_bytes(record | {"response": response, "error": error}) + b"\n"
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as failed:
            with suppress(OSError):
                self._cut()
            raise VerbatimError(f"can't write to {self.path}: {failed.strerror}") from None
        self._size += len(line)
        self.num_records += 1

    def _cut(self) -> None:
        """Take away what stands behind the last whole line."""
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, self._size)

    def close(self) -> None:
        """Let the disk have everything, and another run the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                os.fsync(fd)
            os.close(fd)

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def check_source(source: str | os.PathLike[str]) -> Path:
    """The file of requests, if it is one.

    Raises:
        InvalidRequest: it is no plain file.
        VerbatimError: it can't be read.
    """
    path = Path(source)
    try:
        with open(path, "rb", opener=without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidRequest(f"{path} must be a regular file")
    except OSError as error:
        raise VerbatimError(f"can't read {path}: {error.strerror}") from None
    return path
