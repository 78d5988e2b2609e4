"""Comparisons of fast paths with the reference implementation: equality, tolerances and random operands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


def all_bit_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether two sequences have the same length and `bit_equal` tensors."""
    return len(ours) == len(theirs) and all(map(bit_equal, ours, theirs))


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, with the same dtype and shape."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def largest_error(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of logits `[..., T, V]`.

    In half precision it is the median over rows, as rounding may route a token to another expert.
    """
    if not a.numel():
        return 0.0
    rows = (a - b).abs().amax(-1).float()
    return float(rows.max() if a.dtype == torch.float32 else rows.median())


def tolerance(dtype: torch.dtype, scale: float) -> float:
    """Return the largest error attributed to rounding to `dtype` in logits with magnitudes up to `scale`."""
    return scale * (1e-3 if dtype == torch.float32 else 1e-1)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return normally distributed numbers, reproducible by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


@contextmanager
def trial() -> Iterator[None]:
    """Hide the block from overrides and recordings of torch's functions, without gradients."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.no_grad(),
        torch.inference_mode(False),
    ):
        yield


def copy_of(module: nn.Module, tensor_of: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module without hooks and replaced forwards, which shares its other attributes.

    Args:
        tensor_of: function from name and original of a parameter or buffer to that of the copy.
    """
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        copy = copies[id(module)] = object.__new__(type(module))
        fields = copy.__dict__
        fields.update(
            module.__dict__, _forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict()
        )
        fields.pop("forward", None)  # a patch or a gate would run the original
        for kind in ("_parameters", "_buffers"):
            tensors = module.__dict__[kind].items()
            fields[kind] = {n: None if x is None else tensor_of(n, x) for n, x in tensors}
        children = module._modules.items()
        fields["_modules"] = {n: None if child is None else copied(child) for n, child in children}
        return copy

    return copied(module)
