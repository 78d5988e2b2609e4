"""`generate`, `sample` and `KVCache` with KempnerForge's arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import verbatim
from verbatim.api.llm import LLM
from verbatim.api.padded import check_padded
from verbatim.api.tensors import engine_of
from verbatim.common.checks import integer, optional_integer
from verbatim.compat.kempnerforge.filters import filters, is_zero
from verbatim.errors import InvalidRequest, PromptTooLong


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    seed: int | None = None,
    position: int | Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Draw one id from each row of logits: `[B, V]` to `[B]` int64.

    Temperature 0 takes the largest logit (ties: the lowest id), without filters. Otherwise the order is
    temperature, top-k, top-p. Row b draws with sample index b.

    Args:
        top_k: 0 keeps all; more than V keeps all.
        top_p: 1.0 keeps all; 0 keeps one id.
        seed, position: as in `verbatim.sample`. A loop that passes `generate`'s seed, and the length of the
            rows so far as position, draws the same tokens. By default, one number is drawn from torch's
            default generator.

    Raises:
        InvalidRequest: a value out of range, a row without a token that can be drawn, or only one of
            seed and position.
    """
    if seed is None and position is None and is_zero(temperature):
        seed, position = 0, 0  # greedy: do not advance torch's generator
    return verbatim.sample(
        logits, **filters(temperature, top_k, top_p), seed=seed, position=position
    )


def generate(
    model: LLM | nn.Module,
    prompt_tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue each row of `prompt_tokens` by up to `max_new_tokens` tokens.

    Args:
        model: a module called as `model(tokens, kv_caches=[...])`, a transformers module, or an open
            `LLM`. One engine is kept for a module, as long as the module lives.
        prompt_tokens: `[B, P]` or `[P]`, integers.
        temperature, top_k, top_p: as in `sample`.
        eos_token_id: id that ends a row and pads it. None: only the length ends a row. The model's own
            end-of-sequence ids are ignored.
        seed: shared by all rows; row b has sample index b. None draws it from torch's default generator.

    Returns:
        `[B, P + N]` int64, or `[P + N]` for a single prompt, on the device of `prompt_tokens`: an
        ordinary tensor without gradients. N is the length of the longest completion.

    Raises:
        InvalidRequest: a value out of range, or an empty prompt.
        PromptTooLong: (a ValueError) P + max_new_tokens is over the model's limit.
    """
    if not isinstance(prompt_tokens, Tensor) or prompt_tokens.dim() not in (1, 2):
        shape = getattr(prompt_tokens, "shape", type(prompt_tokens).__name__)
        raise InvalidRequest(f"prompt_tokens is {shape}; it must be a tensor [B, P] or [P]")
    rows = prompt_tokens if prompt_tokens.dim() == 2 else prompt_tokens.unsqueeze(0)
    check_padded(rows, None, name="prompt_tokens")
    num_new = integer("max_new_tokens", max_new_tokens, 0)
    if seed is None and is_zero(temperature):
        seed = 0
    llm = engine_of(model)
    eos = optional_integer("eos_token_id", eos_token_id, 0, llm.engine.admission.vocab_size - 1)
    _check_length(llm, rows.shape[1], num_new)
    tokens = verbatim.generate(
        llm,
        rows,
        None,
        num_new,
        pad_token_id=eos,
        stop_token_ids=() if eos is None else (eos,),
        ignore_eos=True,
        seed=seed,
        **filters(temperature, top_k, top_p),
    )
    return tokens if prompt_tokens.dim() == 2 else tokens[0]


class KVCache:
    """The preallocated K and V of one layer, for a batch.

    `generate` does not use it: the engine stores K and V in blocks.

    Args:
        batch_size: rows, all of the same length.
        max_seq_len: capacity in positions.
        n_kv_heads, head_dim: number of KV heads, and their size.
        dtype, device: of the cache; new values are cast to it if `torch.can_cast` allows it.

    Attributes:
        k, v: `[batch_size, n_kv_heads, max_seq_len, head_dim]`, zero where unused.
        seq_len: positions in use.

    Raises:
        InvalidRequest: a size is not a positive integer, or the memory can't be allocated.
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
            with torch.inference_mode(False):  # so that it can be written in any mode
                self.k = torch.zeros(shape, dtype=dtype, device=device)
                self.v = torch.zeros(shape, dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(f"K and V of {shape}, {dtype} on {device}: {reason}") from None
        self.seq_len = 0

    @property
    def nbytes(self) -> int:
        """Size of K and V together, in bytes."""
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
                    f"{name} is {new.dtype}, {new.layout} on {new.device}; this cache takes dense "
                    f"tensors convertible to {self.k.dtype} on {self.k.device}"
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


def _check_length(llm: LLM, prompt_length: int, max_new_tokens: int) -> None:
    total = prompt_length + max_new_tokens
    if total > llm.max_length:
        source = llm.engine.admission.limit_source
        where = "" if source == "max_seq_len" else f" (here: {source})"
        raise PromptTooLong(
            f"{prompt_length} tokens of prompt and max_new_tokens={max_new_tokens} make {total}, which "
            f"exceeds model max_seq_len={llm.max_length}{where}"
        )
