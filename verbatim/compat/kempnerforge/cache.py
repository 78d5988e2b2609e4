"""`KVCache`, for loops of one's own over a `kv_caches` module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verbatim.compat.integers import integer
from verbatim.errors import InvalidRequest


class KVCache:
    """One layer's keys and values of a batch, in memory taken at once.

    `generate` needs none: the engine keeps K and V in blocks of its own.

    Args:
        batch_size: rows; each has the same length.
        max_seq_len: positions there is room for.
        n_kv_heads, head_dim: of the layer.
        dtype, device: of the memory; what is put in is converted, where the kind of number stays.

    Attributes:
        k, v: `[batch_size, n_kv_heads, max_seq_len, head_dim]`, zero where nothing is yet.
        seq_len: positions that are there.

    Raises:
        InvalidRequest: a size that is no integer above 0, or memory that can't be had.
    """

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {
            "batch_size": batch_size,
            "n_kv_heads": n_kv_heads,
            "max_seq_len": max_seq_len,
            "head_dim": head_dim,
        }
        shape = [integer(name, value, 1) for name, value in sizes.items()]
        try:
            with torch.inference_mode(False):  # its memory is written to in any mode
                self.k = torch.zeros(shape, dtype=dtype, device=device)
                self.v = torch.zeros(shape, dtype=dtype, device=device)
        except (TypeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(f"K and V of {shape}, {dtype} on {device}: {reason}") from None
        self.seq_len = 0

    @property
    def nbytes(self) -> int:
        """Memory of K and V together."""
        return self.k.nbytes + self.v.nbytes

    def update(self, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor]:
        """Append rows; no gradient flows through them.

        Args:
            k_new, v_new: `[batch_size, n_kv_heads, T, head_dim]`.

        Returns:
            Views of all keys and all values so far, `[batch_size, n_kv_heads, seq_len, head_dim]`.

        Raises:
            InvalidRequest: other shapes, a dtype that the cache's can't hold, or more positions than there
                is room for; the cache is as it was then.
        """
        rows, heads, room, width = self.k.shape
        for name, new in (("k_new", k_new), ("v_new", v_new)):
            self._check_kind(name, new)
            fits = new.dim() == 4 and (new.shape[0], new.shape[1], new.shape[3]) == (
                rows,
                heads,
                width,
            )
            if not fits or new.shape[2] != k_new.shape[2]:
                raise InvalidRequest(
                    f"{name} is {list(new.shape)}; this cache takes [{rows}, {heads}, T, {width}], with "
                    "one T for both"
                )
        end = self.seq_len + k_new.shape[2]
        if end > room:
            raise InvalidRequest(
                f"{self.seq_len} positions and {k_new.shape[2]} new ones make {end}; this cache has "
                f"room for max_seq_len={room}"
            )
        self.k[:, :, self.seq_len : end] = k_new.detach()
        self.v[:, :, self.seq_len : end] = v_new.detach()
        self.seq_len = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def _check_kind(self, name: str, new: Any) -> None:
        if not isinstance(new, Tensor):
            raise InvalidRequest(f"{name} is {type(new).__name__}; it must be a tensor")
        nowhere = new.layout != torch.strided or (new.is_meta and not self.k.is_meta)
        if nowhere or not torch.can_cast(new.dtype, self.k.dtype):
            raise InvalidRequest(
                f"{name} is {new.dtype}, {new.layout} on {new.device}; this cache takes dense tensors "
                f"that become {self.k.dtype} on {self.k.device}"
            )
