"""Recurrent operations over flat rows of many sequences: causal convolution and recurrences.

All are computed row by row, however a prompt is chunked, so they are batch-invariant by construction: the
bits of a row depend only on the state before it and on the row itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from verbatim import kernels
from verbatim.kernels.functions import SUFFIX, addresses, has_kernels, recorded_whole, run
from verbatim.kv.states import StateRows


@kernels.without_overrides
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    at: StateRows,
) -> Tensor:
    """Convolve each channel with the last `K` rows of its sequence.

    Args:
        x: `[T, C]`.
        weight: `[C, K]`, float32 or converted to the dtype of `x`; the last column is for the row itself.
        bias: `[C]`.
        state: `[slots, K - 1, C]` in x's dtype, the last inputs, oldest first; written at `at.targets`.

    Returns:
        `[T, C]` float32.
    """
    compiled = x.dtype in SUFFIX and has_kernels(x.device)
    weight = weight if weight.dtype is torch.float32 else weight.to(x.dtype)
    if not compiled and kernels.uses_triton(x.device):
        from verbatim.kernels.triton import recurrence

        if recurrence.supports(x):
            bias = None if bias is None else bias.to(x.dtype)
            return recurrence.causal_conv(x, weight, bias, state, at)
    if compiled:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        x, weight = x.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        operands = *addresses(out, x, weight), weight.dtype is torch.float32
        sizes = len(at.sources), len(at.rows), *weight.shape
        run("vb_causal_conv", x.dtype, *operands, *addresses(bias, state, *at), *sizes)
        return out
    first = weight.new_zeros(weight.shape[0], dtype=torch.float32)
    first = first if bias is None else first + bias.float()
    return scan(partial(_conv_step, weight.t().float(), first), [x], state, at)


def _conv_step(taps: Tensor, total: Tensor, state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    inputs = torch.cat([state, row[:, None]], dim=1)
    for j, tap in enumerate(taps):
        total = total + inputs[:, j].float() * tap
    return inputs[:, 1:], total


@kernels.without_overrides
def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    at: StateRows,
    *,
    rate: Tensor | None = None,
) -> Tensor:
    """Update a matrix state with each row, and read it: linear attention, gated delta rule, state spaces.

    Row by row, for each head, with the state S `[K, V]`:

        S = decay * S
        S = S + k (v - k^T S)^T beta   with the delta rule (Yang et al. 2024, arXiv:2412.06464)
        S = S + k v^T                  without
        o = q^T S

    Args:
        q, k: `[T, Hk, K]` float32; head h of `v` uses head h // (H // Hk).
        v: `[T, H, V]` float32.
        decay: `[T, H]`, or `[T, H, K]` with one factor for each row of S; float32, in 0 to 1.
        beta: `[T, H]` float32, for the delta rule; None without it.
        state: `[slots, H, K, V]` float32, written at `at.targets`.
        rate: `[H, K]` float32, only if V is 1: rows of S decay by exp(decay * rate), with `decay` `[T, H]`.

    Returns:
        `[T, H, V]` float32.
    """
    compiled = has_kernels(v.device)
    if rate is not None and not compiled:
        decay, rate = torch.exp(decay[..., None] * rate), None
    if not compiled and kernels.uses_triton(v.device):
        from verbatim.kernels.triton import recurrence

        return recurrence.linear_recurrence(q, k, v, decay, beta, state, at)
    if compiled:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        q, k, v, decay = (x.contiguous() for x in (q, k, v, decay))
        beta = None if beta is None else beta.contiguous()
        rate = None if rate is None else rate.contiguous()
        assert rate is None or (v.shape[2] == 1 and decay.dim() == 2)
        operands = addresses(out, q, k, v, decay, beta, state, *at)
        sizes = len(at.sources), len(at.rows), v.shape[1], *k.shape[1:], v.shape[2]
        run("vb_linear_recurrence", None, *operands, *sizes, decay.dim() == 3, *addresses(rate))
        return out
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, dim=1)[..., None] for x in (q, k))  # [T, H, K, 1]
    decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
    rows = [q, k, v, decay] if beta is None else [q, k, v, decay, beta[..., None]]
    return scan(_linear_step, rows, state, at)


def _linear_step(
    state: Tensor, q: Tensor, k: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    state = state * decay
    if beta is not None:
        value = (value - tree_sum(state * k, -2)) * beta
    state = state + k * value[..., None, :]
    return state, tree_sum(state * q, -2)


Step = Callable[..., tuple[Tensor, Tensor]]


@recorded_whole
@kernels.without_overrides
def scan(step: Step, rows: Sequence[Tensor], state: Tensor, at: StateRows) -> Tensor:
    """Compute any recurrence, one row of every sequence at a time, in torch.

    Args:
        step: `step(state, *row)` returns the state `[N, *shape]` after a row, and the output `[N, ...]`. It
            may only use elementwise, batch-invariant functions, as N is any number of sequences.
        rows: `[T, ...]` each.
        state: `[slots, *shape]`, written at `at.targets`.

    Returns:
        The outputs `[T, ...]`.
    """
    lengths, current = at.query_starts.diff(), state[at.sources]
    # One more than there are rows: states that a recorded step must not write have its number.
    targets = at.query_starts.new_full((len(rows[0]) + 1,), -1)
    targets[at.rows] = at.targets
    order, outputs = [], []
    for i in range(int(lengths.max())):
        running = (lengths > i).nonzero()[:, 0]
        row = at.query_starts[running] + i
        after, output = step(current[running], *(x[row] for x in rows))
        current[running] = after
        written = targets[row] >= 0
        state[targets[row[written]]] = after[written]
        order.append(row)
        outputs.append(output)
    out = torch.empty_like(torch.cat(outputs))
    out[torch.cat(order)] = torch.cat(outputs)
    return out


@kernels.without_overrides
def weighted_mean(
    key: Tensor,
    value: Tensor,
    first: Tensor,
    decay: Tensor,
    state: Tensor,
    at: StateRows,
) -> Tensor:
    """Compute the mean of a sequence's values, weighted by the exponentials of its keys (RWKV).

    The state consists of the sum of weighted values and the sum of weights, both divided by the exponential
    of the largest exponent, and that exponent. A row reads the mean, then lowers the exponents of the
    preceding rows by `decay`; an infinite `decay` makes the next row forget them.

    Args:
        key, value: `[T, C]` float32.
        first: `[C]` float32, added to the exponent of a row's value in its own mean only.
        decay: `[C]` or `[T, C]` float32, at least 0.
        state: `[slots, 3, C]` float32, written at `at.targets`.

    Returns:
        `[T, C]` float32.
    """
    if not has_kernels(key.device):
        rows = key, value, decay.expand_as(key)
        return scan(partial(_mean_step, first), rows, state, at)
    out = torch.empty_like(key, memory_format=torch.contiguous_format)
    key, value, first, decay = (x.contiguous() for x in (key, value, first, decay))
    operands = addresses(out, key, value, first, decay, state, *at)
    sizes = len(at.sources), len(at.rows), key.shape[1]
    run("vb_weighted_mean", None, *operands, *sizes, decay.dim() == 2)
    return out


def _mean_step(
    first: Tensor, state: Tensor, key: Tensor, value: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    total, weights, largest = state.unbind(1)
    largest = torch.where(weights == 0, -1e38, largest)  # before the first row

    def add(past: Tensor, now: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = torch.maximum(past, now)
        old, new = torch.exp(past - top), torch.exp(now - top)
        return old * total + new * value, old * weights + new, top

    summed, divisor, _ = add(largest, key + first)
    return torch.stack(add(largest - decay, key), dim=1), summed / divisor


def tree_sum(x: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
    """Sum over a dimension by adding halves, in an order that depends only on its length."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        total = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([total, x.narrow(dim, size - 1, 1)], dim) if size % 2 else total
    return x if keepdim else x.squeeze(dim)
