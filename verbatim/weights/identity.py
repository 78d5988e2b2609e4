"""Identity of a model folder, equal on machines with the same files."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from verbatim.errors import ModelError
from verbatim.model.loader import LoadedModel
from verbatim.weights.lazy import Stored, sources, stamp_of

_GLIMPSES = 1024  # tensors at most that a fingerprint looks into
_GLIMPSE_BYTES = 64


def fingerprint(loaded: LoadedModel) -> str:
    """Return a digest of where a skeleton's weights lie, and of a little of each.

    It is the same on machines with the same files.

    Raises:
        ModelError: they can't be read.
    """
    assert loaded.lazy_weights is not None
    stored = {
        f"{s.path.name} {s.name} {s.offset} {s.dtype} {s.shape} {s.stamp and s.stamp[2]}": s
        for lazy in loaded.lazy_weights.values()
        for s in sources(lazy)
    }
    lines = set(stored)
    # Two fine-tunes of a model differ in nothing but their numbers.
    some = [stored[line] for line in sorted(stored)][:: -(-len(stored) // _GLIMPSES) or 1]
    try:
        lines |= {f"{s.path.name} {s.offset} {_glimpse(s).hex()}" for s in some}
    except OSError as error:
        raise ModelError(f"its weights can't be read: {error}") from None
    module: Any = loaded.module
    config = dict(module.config.to_dict())
    for name in ("_name_or_path", "transformers_version"):  # where it was loaded from, and by whom
        config.pop(name, None)
    lines.add(json.dumps(config, sort_keys=True, default=str))
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=16).hexdigest()


def _glimpse(stored: Stored) -> bytes:
    """A few bytes from the middle of a tensor."""
    with stored.path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), _GLIMPSE_BYTES, stored.offset + stored.nbytes // 2)


def changed(loaded: LoadedModel) -> bool:
    """Return whether a skeleton's files were changed or removed since it was opened."""
    assert loaded.lazy_weights is not None
    stamps = {s.path: s.stamp for lazy in loaded.lazy_weights.values() for s in sources(lazy)}
    for path, stamp in stamps.items():
        try:
            with path.open("rb") as file:
                if stamp_of(file.fileno()) != stamp:
                    return True
        except OSError:
            return True
    return False
