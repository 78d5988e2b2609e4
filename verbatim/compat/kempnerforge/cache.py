"""`KVCache`, for loops of one's own over a `kv_caches` module."""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.errors import InvalidRequest


class KVCache:
    """One layer's keys and values of a batch, in memory taken at once.

    `generate` needs none: the engine keeps K and V in blocks of its own.

    Args:
        batch_size: rows; each has the same length.
        max_seq_len: positions there is room for.
        n_kv_heads, head_dim: of the layer.
        dtype, device: of the memory; what is put in is converted.

    Attributes:
        k, v: `[batch_size, n_kv_heads, max_seq_len, head_dim]`, zero where nothing is yet.
        seq_len: positions that are there.

    Raises:
        InvalidRequest: a size that is no integer above 0.
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
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name}={value!r}: must be an integer, 1 or more")
        self.k = torch.zeros(*sizes.values(), dtype=dtype, device=device)
        self.v = torch.zeros(*sizes.values(), dtype=dtype, device=device)
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
            InvalidRequest: other shapes, or more positions than there is room for; the cache is as it
                was then.
        """
        rows, heads, room, width = self.k.shape
        for name, new in (("k_new", k_new), ("v_new", v_new)):
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
