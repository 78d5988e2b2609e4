"""`verbatim.generate`: tensors in, tensors out, for training code and custom loops."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import EngineClosed, InvalidRequest, ModelChanged
from verbatim.llm import LLM
from verbatim.params import SamplingParams

# One engine per live module, dropped with its module.
_engines: weakref.WeakKeyDictionary[nn.Module, LLM] = weakref.WeakKeyDictionary()
_engines_lock = threading.Lock()  # held briefly: opening and refreshing wait for other forwards


def engine_of(model: LLM | nn.Module) -> LLM:
    """Return `model` itself if it is an LLM, else the engine kept for this module."""
    if isinstance(model, LLM):
        return model
    if not isinstance(model, nn.Module):
        raise InvalidRequest(
            f"model={model!r}: must be an LLM, or a module, either transformers' or one with kv_caches"
        )
    while (kept := _kept(model)) is not None:
        try:
            kept.engine.runner.refresh()
            if not kept.engine.closed:
                return kept
        except (ModelChanged, EngineClosed):
            pass
        with _engines_lock:
            if _engines.get(model) is kept:
                del _engines[model]
        kept.close()
    opened = LLM(model, _weak=True)
    with _engines_lock:
        engine = _engines.setdefault(model, opened)
    if engine is not opened:  # another thread was faster
        opened.close()
    return engine


def _kept(model: nn.Module) -> LLM | None:
    with _engines_lock:
        return _engines.get(model)


def generate(
    model: LLM | nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | None = None,
    *,
    pad_token_id: int | None = None,
    **params: Any,
) -> Tensor:
    """Complete each row of `input_ids`.

    Args:
        model: a live module, either transformers' or one with `kv_caches`; or an open `LLM`.
        input_ids: `[B, P]` int64.
        attention_mask: `[B, P]` of 0 and 1, or bool; 0 marks padding, before or after a row's tokens.
            None: no padding. Padding is not part of the prompt: a padded row gets the same tokens as
            without padding.
        max_new_tokens: maximum new tokens per row; None: up to the length limit.
        pad_token_id: id that fills a row after its end. None: the model's pad id, else its
            end-of-sequence id, else 0.
        params: fields of `SamplingParams`, except `n`, `max_tokens` and those that request more than
            ids (`logprobs`, `prompt_logprobs`, `hidden_states`, `record_routing`, `record_indices`). Row b
            draws with sample index b and `seed`; without a seed, one is drawn from torch's default generator.

    Returns:
        `[B, P + N]` int64, an ordinary tensor on `input_ids`' device: the input, then the new tokens;
        N is the length of the longest completion.

    Raises:
        InvalidRequest: wrong shapes, a row with padding only, a parameter out of range.
    """
    check_padded(input_ids, attention_mask)
    _check_names(params)
    if pad_token_id is not None and (
        isinstance(pad_token_id, bool) or pad_token_id != int(pad_token_id)
    ):
        raise InvalidRequest(f"pad_token_id={pad_token_id!r}: must be an integer or None")
    if params.get("seed") is None:
        params["seed"] = int(torch.randint(2**53, ()))
    settings = SamplingParams(max_tokens=max_new_tokens, **params)
    llm = engine_of(model)
    prompts = rows_of(input_ids, attention_mask)
    new = llm._generate_rows(prompts, settings)
    width = max(map(len, new), default=0)
    pad = llm.pad_token_id if pad_token_id is None else pad_token_id
    with torch.inference_mode(False):
        tail = torch.tensor([row + [pad] * (width - len(row)) for row in new], dtype=torch.int64)
        tail = tail.reshape(len(new), width).to(input_ids.device)
        return torch.cat([input_ids.long(), tail], dim=1)


_NOT_TAKEN = frozenset(
    "n max_tokens logprobs prompt_logprobs hidden_states record_routing record_indices".split()
)


def _check_names(params: dict[str, Any]) -> None:
    known = set(SamplingParams.__slots__) - _NOT_TAKEN
    for name in params:
        if name in _NOT_TAKEN:
            raise InvalidRequest(
                f"{name} is not accepted here: one completion per row, max_new_tokens long, ids only"
            )
        if name not in known:
            raise InvalidRequest(
                f"{name} is unknown; SamplingParams has {', '.join(sorted(known))}"
            )


def check_padded(input_ids: Any, attention_mask: Any, *, name: str = "input_ids") -> None:
    """Raise InvalidRequest unless these are ids `[rows, length]`, padded only at the ends of rows.

    Args:
        name: name of the ids in messages.
    """
    plain = isinstance(input_ids, Tensor) and input_ids.ndim == 2
    if not plain or input_ids.dtype not in _ID_DTYPES or input_ids.device.type == "meta":
        raise InvalidRequest(f"{name} must be an integer tensor of shape [rows, length]")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        shape = getattr(attention_mask, "shape", type(attention_mask).__name__)
        raise InvalidRequest(
            f"attention_mask has shape {shape}; it must be a tensor of {name}' shape, {input_ids.shape}"
        )
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise InvalidRequest("attention_mask must hold only 0 (padding) and 1 (a token)")
    edges = attention_mask.long().diff(
        dim=1, prepend=torch.zeros_like(attention_mask[:, :1]).long()
    )
    if ((edges == 1).sum(dim=1) > 1).any():
        raise InvalidRequest("attention_mask has padding in the middle of a row")


_ID_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def rows_of(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the ids of each row, without padding.

    Raises:
        InvalidRequest: a row with padding only.
    """
    return [_row(input_ids, attention_mask, b) for b in range(input_ids.shape[0])]


def _row(input_ids: Tensor, attention_mask: Tensor | None, b: int) -> list[int]:
    row = input_ids[b] if attention_mask is None else input_ids[b][attention_mask[b].bool()]
    if not len(row):
        raise InvalidRequest(f"row {b} of input_ids has no tokens")
    return [int(i) for i in row.tolist()]
