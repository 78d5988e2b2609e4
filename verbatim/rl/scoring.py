"""Log-probs of given rows: equal to the rollout's bit for bit, or with gradients for the loss."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verbatim.checks import number, optional_integer
from verbatim.core import Request
from verbatim.engine.handle import EngineHandle
from verbatim.engine.lockstep import run_together
from verbatim.errors import InvalidRequest
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.placement.kv_caches import speaks_kv_caches
from verbatim.placement.wrapped import unwrap
from verbatim.tensors import check_padded, engine_of, rows_of


def score(
    model: LLM | nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None = None,
    *,
    routing: Tensor | None = None,
    indices: Tensor | None = None,
    adapter: str | None = None,
    process_group: Any = None,
) -> Tensor:
    """Return the log-prob of each token given the tokens before it, at temperature 1, without gradients.

    Equals, bit for bit, what generation reports with the same weights, for any padding and batching.

    Args:
        model: an open LLM, or a live module.
        sequences: `[..., L]` integers, such as `Rollout.sequences`.
        attention_mask: `[..., L]`; 0 marks padding, before or after a row's tokens; a row may be all
            padding. None: no padding.
        routing: `[..., L, layers, k]` int16: experts of the tokens, such as `Rollout.routing`; -1 leaves a
            token to the router.
        indices: `[..., L, layers, k]` int32: keys that the tokens attend to, such as `Rollout.indices`; -1
            leaves a token to the indexer.
        adapter: as `SamplingParams.adapter`.
        process_group: as for `rollout`.

    Returns:
        `[..., L]` float32; 0.0 on a row's first token and on padding.

    Raises:
        InvalidRequest, NotSupported: before any forward runs.
    """
    nonempty: list[int] = []

    def begin() -> tuple[EngineHandle, list[Request]]:
        flat, mask = _flat(sequences, attention_mask)
        nonempty.extend(r for r, row in enumerate(mask.tolist()) if any(row))
        params = _params(sequences, {"routing": routing, "indices": indices}, mask, nonempty)
        llm = engine_of(model)
        rows = rows_of(flat[nonempty], mask[nonempty])
        return llm.engine, [
            llm.engine.admission.admit(row, each.replace(adapter=adapter))
            for row, each in zip(rows, params, strict=True)
        ]

    results = run_together(begin, process_group)
    flat, mask = _flat(sequences, attention_mask)
    with torch.inference_mode(False), torch.no_grad():
        token_logprobs = torch.zeros(flat.shape, dtype=torch.float32)
        for r, result in zip(nonempty, results, strict=True):
            assert result.prompt_logprobs is not None
            token_logprobs[r, mask[r].nonzero()[1:, 0]] = torch.tensor(
                result.prompt_logprobs[1:], dtype=torch.float32
            )
        return token_logprobs.reshape(sequences.shape)


def _params(
    sequences: Tensor, records: dict[str, Any], mask: Tensor, nonempty: list[int]
) -> list[SamplingParams]:
    """Return the parameters of the rows in `nonempty`, which replay `records`."""
    replayed: list[dict[str, Any]] = [{} for _ in nonempty]
    for name, record in records.items():
        if record is None:
            continue
        if not isinstance(record, Tensor) or record.shape[:-2] != sequences.shape:
            raise InvalidRequest(
                f"{name} has shape {list(getattr(record, 'shape', []))}; it must be "
                f"{[*sequences.shape, 'layers', 'k']}"
            )
        flat = record.reshape(*mask.shape, *record.shape[-2:])
        for r, fields in zip(nonempty, replayed, strict=True):
            fields[f"replay_{name}"] = flat[r][mask[r]]
    return [SamplingParams(max_tokens=0, prompt_logprobs=0, **fields) for fields in replayed]


def logprobs(
    module: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    scores: Tensor | None = None,
    micro_batch_size: int | None = None,
) -> Tensor:
    """Return the log-prob of each token given the tokens before it, by the module's own forward, with
    gradients.

    Differs from `score` by rounding: about 1e-6 in float32, 1e-5 for unlikely tokens; about 2e-3 in bfloat16,
    0.1 for unlikely tokens. The module's mode is not changed: in training mode, dropout is active.

    Args:
        module: a transformers causal language model, wrapped or not, or a module with `kv_caches`.
        sequences: `[..., L]` integers, such as `Rollout.sequences`.
        attention_mask: `[..., L]`; 0 marks padding, before or after a row's tokens; a row may be all
            padding. None: no padding.
        temperature: divisor of the logits; above 0.
        scores: `[..., L]`, the result of `score` for the same rows and weights. It is returned, bit for bit,
            with the gradient of the module's own forward, so the ratio to a rollout is exactly 1 until the
            weights change. Temperature 1 only.
        micro_batch_size: rows per forward. None: all at once. All graphs are kept until backward, so this
            only bounds the memory of the logits.

    Returns:
        `[..., L]` float32 on the module's device; 0.0 on a row's first token and on padding. The module runs
        and there is a gradient (zeros) even if no row has two tokens.

    Raises:
        InvalidRequest: wrong shapes or values.
    """
    if not isinstance(module, nn.Module):
        raise InvalidRequest(f"module={type(module).__name__}: must be a torch module")
    temperature = number("temperature", temperature, 0.0, above=True)
    micro_batch_size = optional_integer("micro_batch_size", micro_batch_size)
    if scores is not None and temperature != 1:
        raise InvalidRequest(f"temperature={temperature}: scores require temperature 1")
    if scores is not None and getattr(scores, "shape", None) != sequences.shape:
        raise InvalidRequest(f"scores must have the shape of sequences, {list(sequences.shape)}")
    flat, mask = _flat(sequences, attention_mask)
    _check_ids(module, flat, mask)
    device = next(module.parameters()).device
    flat, mask = flat.to(device), mask.to(device)
    size = micro_batch_size or max(1, len(flat))
    pieces = zip(flat.split(size), mask.split(size), strict=True)
    token_logprobs = torch.cat([_own_forward(module, *piece, temperature) for piece in pieces])
    token_logprobs = token_logprobs.reshape(sequences.shape)
    if scores is None:
        return token_logprobs
    replaced = token_logprobs.clone()
    with torch.no_grad():  # other values, and the same gradient
        replaced.copy_(scores)
    return replaced


def _own_forward(module: nn.Module, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return log-probs `[R, L]` of rows with padding before or after their tokens."""
    # All rows begin at column 0, so positions are the default ones and causal attention excludes the padding.
    # There is always one row and two columns, so that the module runs.
    num_rows, length = ids.shape
    spare = (0, max(0, 2 - length), 0, max(0, 1 - num_rows))
    ids, mask = F.pad(ids, spare), F.pad(mask, spare)
    lengths = mask.sum(dim=1)
    valid = torch.arange(max(2, int(lengths.max())), device=ids.device) < lengths[:, None]
    rows = torch.zeros_like(valid, dtype=ids.dtype).masked_scatter(valid, ids[mask])
    logits = _logits(module, rows, valid)[:, :-1].float() / temperature
    token_logprobs = logits.log_softmax(dim=-1).gather(-1, rows[:, 1:, None])[..., 0]
    token_logprobs = F.pad(token_logprobs, (1, 0))  # a row's first token has none
    found = torch.zeros_like(mask, dtype=token_logprobs.dtype)
    return found.masked_scatter(mask, token_logprobs[valid])[:num_rows, :length]


