"""`verbatim.generate`: tensors in, tensors out, for training code and custom loops."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import InvalidRequest
from verbatim.llm import LLM
from verbatim.params import SamplingParams

# One engine for each live module that was ever given, gone when its module is.
_engines: weakref.WeakKeyDictionary[nn.Module, LLM] = weakref.WeakKeyDictionary()
_engines_lock = threading.Lock()


def engine_of(model: LLM | nn.Module) -> LLM:
    """`model` itself if it is an open LLM, else the one engine kept for this module."""
    if isinstance(model, LLM):
        return model
    if not isinstance(model, nn.Module):
        raise InvalidRequest(f"model={model!r}: must be an LLM or a transformers module")
    with _engines_lock:
        engine = _engines.get(model)
        if engine is None:
            engine = _engines[model] = LLM(model, _weak=True)
        return engine


def generate(
    model: LLM | nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    *,
    pad_token_id: int | None = None,
    **params: Any,
) -> Tensor:
    """Continue each row of `input_ids`.

    Args:
        model: a live transformers module, or an open `LLM`.
        input_ids: `[B, P]` int64.
        attention_mask: `[B, P]`, 0 marks padding, on either side; None means there is none. Padding is
            no part of the prompt: a padded row gets the tokens of the row alone.
        max_new_tokens: at most this many new tokens a row; None means up to the length limit.
        pad_token_id: fills a row after its end; None takes the model's pad id, else its
            end-of-sequence id, else 0.
        params: the fields of `SamplingParams` but `n` and `max_tokens`. Row b draws with sample index b
            and `seed`; without a seed one number is drawn from torch's default generator.

    Returns:
        `[B, P + N]` int64, an ordinary tensor on `input_ids`' device: the input as given, then the new
        tokens, N being the most that any row got.

    Raises:
        InvalidRequest: wrong shapes, a row that is all padding, a parameter out of range.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        raise InvalidRequest("input_ids must be an integer tensor of shape [batch, prompt]")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise InvalidRequest(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}"
        )
    for name in ("n", "max_tokens"):
        if name in params:
            raise InvalidRequest(f"{name} is not taken here: one row each, max_new_tokens long")
    if params.get("seed") is None:
        params["seed"] = int(torch.randint(2**53, ()))
    settings = SamplingParams(max_tokens=max_new_tokens, **params)
    llm = engine_of(model)
    prompts = [_row(input_ids, attention_mask, b) for b in range(input_ids.shape[0])]
    new = llm._generate_rows(prompts, settings)
    width = max(map(len, new), default=0)
    pad = llm._pad_id() if pad_token_id is None else pad_token_id
    with torch.inference_mode(False):
        tail = torch.tensor([row + [pad] * (width - len(row)) for row in new], dtype=torch.int64)
        tail = tail.reshape(len(new), width).to(input_ids.device)
        return torch.cat([input_ids.long(), tail], dim=1)


def _row(input_ids: Tensor, attention_mask: Tensor | None, b: int) -> list[int]:
    row = input_ids[b] if attention_mask is None else input_ids[b][attention_mask[b].bool()]
    if not len(row):
        raise InvalidRequest(f"row {b} of input_ids holds no token")
    return [int(i) for i in row.tolist()]
