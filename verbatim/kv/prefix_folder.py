"""`PrefixFolder`: cached prefixes in files, which survive a restart.

Each block and each recurrent state is a file: a digest, then the bytes of `Runner.read_cache`. Its name is a
hash of the token ids up to the block's end, the model, and all else that determines the bits. A file that
does not match its name and digest is deleted, and counts as missing.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.common.files import atomic_write
from verbatim.errors import EngineClosed, InvalidRequest
from verbatim.kv.blocks import BlockPool
from verbatim.protocols import Runner

Entry = tuple[str, bytes]  # kind ("blocks" or "states"), key

_DIGEST_BYTES = 32
_COPY_BYTES = 4 << 20  # bytes copied between two engine steps
_PAUSE_S = 0.02  # between two copies
_READ_BYTES = 32 << 20  # bytes read at a time
_MAX_PENDING = 1 << 17  # entries to write; more are dropped
_FLUSH_S = 30.0  # time limit for writing the pending entries in `finish`
_ABANDONED_S = 600.0  # age above which an unfinished file is deleted, as its process was killed
# A block counts as one second older for each block before it, so that prefixes are evicted from their ends.
_AGE_NS = 10**9
_log = logging.getLogger("verbatim")


class PrefixFolder:
    """A folder of cached prefixes, which several processes may share.

    A thread copies new blocks between engine steps, a few at a time, and writes them; it ends when none are
    pending. The least recently used files are deleted to stay within `max_bytes`.

    Args:
        path: the folder; created with access for its owner only, if it is missing.
        max_bytes: limit for the total size of files; each additional process can exceed it by a sixteenth.
        model: identifier of the model, and of everything else that determines the bits of K and V.
        pools: pools of the blocks ("blocks") and of the slots of states ("states").

    Attributes:
        between_steps: function that calls its argument while no step runs, and returns the result.

    Raises:
        InvalidRequest: the folder can't be used.
        NotSupported: the runner's K and V can't be read.
    """

    between_steps: Callable[[Callable[[], Any]], Any]

    def __init__(
        self, path: Path, max_bytes: int, model: str, runner: Runner, pools: Mapping[str, BlockPool]
    ) -> None:
        self.path = path.absolute()  # the working directory may change
        self.max_bytes = max_bytes
        self._runner, self._pools = runner, pools
        self._nbytes: dict[str, int] = {}
        for kind in pools:
            first = runner.read_cache(kind, [0])
            assert first is not None
            self._nbytes[kind] = first.shape[1]
        self._model = f"{model} {self._nbytes}".encode()
        self._counts = dict.fromkeys(("hits", "misses", "bytes_read", "bytes_written"), 0)
        self._off_reason: str | None = None  # why reading and writing stopped
        self._write_error: str | None = None  # why writing stopped
        self._pending = OrderedDict[Entry, int]()  # depths of entries to write, or to mark as used
        self._lock = threading.Lock()  # guards `_pending` and `_thread`
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._free_bytes = 0  # bytes that may be written before the next `_sweep`
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise InvalidRequest(
                    f"prefix_folder={str(path)!r}: must be owned by this user and inaccessible to "
                    "others (chmod 700): its contents reveal prompts"
                )
            self._sweep(0)
        except OSError as error:
            raise InvalidRequest(f"prefix_folder={str(path)!r}: {error.strerror}") from None

    def stats(self) -> dict[str, Any]:
        """Return hits and misses in blocks, bytes read and written, and why the folder is off, or None."""
        return {**self._counts, "off": self._off_reason or self._write_error}

    # ---- reading: called by the owner of the engine

    def has(self, kind: str, key: bytes) -> bool:
        """Return whether a file exists, possibly damaged."""
        return self._off_reason is None and os.path.exists(self._file(kind, key))

    def count_leading(self, keys: list[bytes]) -> int:
        """Return the number of leading keys for which a block file exists."""
        count = next((i for i, key in enumerate(keys) if not self.has("blocks", key)), len(keys))
        self._counts["misses"] += len(keys) - count
        return count

    def load(self, kind: str, keys: list[bytes]) -> int:
        """Read entries into free blocks or slots up to the first missing one; return their number."""
        pool, nbytes = self._pools[kind], self._nbytes[kind]
        count, done = max(1, _READ_BYTES // max(1, nbytes)), 0
        while done < len(keys):
            chunk = keys[done : done + count]
            rows = torch.empty(len(chunk), nbytes, dtype=torch.uint8)
            num_read = 0
            while num_read < len(chunk) and self._read(kind, chunk[num_read], rows[num_read]):
                num_read += 1
            numbers = pool.take(num_read)
            try:
                is_written = not num_read or self._runner.write_cache(
                    kind, numbers, rows[:num_read]
                )
                if is_written:
                    pairs = zip(numbers, chunk[:num_read], strict=True)
                    numbers = [pool.remember(number, key) for number, key in pairs]
            finally:
                pool.release(numbers)
            done += num_read if is_written else 0
            if num_read < len(chunk) or not is_written:
                break
        if kind == "blocks":
            self._counts["hits"] += done
            self._counts["misses"] += len(keys) - done
        self._counts["bytes_read"] += done * nbytes
        return done

    def _read(self, kind: str, key: bytes, into: Tensor) -> bool:
        """Read one file; return whether it exists and is undamaged."""
        path, view = self._file(kind, key), into.numpy().data
        try:
            with path.open("rb") as file:
                digest = file.read(_DIGEST_BYTES)
                is_whole = file.readinto(view) == len(view) and not file.read(1)
            if is_whole and digest == _digest(path.name, view):
                return True
            path.unlink()  # so that it is written again
        except OSError:
            pass
        return False

    # ---- writing

    def queue(self, kind: str, keys: Iterable[bytes], first: int) -> None:
        """Queue entries, after `first` blocks, to be written, or to be marked as used if they have files."""
        with self._lock:
            if self._off_reason is not None or self._write_error is not None:
                return
            for depth, key in enumerate(keys, first):
                if len(self._pending) < _MAX_PENDING:
                    self._pending[kind, key] = depth
            if self._pending and self._thread is None:
                # Not a daemon thread, which would copy tensors while the interpreter shuts down.
                thread = threading.Thread(target=self._run, name="verbatim-prefixes", daemon=False)
                with suppress(RuntimeError):  # threads can't start during shutdown
                    thread.start()
                    self._thread = thread

    def stop(self, reason: str) -> None:
        """Stop reading and writing."""
        with self._lock:
            self._off_reason = self._off_reason or reason
            self._pending.clear()

    def finish(self) -> None:
        """Write the pending entries, and stop. The caller must not own the engine."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_FLUSH_S)
        self.stop("closed")

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._thread = None
                    return
                kind = next(iter(self._pending))[0]
                count = max(1, _COPY_BYTES // max(1, self._nbytes[kind]))
                same_kind = (entry for entry in self._pending if entry[0] == kind)
                entries = list(itertools.islice(same_kind, count))
                depths = {key: self._pending.pop((kind, key)) for _, key in entries}
            try:
                self._save(kind, depths)
            except EngineClosed:
                self.stop("closed")
            except Exception as error:  # requests go on without the folder
                cause = getattr(error, "strerror", None) or error
                self._write_error = f"{self.path} can't be written: {cause}"
                _log.warning("prefix_folder: %s; prefixes are no longer written", self._write_error)
                with self._lock:
                    self._pending.clear()

    def _save(self, kind: str, depths: dict[bytes, int]) -> None:
        """Write the entries that have no file, and mark the others as used."""
        missing = [key for key, depth in depths.items() if not _touch(self._file(kind, key), depth)]
        if not missing:
            return

        def copy() -> tuple[list[bytes], Tensor | None]:
            pool = self._pools[kind]
            # After a weight update, the same keys have other contents.
            cached = [key for key in missing if self._off_reason is None and pool.has(key)]
            numbers = [pool.find([key])[0] for key in cached]
            return cached, self._runner.read_cache(kind, numbers) if numbers else None

        keys, rows = self.between_steps(copy)
        for key, row in zip(keys, [] if rows is None else rows, strict=rows is not None):
            self._write(self._file(kind, key), row.numpy().data, depths[key])
        self._closing.wait(_PAUSE_S)

    def _write(self, path: Path, data: memoryview, depth: int) -> None:
        size = _DIGEST_BYTES + len(data)
        if size > self.max_bytes:
            return
        if size > self._free_bytes:
            self._sweep(size)
        with atomic_write(path) as file:
            file.write(_digest(path.name, data))
            file.write(data)
        _touch(path, depth)
        self._free_bytes -= size
        self._counts["bytes_written"] += size

    def _sweep(self, size: int) -> None:
        """Delete abandoned files, and the least recently used ones until `size` more bytes fit."""
        files, total = [], 0
        for entry in os.scandir(self.path):
            with suppress(FileNotFoundError):  # another process deleted it
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if entry.name.endswith(".kv"):
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
                    total += status.st_size
                elif entry.name.endswith(".part") and status.st_mtime < time.time() - _ABANDONED_S:
                    os.unlink(entry.path)
        if total + size > self.max_bytes:
            for _, nbytes, path in sorted(files):
                if total + size <= self.max_bytes - self.max_bytes // 16:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(path)
                total -= nbytes
        self._free_bytes = min(self.max_bytes - total, max(size, self.max_bytes // 16))

    def _file(self, kind: str, key: bytes) -> Path:
        name = hashlib.blake2b(self._model + kind.encode() + key, digest_size=32).hexdigest()
        return self.path / f"{name}.kv"


def _digest(name: str, data: memoryview) -> bytes:
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES)
    digest.update(data)
    return digest.digest()


def _touch(path: Path, depth: int) -> bool:
    """Mark a file as used now; return whether it exists."""
    used = time.time_ns() - depth * _AGE_NS
    try:
        os.utime(path, ns=(used, used))
    except FileNotFoundError:
        return False
    return True
