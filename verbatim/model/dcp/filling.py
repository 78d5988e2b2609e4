"""Assignment of a checkpoint's tensors to a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from verbatim.errors import ModelError
from verbatim.model.dcp.folder import DcpCheckpoint

# Prefixes that FSDP, DDP, activation checkpointing and torch.compile add to names.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_OPTIMIZERS = ("optimizer.", "optim.")


@dataclass(frozen=True, slots=True)
class Destination:
    """One tensor of a checkpoint and its target.

    Attributes:
        key: its name, without the prefix of the saved model.
        into: a view of a parameter or buffer, of the stored size.
        arrange: reorders the stored tensor, if `into` has another order.
        spare: `into` is shared and filled by another piece; this one may be missing, else must be equal.
    """

    key: str
    into: Tensor
    arrange: Callable[[Tensor], Tensor] | None = None
    spare: bool = False


def pieces_by_name(module: nn.Module) -> list[Destination]:
    """Return the pieces of a checkpoint with the names of the module's state dict."""
    return [Destination(name, tensor) for name, tensor in tensors_of(module).items()]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a shared one by each of its names."""
    return {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}


def checked_pieces(
    checkpoint: DcpCheckpoint, pieces: Sequence[Destination], ignored: Iterable[str] = ()
) -> list[tuple[str, Destination]]:
    """Return the pieces to read, in order, with their names in the checkpoint, all checked.

    Args:
        ignored: patterns of names that may be unused.

    Raises:
        ModelError: tensors that are missing, unused, of another size, or damaged.
    """
    names = names_in(checkpoint, [piece.key for piece in pieces])
    wanted = _checked(checkpoint, names, pieces)
    _check_left_over(checkpoint.folder, names, {piece.key for piece in pieces}, ignored)
    checkpoint.check(names[piece.key] for piece in wanted)
    return [(names[piece.key], piece) for piece in wanted]


def stored_dtype(checkpoint: DcpCheckpoint, pieces: Sequence[Destination]) -> torch.dtype:
    """Return the floating dtype of most of the stored weights; float32 if there is none."""
    names = names_in(checkpoint, [piece.key for piece in pieces])
    amount: dict[torch.dtype, int] = {}
    for piece in pieces:
        if piece.key in names and checkpoint.dtype(names[piece.key]).is_floating_point:
            dtype = checkpoint.dtype(names[piece.key])
            amount[dtype] = amount.get(dtype, 0) + piece.into.numel()
    return max(amount, key=lambda dtype: amount[dtype], default=torch.float32)


def names_in(checkpoint: DcpCheckpoint, keys: Sequence[str]) -> dict[str, str]:
    """Map plain names to those in the checkpoint, for tensors with the model's prefix.

    Args:
        keys: some plain names, to find the prefix.
    """
    plain: dict[str, str] = {}
    for name in checkpoint.keys:
        short = _WRAPPERS.sub("", name)
        if short in plain:
            raise ModelError(f"{checkpoint.folder}: {plain[short]} and {name} are one name")
        plain[short] = name
    prefix = _prefix(checkpoint.folder, plain, keys)
    return {
        short[len(prefix) :]: name
        for short, name in plain.items()
        if short.startswith(prefix) and (prefix or not short.startswith(_OPTIMIZERS))
    }


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


def _checked(
    checkpoint: DcpCheckpoint, names: dict[str, str], pieces: Sequence[Destination]
) -> list[Destination]:
    """Return the present pieces, in order; the first of a shared tensor fills it."""
    filled: set[tuple[int, ...]] = set()
    wanted, missing = [], []
    for piece in sorted(pieces, key=lambda piece: piece.key not in names):
        place = (piece.into.data_ptr(), piece.into.numel(), *piece.into.stride())
        if piece.key in names:
            size = checkpoint.size(names[piece.key])
            if size != tuple(piece.into.shape):
                raise ModelError(
                    f"{checkpoint.folder}: {names[piece.key]} is {list(size)}, and by the config it is "
                    f"{list(piece.into.shape)}"
                )
            dtype = checkpoint.dtype(names[piece.key])
            if piece.into.is_floating_point() and not dtype.is_floating_point:
                raise ModelError(
                    f"{checkpoint.folder}: {names[piece.key]} is {dtype}: weights must be floating-point "
                    "numbers"
                )
            spare = place in filled and piece.into.numel() > 0
            wanted.append(Destination(piece.key, piece.into, piece.arrange, spare))
            filled.add(place)
        elif place not in filled:
            missing.append(piece.key)
    if missing:
        raise ModelError(
            f"{checkpoint.folder} lacks {len(missing)} of {len(pieces)} tensors, such as "
            f"{', '.join(sorted(missing)[:3])}"
        )
    return wanted


def _check_left_over(
    folder: Path, names: dict[str, str], known: set[str], ignored: Iterable[str]
) -> None:
    patterns = [re.compile(pattern) for pattern in ignored]
    left = [
        name
        for short, name in names.items()
        if short not in known and not any(pattern.search(short) for pattern in patterns)
    ]
    if left:
        raise ModelError(
            f"{folder} has {len(left)} tensors that the model by the config has not, such as "
            f"{', '.join(sorted(left)[:3])}"
        )


def unequal(checkpoint: DcpCheckpoint, name: str) -> ModelError:
    """Return the error for a shared tensor with two different stored values."""
    return ModelError(
        f"{checkpoint.folder}: by the config {name} is shared with another tensor of the model, "
        "and the two are not equal"
    )
