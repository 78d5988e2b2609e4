"""Digests that identify a model's files: across machines, or on this one."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch
import transformers

from verbatim._version import __version__
from verbatim.errors import ModelError
from verbatim.model.loader import LoadedModel, file_times
from verbatim.model.stored import Stored, stamp_of
from verbatim.weights.lazy import sources

_MAX_SAMPLED = 1024  # maximum tensors that a fingerprint samples
_SAMPLE_BYTES = 64  # per tensor
# Files of a folder that do not affect the logits.
_IGNORED_FILES = frozenset(
    {
        *("generation_config.json", "tokenizer_config.json"),
        *("preprocessor_config.json", "processor_config.json"),
    }
)


def fingerprint(loaded: LoadedModel) -> str:
    """Return a digest of a skeleton's config, the locations of its weights, and samples of their bytes.

    It is equal on machines with the same files. Raises ModelError if a file can't be read.
    """
    assert loaded.lazy_weights is not None
    stored = {
        f"{s.path.name} {s.name} {s.offset} {s.dtype} {s.shape} {s.stamp and s.stamp[2]}": s
        for lazy in loaded.lazy_weights.values()
        for s in sources(lazy)
    }
    lines = set(stored)
    # Fine-tunes of the same model differ only in values.
    sampled = [stored[line] for line in sorted(stored)][:: -(-len(stored) // _MAX_SAMPLED) or 1]
    try:
        lines |= {f"{s.path.name} {s.offset} {_sample(s).hex()}" for s in sampled}
    except OSError as error:
        raise ModelError(f"its weights can't be read: {error}") from None
    lines.add(_config_line(loaded.module))
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=16).hexdigest()


def files_digest(loaded: LoadedModel) -> str:
    """Return a digest that changes with a model's files, its config, and the versions of the libraries.

    Files are identified by name, size, inode and times; the change time can't be forged. A copy of the files
    has another digest.
    """
    paths = [
        path for path in file_times(loaded.folders, loaded.files) if path.name not in _IGNORED_FILES
    ]
    files = sorted((path.name, path.stat()) for path in paths)
    identities = [(n, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for n, s in files]
    module: Any = loaded.module
    versions = [__version__, torch.__version__, transformers.__version__]
    contents = [identities, versions, type(module).__name__, _config_line(module)]
    return hashlib.blake2b(json.dumps(contents).encode(), digest_size=16).hexdigest()


def _config_line(module: Any) -> str:
    """Return a module's config as JSON, without its path and the version of transformers."""
    config = dict(module.config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return json.dumps(config, sort_keys=True, default=str)


def _sample(stored: Stored) -> bytes:
    """Return a few bytes from the middle of a tensor."""
    with stored.path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), _SAMPLE_BYTES, stored.offset + stored.nbytes // 2)


def changed(loaded: LoadedModel) -> bool:
    """Return whether a skeleton's files were changed or removed since it was opened."""
    assert loaded.lazy_weights is not None
    stamps = {s.path: s.stamp for lazy in loaded.lazy_weights.values() for s in sources(lazy)}
    try:
        return any(stamp_of(path) != stamp for path, stamp in stamps.items())
    except OSError:
        return True
