"""`generate` and `sample` with KempnerForge's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

import verbatim
from verbatim.checks import integer
from verbatim.compat.kempnerforge.filters import filters
from verbatim.errors import InvalidRequest, PromptTooLong
from verbatim.llm import LLM
from verbatim.tensors import engine_of


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

    Temperature 0 takes the largest logit, the lowest id of several, and no filter runs. Otherwise the
    order is temperature, top-k, top-p. Row b draws with sample index b.

    Args:
        top_k: 0 keeps all; more than V keeps all.
        top_p: 1.0 keeps all; 0 keeps one id.
        seed, position: as in `verbatim.sample`: with `generate`'s seed, and at each step the length of the
            rows so far, a loop draws `generate`'s tokens. By default, one number is drawn from torch's
            default generator.

    Raises:
        InvalidRequest: a value out of range, a row without a token that can be drawn, or one of seed
            and position without the other.
    """
    _check_has_data("logits", logits)
    width = logits.shape[-1] if isinstance(logits, Tensor) and logits.dim() else 0
    if seed is None and position is None and _is_greedy(temperature):
        seed, position = 0, 0  # greedy: leave torch's generator alone
    return verbatim.sample(
        logits, **filters(temperature, top_k, top_p, width), seed=seed, position=position
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
        eos_token_id: ends a row, and pads it. None: only the length ends a row;
            the model's end-of-sequence ids are ignored.
        seed: for all rows; row b has sample index b. None draws one from torch's default generator.

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
    _check_has_data("prompt_tokens", prompt_tokens)
    rows = prompt_tokens if prompt_tokens.dim() == 2 else prompt_tokens[None]
    num_new = integer("max_new_tokens", max_new_tokens, 0)
    eos = None if eos_token_id is None else integer("eos_token_id", eos_token_id, 0)
    if seed is None and _is_greedy(temperature):
        seed = 0
    llm = engine_of(model)
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
        **filters(temperature, top_k, top_p, llm.engine.admission.vocab_size),
    )
    return tokens if prompt_tokens.dim() == 2 else tokens[0]


def _check_has_data(name: str, x: Any) -> None:
    """Refuse a tensor without data; other types are refused later, with the expected shape."""
    if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_meta):
        raise InvalidRequest(
            f"{name} is {x.layout} on {x.device}; it must be dense, and hold values"
        )


def _check_length(llm: LLM, prompt_length: int, max_new_tokens: int) -> None:
    total = prompt_length + max_new_tokens
    if total > llm.max_length:
        source = llm.engine.admission.limit_source
        where = "" if source == "max_seq_len" else f" (here: {source})"
        raise PromptTooLong(
            f"{prompt_length} tokens of prompt and max_new_tokens={max_new_tokens} make {total}, which "
            f"exceeds model max_seq_len={llm.max_length}{where}"
        )


def _is_greedy(temperature: Any) -> bool:
    return isinstance(temperature, Real) and temperature is not False and temperature == 0
