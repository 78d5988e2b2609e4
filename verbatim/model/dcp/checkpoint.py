"""A DCP checkpoint on disk: one folder, or one per pipeline stage."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from verbatim.errors import ModelError
from verbatim.model.dcp.folder import FILE, DcpFolder
from verbatim.model.stored import Stored, read_stored

_LATEST = "latest"
_STAGE = re.compile(r"^pp(\d+)$")
# Prefixes that FSDP, DDP, activation checkpointing and torch.compile add to names.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_OPTIMIZERS = ("optimizer.", "optim.")


def find_dcp(source: str | os.PathLike[str]) -> Path | None:
    """Return the resolved folder of the DCP checkpoint at a path, or None.

    It is the folder itself, or the target of `latest` in it.

    Raises:
        ModelError: `latest` is broken or not a checkpoint; or the folder can't be read.
    """
    folder = Path(os.path.expanduser(source))
    if _is_dcp(folder):
        return folder.resolve()
    if os.path.exists(folder / "config.json"):  # in Hugging Face's format
        return None
    latest = folder if folder.name == _LATEST else folder / _LATEST
    if not os.path.lexists(latest):
        return None
    if not os.path.exists(latest):
        raise ModelError(f"{latest} leads to {os.readlink(latest)!r}, and that is not there")
    if not _is_dcp(latest):
        raise ModelError(f"{latest} leads to {latest.resolve()}, which holds no {FILE}")
    return latest.resolve()


def _is_dcp(folder: Path) -> bool:
    # os.path returns False for names that are too long, where Path raises.
    return os.path.isfile(folder / FILE) or bool(_stages(folder))


def _stages(folder: Path) -> list[Path]:
    """Return `pp0`, `pp1`, ... in order."""
    if not os.path.isdir(folder):
        return []
    try:
        paths = list(folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder} can't be read: {error.strerror or error}") from None
    found = [(int(m[1]), p) for p in paths if (m := _STAGE.match(p.name)) and os.path.isdir(p)]
    return [path for _, path in sorted(found)]


class DcpCheckpoint:
    """The tensors of a checkpoint, by name.

    Args:
        folder: the result of `find_dcp`.

    Raises:
        ModelError: a stage is missing, or a `.metadata` is unreadable or refused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._home: dict[str, list[DcpFolder]] = {}
        for number, path in enumerate([folder] if (folder / FILE).is_file() else _stages(folder)):
            if path is not folder and path.name != f"pp{number}":
                raise ModelError(f"{folder} has a stage {path.name} and no pp{number}")
            if not (path / FILE).is_file():
                raise ModelError(f"{path} holds no {FILE}: it was not saved to its end")
            opened = DcpFolder(path)
            for key in opened.keys:
                self._home.setdefault(key, []).append(opened)

    def names(self, keys: Sequence[str]) -> dict[str, str]:
        """Map plain names to those in the checkpoint, for tensors with the model's prefix.

        Args:
            keys: some plain names, to find the prefix.

        Raises:
            ModelError: two tensors have one name, or none has a name of `keys`.
        """
        plain: dict[str, str] = {}
        for name in self._home:
            short = _WRAPPERS.sub("", name)
            if short in plain:
                raise ModelError(f"{self.folder}: {plain[short]} and {name} are one name")
            plain[short] = name
        prefix = _prefix(self.folder, plain, keys)
        return {
            short[len(prefix) :]: name
            for short, name in plain.items()
            if short.startswith(prefix) and (prefix or not short.startswith(_OPTIMIZERS))
        }

    def tensor(self, key: str, read: Callable[[Stored], Tensor] = read_stored) -> Tensor:
        """Return a tensor, as `DcpFolder.tensor` does; ModelError if two stages have it."""
        first, *others = self._home[key]
        for other in others:
            both = f"both {first.folder.name} and {other.folder.name}"
            raise ModelError(f"{self.folder}: {both} hold {key}")
        return first.tensor(key, read)


def _prefix(folder: Path, plain: dict[str, str], keys: Sequence[str]) -> str:
    """Return the prefix of the model's names: "model." of {"model": state_dict}, or ""."""
    for key in keys:
        found = {n[: -len(key)] for n in plain if n == key or n.endswith("." + key)}
        for usual in ("model.", ""):
            if usual in found:
                return usual
        if len(found) > 1:
            raise ModelError(f"{folder}: {key} is there more than once, under {sorted(found)}")
        if found:
            return found.pop()
    raise ModelError(
        f"{folder} holds none of the model's tensors: it wants {', '.join(keys[:2])}, ..., and there "
        f"are {', '.join(sorted(plain)[:3]) or 'none'}; is it another architecture than the config's?"
    )
