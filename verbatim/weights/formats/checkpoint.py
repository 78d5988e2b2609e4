"""The tensors of a quantized checkpoint, and how codes of a format become the packed layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported
from verbatim.kernels.packed_rows import unfold
from verbatim.model.groups import PIECE, heads_of
from verbatim.model.quantization import GROUP_SIZES, Quantization
from verbatim.model.quantize import pack
from verbatim.model.weight_packing import Encoding, WeightPacking
from verbatim.weights.formats.stored import grouped
from verbatim.weights.lazy import LazyWeight, Stored

# Of the tensors of a matrix: codes `[N, K]`, scales `[N, groups]`, zero points, if the encoding has any.
Codes = Callable[..., tuple[Tensor, Tensor, Tensor | float]]
_LARGEST = 2.0**118  # a scale; FP8 scales are multiplied by 2^8
SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(slots=True)
class QuantizedCheckpoint:
    """The tensors of a quantized checkpoint.

    Attributes:
        left: tensors that no format has taken: those of unquantized modules.
        quantization: `quantization_config` of config.json.
        dtype: of decoded weights.
    """

    folder: Path
    left: dict[str, Stored]
    quantization: Mapping[str, Any]
    dtype: torch.dtype

    def names(self, suffix: str) -> list[str]:
        """Return the names that end in `suffix`, without it."""
        return [name.removesuffix(suffix) for name in self.left if name.endswith(suffix)]

    def take(
        self, name: str, *dtypes: torch.dtype, shape: tuple[int | None, ...] | None = None
    ) -> Stored:
        """Remove and return a tensor.

        Args:
            dtypes: those that it may have; none: any.
            shape: the one that it must have, with None for any size; None: any.

        Raises:
            ModelError: it is missing, or another one.
        """
        if name not in self.left:
            raise ModelError(f"{self.folder} lacks {name}, which its quantization needs")
        tensor = self.left.pop(name)
        fits = shape is None or (
            len(shape) == len(tensor.shape)
            and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
        )
        if not fits or (dtypes and tensor.dtype not in dtypes):
            raise self.wrong(tensor)
        return tensor

    def take_if_there(
        self, name: str, *dtypes: torch.dtype, shape: tuple[int | None, ...] | None = None
    ) -> tuple[Stored, ...]:
        """Remove and return a tensor as `take` does, or nothing."""
        return (self.take(name, *dtypes, shape=shape),) if name in self.left else ()

    def drop(self, *names: str) -> None:
        """Remove what is not needed for the weights, if it is there."""
        for name in names:
            self.left.pop(name, None)

    def option(self, name: str, default: Any, *allowed: Any) -> Any:
        """Return an option of the quantization.

        Raises:
            NotSupported: it is not one of `allowed`.
        """
        value = self.quantization.get(name, default)
        if allowed and value not in allowed:
            raise NotSupported(
                f"{self.folder}: config.json: {name}={str(value)[:80]!r} of its quantization is not "
                f"supported: must be one of {list(allowed)}"
            )
        return value

    def group_size(self, depth: int, size: int) -> int | None:
        """Return the largest of our group sizes that `size` (at most 0: all of a row) is made of."""
        sizes = [size] * (size in GROUP_SIZES) + sorted(GROUP_SIZES, reverse=True)
        return next((g for g in sizes if size <= 0 or size >= depth or size % g == 0), None)

    def grouped(
        self,
        name: str,
        shape: tuple[int, ...],
        encoding: Encoding,
        bits: int,
        size: int,
        codes: Codes,
        parts: tuple[Stored, ...],
        *,
        columns: bool = False,
    ) -> LazyWeight:
        """Return the lazy weight of codes in groups.

        Args:
            size: elements of a group; at most 0: all of a row.
        """
        depth = shape[-2 if columns else -1]
        group = self.group_size(depth, size)
        if group is None:
            raise NotSupported(
                f"{self.folder}: {name} has groups of {size}: must be a multiple of {GROUP_SIZES[0]}"
            )
        kind = Quantization(bits, group, None)
        packing = WeightPacking(shape, self.dtype, kind, columns, encoding=encoding)
        repeat = -(-depth // group) if size <= 0 or size >= depth else size // group
        one, full_name = packing.one, f"{self.folder}: {name}"
        groups = 1 if size <= 0 else -(-depth // size)

        def compute(*tensors: Tensor) -> Tensor:
            code, scale, zero = codes(*tensors)
            zero_shape = zero.shape if isinstance(zero, Tensor) else scale.shape
            if code.shape != (one.width, depth) or not (
                scale.shape == zero_shape == (one.width, groups)
            ):
                raise ModelError(f"{full_name} has codes, scales or zero points of another shape")
            if not bool((scale.float().abs() <= _LARGEST).all()):
                raise ModelError(f"{full_name} has scales that are NaN, infinite or too large")
            if encoding is Encoding.CENTERED:
                if not bool((torch.as_tensor(zero).abs() <= _LARGEST).all()):
                    raise ModelError(
                        f"{full_name} has zero points that are NaN, infinite or too large"
                    )
            elif isinstance(zero, Tensor) and not 0 <= int(zero.min()) <= int(zero.max()) < 256:
                raise ModelError(f"{full_name} has zero points that are not from 0 to 255")
            heads = heads_of(scale.float().contiguous(), zero, encoding)
            return laid_out(code, heads.repeat_interleave(repeat, -1), one)

        return grouped(full_name, packing, compute, parts)

    def rounded(
        self,
        shape: tuple[int, ...],
        values: Callable[..., Tensor],
        parts: tuple[Stored, ...],
        name: str,
    ) -> LazyWeight:
        """Return the lazy weight of values that are rounded to 8 bits in groups of 32."""
        packing = WeightPacking(shape, self.dtype, Quantization(8, 32, None))

        def compute(*tensors: Tensor) -> Tensor:
            return pack(values(*tensors).to(self.dtype).contiguous(), packing, name)

        return grouped(f"{self.folder}: {name}", packing, compute, parts)

    def wrong(self, stored: Stored) -> ModelError:
        """Return the error for a tensor of another shape or dtype."""
        return ModelError(
            f"{self.folder}: {stored.name} is {stored.dtype} {list(stored.shape)}, which is not the shape or "
            "dtype that its quantization says"
        )


def laid_out(code: Tensor, heads: Tensor, packing: WeightPacking) -> Tensor:
    """Return codes `[N, K]` and heads `[N, groups]`, or more of them, as `[packing.nbytes]` uint8."""
    heads = heads[:, : -(-packing.depth // packing.quantization.group_size)]
    out = torch.empty(packing.vectors, packing.vector_bytes, dtype=torch.uint8)
    step = max(1, PIECE // packing.depth)
    for rows, some, head in zip(*(x.split(step) for x in (out, code, heads)), strict=True):
        rows.copy_(packing.join(some, head))
    return out.flatten()


def nibbles(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words `[..., n]` to codes `[..., n * 32 / bits]`, the lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    return data if bits == 8 else unfold(data, 1)
