"""A disk cache of quantized weights, so that a model is quantized once and not each time it is opened.

The user's cache (`$XDG_CACHE_HOME/verbatim`, else `~/.cache/verbatim`) has a safetensors file for each
folder, format and dtype. Its metadata has the checkpoint's fingerprint and a checksum of each tensor. A
damaged file, or one of another checkpoint, is ignored and written again. Files are replaced atomically, so
several processes may open the model at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from verbatim.errors import ModelError, first_line
from verbatim.files import replacing
from verbatim.model.loader import LoadedModel
from verbatim.model.quantization import Quantization
from verbatim.model.stored import read_stored, stored_in
from verbatim.options import dtype_name
from verbatim.weights.files import bytes_of
from verbatim.weights.identity import files_digest
from verbatim.weights.lazy import sources

FORMAT = 3  # version of the file format and of the packed layouts
THREADS = 2
_MIN_BYTES = 32_000_000  # smaller models have no cache, as they are quantized in moments
_ABANDONED_S = 3600  # age at which an unfinished file belongs to a killed process


class PackedCache:
    """The cache file of the quantized weights of one model.

    Args:
        loaded: a skeleton, with weights in safetensors files or a DCP checkpoint.
        quantization: the format of its weights.

    Attributes:
        path: the file; None if the model is small, or there is no home folder: nothing is cached.
    """

    def __init__(self, loaded: LoadedModel, quantization: Quantization) -> None:
        self.path: Path | None = None
        assert loaded.lazy_weights is not None and loaded.folder is not None
        parts = [s for lazy in loaded.lazy_weights.values() for s in sources(lazy)]
        root = _root()
        if root is None or sum(s.nbytes for s in parts) < _MIN_BYTES:
            return
        dtype = dtype_name(next(iter(loaded.lazy_weights)).dtype)
        kind = quantization.of_weights.name  # quantized activations do not change the bytes
        where = f"{loaded.folder}\n{kind}\n{dtype}"
        digest = hashlib.blake2b(where.encode(), digest_size=8).hexdigest()
        self.path = root / f"{loaded.folder.name[:80]}-{kind}-{digest}.safetensors"
        made_of = f"{files_digest(loaded)} {FORMAT} {kind} {dtype}"
        self._key = hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()

    def read(
        self, expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> tuple[dict[str, Tensor], dict[str, list[float]]] | None:
        """Return the tensors, and the two sums of the quantization error of each; None if not cached.

        Args:
            expected: the dtype and shape of every tensor.
        """
        if self.path is None or not os.path.isfile(self.path):
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                meta = json.loads(file.metadata()["packed"])
            stored = stored_in(self.path)
            if meta["key"] != self._key or expected != {
                name: (s.dtype, s.shape) for name, s in stored.items()
            }:
                return None
            with ThreadPoolExecutor(THREADS) as pool:
                tensors = dict(zip(stored, pool.map(read_stored, stored.values()), strict=True))
                found = dict(zip(tensors, pool.map(_sum, tensors.values()), strict=True))
            error = {name: [float(a), float(b)] for name, (a, b) in meta["error"].items()}
            return (tensors, error) if found == meta["crc32"] else None
        except (SafetensorError, ModelError, OSError, ValueError, LookupError, TypeError):
            return None
        except (AttributeError, RecursionError):  # of damaged metadata
            return None

    def write(self, tensors: Mapping[str, Tensor], error: Mapping[str, Sequence[float]]) -> None:
        """Write the tensors to the cache, or warn with the reason if that fails."""
        if self.path is None:
            return
        with ThreadPoolExecutor(THREADS) as pool:
            sums = dict(zip(tensors, pool.map(_sum, tensors.values()), strict=True))
        # One entry: safetensors writes several in random order, and equal caches are to be equal files.
        told = json.dumps({"key": self._key, "crc32": sums, "error": dict(error)})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(self.path.parent)
            with replacing(self.path) as file:
                save_file(dict(tensors), file.name, {"packed": told})
        except (OSError, SafetensorError) as problem:
            why = getattr(problem, "strerror", None) or first_line(problem)
            warnings.warn(
                f"the packed weights can't be kept in {self.path} ({why}), so they are packed again whenever "
                "the model is opened",
                RuntimeWarning,
                stacklevel=2,
            )


def _sweep(folder: Path) -> None:
    """Delete unfinished files of processes that were killed."""
    for path in folder.glob("*.part"):
        with suppress(OSError):  # another process was faster
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()


def _root() -> Path | None:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # as the XDG standard requires
        return Path(named) / "verbatim"
    try:
        return Path.home() / ".cache" / "verbatim"
    except RuntimeError:
        return None


def _sum(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor)) if tensor.nbytes else 0
