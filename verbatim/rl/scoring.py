"""Log-probs of given sequences: bit-identical to the rollout's, or with gradients for the loss."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verbatim.api.llm import LLM
from verbatim.api.padded import check_padded, fill
from verbatim.api.tensors import run_admitted
from verbatim.common.checks import number, optional_integer
from verbatim.core import Request
from verbatim.errors import InvalidRequest
from verbatim.options import on_cpu
from verbatim.params import SamplingParams
from verbatim.placement.kv_caches import takes_kv_caches
from verbatim.placement.wrapped import unwrap


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

    Bit-identical to the log-probs of generation with the same weights, for any padding and batching.

    Args:
        model: an open LLM, or a live module.
        sequences: `[..., L]` integers, such as `Rollout.sequences`.
        attention_mask: `[..., L]`; 0 marks padding, before or after a row's tokens; a row may be all
            padding. None: no padding.
        routing: `[..., L, layers, k]` int16: experts of the tokens, such as `Rollout.routing`; -1: the router
            selects them.
        indices: `[..., L, layers, k]` int32: keys that the tokens attend to, such as `Rollout.indices`; all
            -1: the indexer selects them.
        adapter: as `SamplingParams.adapter`.
        process_group: as for `rollout`.

    Returns:
        `[..., L]` float32; 0.0 on a row's first token and on padding.

    Raises:
        InvalidRequest, NotSupported: before any forward runs.
    """

    def admit(llm: LLM) -> tuple[list[Request], Tensor]:
        ids, mask = _flat(sequences, attention_mask)
        records = _records(sequences, mask, routing=routing, indices=indices)
        requests = []
        for row, row_mask in enumerate(mask):
            if row_mask.any():
                fields = {name: record[row][row_mask] for name, record in records.items()}
                params = SamplingParams(max_tokens=0, prompt_logprobs=0, adapter=adapter, **fields)
                requests.append(llm.engine.admission.admit(ids[row][row_mask].tolist(), params))
        return requests, mask.cpu()

    with on_cpu():
        results, mask = run_admitted(model, admit, process_group)
        has_logprob = mask & (mask.cumsum(dim=1) > 1)  # all but the first token of a row
        values = [value for result in results for value in (result.prompt_logprobs or [])[1:]]
        with torch.inference_mode(False), torch.no_grad():
            scores = fill(has_logprob, torch.tensor(values, dtype=torch.float32), 0.0)
            return scores.reshape(sequences.shape)


def _records(sequences: Tensor, mask: Tensor, **records: Any) -> dict[str, Any]:
    """Return the records to replay as `[R, L, layers, k]`, by the names of `SamplingParams`."""
    rows = {}
    for name, record in records.items():
        if record is None:
            continue
        if not isinstance(record, Tensor) or record.shape[:-2] != sequences.shape:
            raise InvalidRequest(
                f"{name} has shape {list(getattr(record, 'shape', []))}; it must be "
                f"{[*sequences.shape, 'layers', 'k']}"
            )
        rows[f"replay_{name}"] = record.reshape(*mask.shape, *record.shape[-2:])
    return rows


