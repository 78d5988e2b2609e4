"""`KVCache`, for custom loops over a `kv_caches` module."""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.checks import integer
from verbatim.errors import InvalidRequest


class KVCache:
    """The preallocated K and V of one layer, for a batch.

    `generate` does not use it: the engine stores K and V in blocks.

    Args:
        batch_size: rows, all of the same length.
        max_seq_len: capacity in positions.
        n_kv_heads, head_dim: of the layer.
        dtype, device: of the cache; new values are converted by `torch.can_cast`'s rules.

    Attributes:
        k, v: `[batch_size, n_kv_heads, max_seq_len, head_dim]`, zero where unused.
        seq_len: positions in use.

    Raises:
        InvalidRequest: a size below 1 or not an integer, or memory that can't be allocated.
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
            with torch.inference_mode(False):  # it may be written to in any mode
                self.k = torch.zeros(shape, dtype=dtype, device=device)
                self.v = torch.zeros(shape, dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(f"K and V of {shape}, {dtype} on {device}: {reason}") from None
        self.seq_len = 0

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.k.nbytes + self.v.nbytes

    def update(self, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor]:
        """Append positions, without gradients.

        Args:
            k_new, v_new: `[batch_size, n_kv_heads, T, head_dim]`.

        Returns:
            Views of all K and V so far, `[batch_size, n_kv_heads, seq_len, head_dim]`.

        Raises:
            InvalidRequest: wrong shapes, a dtype that can't be converted, or more positions than
                `max_seq_len`; the cache is then unchanged.
        """
        rows, heads, room, width = self.k.shape
        for name, new in (("k_new", k_new), ("v_new", v_new)):
            if not isinstance(new, Tensor):
                raise InvalidRequest(f"{name} is {type(new).__name__}; it must be a tensor")
            no_data = new.layout != torch.strided or (new.is_meta and not self.k.is_meta)
            if no_data or not torch.can_cast(new.dtype, self.k.dtype):
                raise InvalidRequest(
                    f"{name} is {new.dtype}, {new.layout} on {new.device}; this cache takes dense tensors "
                    f"that become {self.k.dtype} on {self.k.device}"
                )
            if new.dim() != 4 or new.shape != (rows, heads, k_new.shape[2], width):
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
