"""Recurrent operations over flat rows of many sequences: causal convolution and linear recurrences.

`verbatim.kv.recurrence` describes the arguments, and has the plain references. A row is computed from the
state before it and from itself, by one compiled kernel with tiles that depend on the model's shapes alone.
So its bits depend neither on the chunks of its sequence nor on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.triton.numbers import DTYPES, EXACT, helper, widened

# Fields of `verbatim.kv.states.StateRows`: query starts, sources, rows, targets.
Rows = tuple[Tensor, Tensor, Tensor, Tensor]
CHANNELS = 256  # of a convolution, per program
NUMBERS = 1024  # of a state, per program: 32 registers of each thread of a warp
_SEARCH_WIDTH = tl.constexpr(128)  # numbers loaded at once by a search


def supports(x: Tensor) -> bool:
    """Return whether the kernels support this dtype."""
    return x.dtype in DTYPES


@helper
def _count_below(values, size, bound):
    """Return how many of the ascending `values[:size]` are below `bound`."""
    count = tl.zeros([_SEARCH_WIDTH], tl.int32)
    for start in range(0, size, _SEARCH_WIDTH):
        at = start + tl.arange(0, _SEARCH_WIDTH)
        mask = at < size
        count += (mask & (tl.load(values + at, mask=mask, other=0) < bound)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_sequences", "num_writes"])
def _causal_conv(
    out,
    x,
    weight,
    bias,
    states,
    state,
    starts,
    rows,
    targets,
    num_sequences,
    num_writes,
    channels,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Convolve one row of some channels; inputs before the first row of sequence s are in `states[s]`."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    sequence = _count_below(starts + 1, num_sequences, row + 1)
    before = row - tl.load(starts + sequence)
    slot_size = tl.full([], TAPS - 1, tl.int64) * channels
    source = states + sequence.to(tl.int64) * slot_size + channel
    write = _count_below(rows, num_writes, row)
    written = tl.load(rows + write, mask=write < num_writes, other=-1) == row
    target = state + tl.load(targets + write, mask=written, other=0) * slot_size + channel
    place = row.to(tl.int64) * channels + channel
    total = tl.zeros([CHANNELS], tl.float32)
    if bias is not None:
        total += widened(tl.load(bias + channel, mask=mask, other=0.0))
    # Masks compare channels with a number, as Triton 3.9's interpreter does not broadcast a scalar mask.
    kept = channel < tl.where(written, channels, 0)
    for tap in tl.static_range(TAPS):
        past = before + tap < TAPS - 1
        from_x, from_state = tl.where(past, 0, channels), tl.where(past, channels, 0)
        new = tl.load(x + place + (tap - TAPS + 1) * channels, mask=channel < from_x, other=0.0)
        old = tl.load(source + (before + tap) * channels, mask=channel < from_state, other=0.0)
        value = tl.where(past, old, new)
        factor = tl.load(weight + channel * TAPS + tap, mask=mask, other=0.0)
        total += widened(value) * widened(factor)
        if tap > 0:
            tl.store(target + (tap - 1) * channels, value, mask=kept)
    tl.store(out + place, total, mask=mask)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, at: Rows) -> Tensor:
    """Compute `verbatim.kv.recurrence.causal_conv`; `supports(x)` must hold."""
    num_tokens, channels = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    starts, sources, *writes = at
    # Copies: a piece of a sequence may overwrite the state that it reads, and programs run in any order.
    before = state.index_select(0, sources)
    if num_tokens:
        block = min(CHANNELS, triton.next_power_of_2(channels))
        _causal_conv[(num_tokens, triton.cdiv(channels, block))](
            out,
            x.contiguous(),
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            before,
            state,
            starts,
            *writes,
            len(sources),
            len(writes[0]),
            channels,
            TAPS=weight.shape[1],
            CHANNELS=block,
            num_warps=1,
            **EXACT,
        )
    return out


# The operands of a single row may be aligned differently from those of many rows, and the compiler chooses
# the layout of a sum by alignment.
@triton.jit(
    do_not_specialize=["num_writes"],
    do_not_specialize_on_alignment=["out", "q", "k", "v", "decay", "beta"],
)
def _linear_recurrence(
    out,
    q,
    k,
    v,
    decay,
    beta,
    state,
    starts,
    sources,
    rows,
    targets,
    num_writes,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    DECAY_BY_ROW: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """Run all rows of one sequence, for some columns of the heads that share one key head.

    In Mamba a head has one column, and a tile has many heads; otherwise a tile is a part of one head.
    """
    sequence, key_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    depth = tl.arange(0, DEPTH_BLOCK)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    depth_mask, column_mask = depth < DEPTH, column < GROUP * WIDTH
    # The head of each column, or of all of them.
    own_column = tile * COLUMNS + tl.arange(0, TILE_HEADS)
    own_head, head_mask = own_column // WIDTH, own_column < GROUP * WIDTH
    state_mask = depth_mask[:, None] & column_mask[None, :]
    head = key_head * GROUP + column // WIDTH
    at_state = (head * DEPTH * WIDTH + column % WIDTH)[None, :] + (depth * WIDTH)[:, None]
    slot_size = tl.full([], KEY_HEADS * GROUP * DEPTH * WIDTH, tl.int64)
    source = tl.load(sources + sequence) * slot_size
    s = tl.load(state + source + at_state, mask=state_mask, other=0.0)
    begin = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(starts + sequence + 1).to(tl.int64)
    write = _count_below(rows, num_writes, begin)
    for row in range(begin, end):
        at_head = row * KEY_HEADS + key_head
        keys = tl.load(k + at_head * DEPTH + depth, mask=depth_mask, other=0.0)
        queries = tl.load(q + at_head * DEPTH + depth, mask=depth_mask, other=0.0)
        value = tl.load(v + at_head * GROUP * WIDTH + column, mask=column_mask, other=0.0)
        own = at_head * GROUP + own_head
        if DECAY_BY_ROW:
            factor = tl.load(
                decay + (own * DEPTH)[None, :] + depth[:, None],
                mask=depth_mask[:, None] & head_mask[None, :],
                other=0.0,
            )
        else:
            factor = tl.load(decay + own, mask=head_mask, other=0.0)[None, :]
        s = s * factor
        if beta is not None:
            rate = tl.load(beta + own, mask=head_mask, other=0.0)
            value = (value - tl.sum(s * keys[:, None], 0)) * rate
        s = s + keys[:, None] * value[None, :]
        read = tl.sum(s * queries[:, None], 0)
        tl.store(out + at_head * GROUP * WIDTH + column, read, mask=column_mask)
        if tl.load(rows + write, mask=write < num_writes, other=-1) == row:
            target = tl.load(targets + write) * slot_size
            tl.store(state + target + at_state, s, mask=state_mask)
            write += 1


def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, at: Rows
) -> Tensor:
    """Compute `verbatim.kv.recurrence.linear_recurrence`."""
    _, key_heads, depth = k.shape
    _, heads, width = v.shape
    group = heads // key_heads
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    rows = triton.next_power_of_2(depth)
    columns = min(max(1, NUMBERS // rows), triton.next_power_of_2(group * width))
    if out.numel():
        grid = len(at[1]), key_heads, triton.cdiv(group * width, columns)
        _linear_recurrence[grid](
            out,
            *(x.contiguous() for x in (q, k, v, decay)),
            None if beta is None else beta.contiguous(),
            state,
            *at,
            len(at[2]),
            KEY_HEADS=key_heads,
            GROUP=group,
            DEPTH=depth,
            WIDTH=width,
            DECAY_BY_ROW=decay.dim() == 3,
            DEPTH_BLOCK=rows,
            COLUMNS=columns,
            TILE_HEADS=columns if width % columns else 1,
            num_warps=1,
            **EXACT,
        )
    return out
