"""The tensors of a quantized checkpoint, and the conversion of a format's codes to the packed layout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.common.untrusted import reason
from verbatim.errors import ModelError, NotSupported, VerbatimError
from verbatim.kernels.packing import Encoding, Packing, WeightPacking
from verbatim.quantization.formats import GROUP_SIZES
from verbatim.quantization.matrix import pack, pieces
from verbatim.quantization.rows import heads_of, join, unfold
from verbatim.weights.lazy import Computed, LazyWeight, Stored

# Function from the tensors of a matrix to codes `[N, K]`, scales `[N, groups]`, and zero points or 0.0.
Codes = Callable[..., tuple[Tensor, Tensor, Tensor | float]]
_LARGEST = 2.0**118  # largest scale; FP8 scales are multiplied by 2^8
_unpack_lock = threading.Lock()  # one at a time, as unpacked codes take several times the memory
SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(slots=True)
class QuantizedCheckpoint:
    """The tensors of a quantized checkpoint.

    Attributes:
        remaining: tensors not taken yet; at the end, those of unquantized modules.
        quantization: the `quantization_config` of config.json.
        dtype: dtype of decoded weights.
    """

    folder: Path
    remaining: dict[str, Stored]
    quantization: Mapping[str, Any]
    dtype: torch.dtype

    def names(self, suffix: str) -> list[str]:
        """Return the names of remaining tensors that end in `suffix`, without it."""
        return [name.removesuffix(suffix) for name in self.remaining if name.endswith(suffix)]

    def take(
        self, name: str, *dtypes: torch.dtype, shape: tuple[int | None, ...] | None = None
    ) -> Stored:
        """Remove and return a tensor.

        Args:
            dtypes: allowed dtypes; empty: any.
            shape: required shape, with None for a dimension of any size; None: any shape.

        Raises:
            ModelError: the tensor is missing, or has another shape or dtype.
        """
        if name not in self.remaining:
            raise ModelError(f"{self.folder} lacks {name}, which its quantization needs")
        tensor = self.remaining.pop(name)
        fits = shape is None or (
            len(shape) == len(tensor.shape)
            and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
        )
        if not fits or (dtypes and tensor.dtype not in dtypes):
            raise self.wrong(tensor)
        return tensor

    def take_optional(
        self, name: str, *dtypes: torch.dtype, shape: tuple[int | None, ...] | None = None
    ) -> tuple[Stored, ...]:
        """Remove and return a tensor as `take` does; return an empty tuple if it is missing."""
        return (self.take(name, *dtypes, shape=shape),) if name in self.remaining else ()

    def drop(self, *names: str) -> None:
        """Remove unneeded tensors, if present."""
        for name in names:
            self.remaining.pop(name, None)

    def option(self, name: str, default: Any, *allowed: Any) -> Any:
        """Return an option of the quantization.

        Raises:
            NotSupported: the value is not one of `allowed`.
        """
        value = self.quantization.get(name, default)
        if allowed and value not in allowed:
            raise NotSupported(
                f"{self.folder}: config.json: {name}={str(value)[:80]!r} of its quantization is not "
                f"supported: must be one of {list(allowed)}"
            )
        return allowed[allowed.index(value)] if allowed else value  # an integer in place of 4.0

    def group_size(self, depth: int, size: int) -> int | None:
        """Return the largest of `GROUP_SIZES` that divides `size` (0 or less: a row); None if none does."""
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
        """Return the lazy weight of a matrix with codes in groups of `size` (0 or less: whole rows)."""
        depth = shape[-2 if columns else -1]
        group = self.group_size(depth, size)
        if group is None:
            raise NotSupported(
                f"{self.folder}: {name} has groups of {size}: must be a multiple of {GROUP_SIZES[0]}"
            )
        packing = WeightPacking(shape, self.dtype, Packing(bits, group, encoding), columns)
        repeat = -(-depth // group) if size <= 0 or size >= depth else size // group
        matrix, full_name = packing.single, f"{self.folder}: {name}"
        groups = 1 if size <= 0 else -(-depth // size)

        def compute(*tensors: Tensor) -> Tensor:
            code, scale, zero = codes(*tensors)
            zero_shape = zero.shape if isinstance(zero, Tensor) else scale.shape
            if code.shape != (matrix.width, depth) or not (
                scale.shape == zero_shape == (matrix.width, groups)
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
            return packed_codes(code, heads.repeat_interleave(repeat, -1), matrix)

        return grouped(full_name, packing, compute, parts)

    def rounded(
        self,
        shape: tuple[int, ...],
        values: Callable[..., Tensor],
        parts: tuple[Stored, ...],
        name: str,
    ) -> LazyWeight:
        """Return the lazy weight of a matrix that is requantized to 8 bits in groups of 32."""
        packing = WeightPacking(shape, self.dtype, Packing(8, 32))

        def compute(*tensors: Tensor) -> Tensor:
            return pack(values(*tensors).to(self.dtype).contiguous(), packing, name)

        return grouped(f"{self.folder}: {name}", packing, compute, parts)

    def wrong(self, stored: Stored) -> ModelError:
        """Return the error for a tensor of the wrong shape or dtype."""
        return ModelError(
            f"{self.folder}: {stored.name} is {stored.dtype} {list(stored.shape)}, which is not "
            "the shape or dtype that its quantization requires"
        )


def grouped(
    name: str, packing: WeightPacking, compute: Callable[..., Tensor], parts: tuple[Stored, ...]
) -> Computed:
    """Return the lazy weight of a matrix, or of a stack, that is stored packed.

    Args:
        name: name of the matrix, for errors.
        compute: function from the tensors of a matrix `[N, K]` or `[K, N]` to its packed bytes; called
            for each matrix of a stack separately, to limit memory.
        parts: the stored tensors of the matrix.
    """
    shape = packing.shape

    def pack(*tensors: Tensor) -> Tensor:
        """Return the packed bytes `[..., N, row_bytes]`."""
        outer = *shape[:-2], packing.width
        try:
            with _unpack_lock:
                if len(shape) == 2:
                    return compute(*tensors).view(*outer, -1)
                out = torch.empty(shape[0], packing.nbytes // shape[0], dtype=torch.uint8)
                for row, *matrix_parts in zip(out, *tensors, strict=True):
                    row.copy_(compute(*matrix_parts))
                return out.view(*outer, -1)
        except VerbatimError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(
                f"the tensors of {name} do not fit its format: {reason(error)}"
            ) from error

    return Computed(pack, parts, shape=shape, dtype=packing.dtype, packing=packing)


def packed_codes(code: Tensor, heads: Tensor, packing: WeightPacking) -> Tensor:
    """Pack codes `[N, K]` and encoded scales `heads` `[N, groups or more]` into uint8 `[packing.nbytes]`."""
    heads = heads[:, : -(-packing.depth // packing.rows.group)]
    out = torch.empty(packing.num_rows, packing.row_bytes, dtype=torch.uint8)
    for rows, codes, head in pieces(packing.depth, out, code, heads):
        rows.copy_(join(codes, head, packing.rows))
    return out.flatten()


def nibbles(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words `[..., n]` to codes `[..., n * 32 / bits]`, lowest bits first."""
    # Flat, as the last stride of a transposed row is not 1, although it is contiguous.
    data = words.flatten().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    return data if bits == 8 else unfold(data, 1)
