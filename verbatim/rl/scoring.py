"""Log-probs of rows that exist already: the rollout's own bits, or with gradients for the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import InvalidRequest
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.tensors import check_padded, engine_of, rows_of


def score(
    model: LLM | nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None = None,
    *,
    routing: Tensor | None = None,
) -> Tensor:
    """The log-prob of each token given those before it, at temperature 1, without gradients.

    Bit for bit what generation reports under the same weights, however the rows are padded or batched.

    Args:
        model: an open LLM, or a live module.
        sequences: `[..., L]` integers, such as `Rollout.sequences`.
        attention_mask: of the same shape; 0 marks padding, before or after a row's tokens, and a row may be
            nothing else. None means there is none.
        routing: `[..., L, layers, k]` int16: the experts that the tokens are sent to, such as
            `Rollout.routing`; -1 leaves a token to the router.

    Returns:
        `[..., L]` float32; 0.0 for a row's first token and on padding.

    Raises:
        InvalidRequest, NotSupported: before any forward runs.
    """
    flat, mask = _flat(sequences, attention_mask)
    llm = engine_of(model)
    lengths = mask.sum(dim=1).tolist()
    some = [r for r, length in enumerate(lengths) if length]
    rows = rows_of(flat[some], mask[some])
    params = [SamplingParams(max_tokens=0, prompt_logprobs=0) for _ in rows]
    if routing is not None:
        if not isinstance(routing, Tensor) or routing.shape[:-2] != sequences.shape:
            raise InvalidRequest(
                f"routing has shape {list(getattr(routing, 'shape', []))}; it must be "
                f"{[*sequences.shape, 'layers', 'k']}"
            )
        records = routing.reshape(*flat.shape, *routing.shape[-2:])
        params = [
            SamplingParams(max_tokens=0, prompt_logprobs=0, replay_routing=records[r][mask[r]])
            for r in some
        ]
    results = llm.generate(rows, params) if rows else []
    with torch.inference_mode(False), torch.no_grad():
        found = torch.zeros(flat.shape, dtype=torch.float32)
        for r, result in zip(some, results, strict=True):
            assert result.prompt_logprobs is not None
            found[r, mask[r].nonzero()[1:, 0]] = torch.tensor(
                result.prompt_logprobs[1:], dtype=torch.float32
            )
        return found.reshape(sequences.shape)


def logprobs(
    module: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    exact: bool = False,
    micro_batch_size: int | None = None,
) -> Tensor:
    """The log-prob of each token given those before it, by the module's own forward, with gradients.

    It differs from `score` by the rounding of two ways to compute one thing: some 1e-6 in float32, 1e-2 in
    bfloat16. The module's mode is left as it is: dropout drops.

    Args:
        module: a transformers causal language model, wrapped or not: `module(input_ids=, attention_mask=)`.
        sequences: `[..., L]` integers, such as `Rollout.sequences`.
        attention_mask: of the same shape; 0 marks padding, before or after a row's tokens, and a row may be
            nothing else. None means there is none.
        temperature: divides the logits; above 0.
        exact: give the bits of `score`, with the gradient of the module's own forward. The ratio to a
            rollout's log-probs is 1 then, exactly, until the weights change. Costs a forward more;
            at temperature 1 only.
        micro_batch_size: rows of one forward; None takes all at once. Their graphs are all kept until
            backward, so this bounds the memory of the logits alone.

    Returns:
        `[..., L]` float32 on the module's device; 0.0 for a row's first token and on padding.

    Raises:
        InvalidRequest: shapes or values that don't fit.
    """
    if not isinstance(module, nn.Module):
        raise InvalidRequest(f"module={type(module).__name__}: must be a torch module")
    if isinstance(temperature, bool) or not temperature > 0:
        raise InvalidRequest(f"temperature={temperature!r}: must be above 0")
    if exact and temperature != 1:
        raise InvalidRequest(f"exact=True is for temperature 1; it is {temperature}")
    if micro_batch_size is not None and (
        isinstance(micro_batch_size, bool)
        or not isinstance(micro_batch_size, int)
        or micro_batch_size < 1
    ):
        raise InvalidRequest(f"micro_batch_size={micro_batch_size!r}: must be 1 or more, or None")
    flat, mask = _flat(sequences, attention_mask)
    device = next(module.parameters()).device
    flat, mask = flat.to(device), mask.to(device)
    rows = torch.arange(len(flat), device=device)
    pieces = [
        _own_forward(module, flat[part], mask[part], temperature)
        for part in rows.split(micro_batch_size or max(1, len(rows)))
    ]
    found = torch.cat(pieces).reshape(sequences.shape)
    if not exact:
        return found
    values = score(module, sequences, attention_mask).to(device)
    replaced: Tensor = _Replaced.apply(found, values)  # type: ignore[no-untyped-call]
    return replaced


class _Replaced(torch.autograd.Function):
    """`values` going forward, the gradient of `found` going back."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _own_forward(module: nn.Module, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Log-probs `[R, L]` of rows that are padded anywhere outside of their tokens."""
    # All rows begin at column 0, where no model needs to be told of positions, and causal attention
    # keeps padding out by itself.
    lengths = mask.sum(dim=1)
    width = int(lengths.max()) if len(lengths) else 0
    if width < 2:
        return torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    start = mask.int().argmax(dim=1, keepdim=True)
    at = torch.arange(width, device=ids.device)
    inside = at < lengths[:, None]
    rows = ids.gather(1, (start + at).clamp(max=ids.shape[1] - 1)).masked_fill(~inside, 0)
    output: Any = module(input_ids=rows, attention_mask=inside.long(), use_cache=False)
    logits = output["logits"] if isinstance(output, dict) else output.logits
    logits = logits[:, :-1].float() / temperature
    found = logits.log_softmax(dim=-1).gather(-1, rows[:, 1:, None])[..., 0]
    found = torch.cat([torch.zeros_like(found[:, :1]), found.masked_fill(~inside[:, 1:], 0)], dim=1)
    back = (torch.arange(ids.shape[1], device=ids.device) - start).clamp(0, width - 1)
    return found.gather(1, back).masked_fill(~mask, 0)


def _flat(sequences: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows `[R, L]` and their mask, as bool."""
    if not isinstance(sequences, Tensor) or sequences.ndim < 1:
        raise InvalidRequest("sequences must be an integer tensor of shape [..., L]")
    if isinstance(attention_mask, Tensor) and attention_mask.shape != sequences.shape:
        raise InvalidRequest(
            f"attention_mask has shape {list(attention_mask.shape)}; sequences has "
            f"{list(sequences.shape)}"
        )
    width = sequences.shape[-1]
    flat = sequences.reshape(-1, width)
    mask = None if attention_mask is None else attention_mask.reshape(-1, width)
    check_padded(flat, mask)
    full = torch.ones(flat.shape, dtype=torch.bool, device=flat.device)
    return flat.long(), full if mask is None else mask.bool()
