"""`ExecutionEnv`: the three tiers."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from verbatim.errors import InvalidRequest, TierFailed


class _Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier of memory.

    Attributes:
        name: "gpu", "cpu" or "disk".
        path: the folder of the disk tier; None is the system's folder for temporary files.
    """

    name: str
    path: Path | None = None


@dataclass(frozen=True, eq=False)
class ExecutionEnv:
    """The tiers of a machine; `ExecutionEnv.create(folder)` returns one.

    On a machine without a GPU the gpu tier is RAM, like the cpu tier.
    """

    gpu: Tier = Tier("gpu")
    cpu: Tier = Tier("cpu")
    disk: Tier = Tier("disk")
    _models: weakref.WeakSet[_Closable] = field(default_factory=weakref.WeakSet, repr=False)

    @classmethod
    def create(cls, offload_dir: str | os.PathLike[str]) -> ExecutionEnv:
        """Return an environment with `offload_dir` as its disk tier; create the folder if missing.

        Files there are unnamed, and nothing is left behind; weights are read from the
        checkpoint itself, not copied.

        Raises:
            InvalidRequest: not a path, or the path of a file. TierFailed: the folder can't be created.
        """
        if not isinstance(offload_dir, str | os.PathLike) or not os.fspath(offload_dir):
            raise InvalidRequest(f"offload_dir={offload_dir!r}: must be the path of a folder")
        folder = Path(os.path.abspath(os.path.expanduser(offload_dir)))
        if folder.exists() and not folder.is_dir():
            raise InvalidRequest(f"offload_dir={offload_dir!r} is a file; it must be a folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TierFailed(
                f"disk tier: can't make the folder {folder}: {error.strerror}"
            ) from error
        return cls(disk=Tier("disk", folder))

    def close_copy_threads(self) -> None:
        """Close every `OptLM` of this environment, with its reading and writing threads.

        A second call does nothing.
        """
        for model in list(self._models):
            model.close()
