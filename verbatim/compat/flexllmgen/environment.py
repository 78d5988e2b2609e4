"""`ExecutionEnv`: the three tiers, of which the disk has a folder."""

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
    """Where something can lie.

    Attributes:
        name: "gpu", "cpu" or "disk".
        path: of the disk, the folder that is written to. None: the system's for temporary files.
    """

    name: str
    path: Path | None = None


@dataclass(frozen=True, eq=False)
class ExecutionEnv:
    """The machine, as `OptLM` takes it. `ExecutionEnv.create(folder)` makes one.

    On a machine without a GPU the gpu tier is RAM, like the cpu tier.
    """

    gpu: Tier = Tier("gpu")
    cpu: Tier = Tier("cpu")
    disk: Tier = Tier("disk")
    _models: weakref.WeakSet[_Closable] = field(default_factory=weakref.WeakSet, repr=False)

    @classmethod
    def create(cls, offload_dir: str | os.PathLike[str]) -> ExecutionEnv:
        """One whose disk tier is `offload_dir`, which is made if it isn't there.

        What is written there has no name, and nothing is left behind; weights are read from the
        checkpoint itself, not copied.

        Raises:
            InvalidRequest: no path, or one of a file. TierFailed: the folder can't be made.
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
        """End the threads that read and write, and so close every `OptLM` that was opened here.

        Again does nothing.
        """
        for model in list(self._models):
            model.close()