def logprobs(
    module: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    scores: Tensor | None = None,
    micro_batch_size: int | None = None,
) -> Tensor:
    """Return the log-prob of each token given the tokens before it, with gradients.

    Runs the module's own forward, so it differs from `score` by rounding: about 1e-6 in float32, 1e-5 for
    unlikely tokens; about 2e-3 in bfloat16, 0.1 for unlikely tokens. The module's mode is not changed: in
    training mode, dropout is active.

    Args:
        module: a transformers causal language model, wrapped or not, or a module with `kv_caches`.
        sequences: `[..., L]` integers, such as `Rollout.sequences`.
        attention_mask: `[..., L]`; 0 marks padding, before or after a row's tokens; a row may be all
            padding. None: no padding.
        temperature: divisor of the logits; above 0.
        scores: `[..., L]`, the result of `score` for the same rows and weights. The returned values are these
            scores, bit for bit, with the gradient of the module's own forward, so the ratio to a rollout is
            exactly 1 until the weights change. Temperature 1 only.
        micro_batch_size: rows per forward. None: all at once. All graphs are kept until backward, so this
            only limits the memory of the logits.

    Returns:
        `[..., L]` float32 on the module's device; 0.0 on a row's first token and on padding. Even if no row
        has two tokens, the module runs and there is a gradient (zeros).

    Raises:
        InvalidRequest: wrong shapes or values.
    """
    if not isinstance(module, nn.Module):
        raise InvalidRequest(f"module={type(module).__name__}: must be a torch module")
    temperature = number("temperature", temperature, 0.0, above=True)
    micro_batch_size = optional_integer("micro_batch_size", micro_batch_size)
    if scores is not None and temperature != 1:
        raise InvalidRequest(f"temperature={temperature}: scores require temperature 1")
    flat, mask = _flat(sequences, attention_mask)
    if scores is not None and getattr(scores, "shape", None) != sequences.shape:
        raise InvalidRequest(f"scores must have the shape of sequences, {list(sequences.shape)}")
    _check_ids(module, flat, mask)
    device = next(module.parameters()).device
    flat, mask = flat.to(device), mask.to(device)
    size = micro_batch_size or max(1, len(flat))
    pieces = zip(flat.split(size), mask.split(size), strict=True)
    token_logprobs = torch.cat([_forward_logprobs(module, *piece, temperature) for piece in pieces])
    token_logprobs = token_logprobs.reshape(sequences.shape)
    if scores is None:
        return token_logprobs
    output = token_logprobs.clone()
    with torch.no_grad():  # changes the values, keeps the gradient
        output.copy_(scores)
    return output


def _forward_logprobs(module: nn.Module, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return log-probs `[R, L]` of rows with padding before or after their tokens."""
    # All rows begin at column 0: default positions are right, and causal attention excludes the padding.
    # There are at least one row and two columns, so the module always runs.
    num_rows, length = ids.shape
    padding = (0, max(0, 2 - length), 0, max(0, 1 - num_rows))
    ids, mask = F.pad(ids, padding), F.pad(mask, padding)
    lengths = mask.sum(dim=1)
    valid = torch.arange(max(2, int(lengths.max())), device=ids.device) < lengths[:, None]
    rows = torch.zeros_like(valid, dtype=ids.dtype).masked_scatter(valid, ids[mask])
    logits = _logits(module, rows, valid)[:, :-1].float() / temperature
    token_logprobs = logits.log_softmax(dim=-1).gather(-1, rows[:, 1:, None])[..., 0]
    token_logprobs = F.pad(token_logprobs, (1, 0))  # the first token of a row has no log-prob
    output = torch.zeros_like(mask, dtype=token_logprobs.dtype)
    return output.masked_scatter(mask, token_logprobs[valid])[:num_rows, :length]


def _logits(module: nn.Module, rows: Tensor, valid: Tensor) -> Tensor:
    """Return logits `[R, W, V]` of right-padded rows."""
    inner = unwrap(module)
    if takes_kv_caches(inner):
        if inspect.signature(inner.forward).parameters["kv_caches"].default is not None:
            raise InvalidRequest(f"{type(inner).__name__} can't run without kv_caches")
        logits: Tensor = module(rows)
        return logits
    output: Any = module(input_ids=rows, attention_mask=valid.long(), use_cache=False)
    token_logprobs: Tensor = output["logits"] if isinstance(output, dict) else output.logits
    return token_logprobs


def _check_ids(module: nn.Module, ids: Tensor, mask: Tensor) -> None:
    """Raise InvalidRequest for an id outside the vocabulary, if the module's config states its size."""
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
    """Return the sequences as rows `[R, L]`, and their mask as bool."""
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