def _logits(module: nn.Module, rows: Tensor, valid: Tensor) -> Tensor:
    """Return logits `[R, W, V]` of right-padded rows."""
    inner = unwrap(module)
    if speaks_kv_caches(inner):
        if inspect.signature(inner.forward).parameters["kv_caches"].default is not None:
            raise InvalidRequest(f"{type(inner).__name__} can't run without kv_caches")
        logits: Tensor = module(rows)
        return logits
    output: Any = module(input_ids=rows, attention_mask=valid.long(), use_cache=False)
    token_logprobs: Tensor = output["logits"] if isinstance(output, dict) else output.logits
    return token_logprobs


def _check_ids(module: nn.Module, ids: Tensor, mask: Tensor) -> None:
    """Raise InvalidRequest for an id outside the vocabulary, if the module's config has its size."""
    tokens = ids[mask]
    if not tokens.numel():
        return
    config = getattr(unwrap(module), "config", None)
    size = getattr(config, "vocab_size", None)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (isinstance(size, int) and high >= size):
        raise InvalidRequest(
            f"sequences: ids {low} to {high} are outside the model's vocabulary of {size or math.inf}"
        )


def _flat(sequences: Any, attention_mask: Any) -> tuple[Tensor, Tensor]:
    """Return rows `[R, L]` and their mask as bool."""
    if not isinstance(sequences, Tensor) or sequences.ndim < 1:
        raise InvalidRequest("sequences must be an integer tensor of shape [..., L]")
    if attention_mask is not None and getattr(attention_mask, "shape", None) != sequences.shape:
        raise InvalidRequest(
            f"attention_mask must be a tensor of sequences' shape, {list(sequences.shape)}"
        )
    shape = math.prod(sequences.shape[:-1]), sequences.shape[-1]
    flat = sequences.reshape(shape)
    mask = None if attention_mask is None else attention_mask.reshape(shape)
    check_padded(flat, mask, name="sequences")
    full = torch.ones(shape, dtype=torch.bool, device=flat.device)
    return flat.long(), full if mask is None else mask.bool()
