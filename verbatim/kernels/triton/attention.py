"""Attention over KV blocks: one kernel for decode and prefill, and one that combines its partial results.

A tile holds the query rows of a few tokens of one sequence, for all heads of one KV head. Keys are processed
in splits of `SPLIT` positions, counted from position 0 of the sequence, and in tiles of `KEYS` within them; a
row's state (largest score, sum, values) is merged over the splits in order. A program takes one split or all
of them, whichever is faster, never a part: sums of partial sums would be rounded differently. A row's bits
depend neither on that nor on the other rows, because

- decode and prefill are the same compiled kernel, with the same tile shapes;
- a tile without keys that a row sees leaves the row's state unchanged (a factor of 1, a sum of 0);
- merging a state into an empty one gives that state, so either kernel may do it.

`verbatim.kv.attention.paged_attention` describes the arguments, and has the plain reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions
from verbatim.kernels.packing import Packing
from verbatim.kernels.triton.numbers import DTYPES, EXACT, helper, product, rounded, widened
from verbatim.kernels.triton.quantized import load_rows

SPLIT = 512  # positions; the sums of a split are computed before they are merged with others
KEYS = 64  # positions in a tile
ROWS = 16  # tokens times heads of a KV head, per tile: the minimum of a matrix product
_FAST_ROWS = 64  # per tile, if bits need not be those of a single row
_PROGRAMS = 1024  # enough to keep a GPU busy
_PARTIAL_BYTES = 256 * 2**20  # of the states between the two kernels
MAX_WIDTH = 512  # of a head
_TILE_BYTES = 128 * 1024  # maximum of K and V; a tile of wide heads has fewer keys


def supports(q: Tensor, k_store: Tensor, value_size: int, packing: Packing | None = None) -> bool:
    """Return whether the kernels support these dtypes and widths."""
    return (
        q.dtype in DTYPES
        and (packing is not None or k_store.dtype in DTYPES)
        and max(q.shape[2], value_size) <= MAX_WIDTH
    )


@helper
def _merge(top, total, values, top2, total2, values2):
    """Merge the state of some keys and the state of the keys after them."""
    highest = tl.maximum(top, top2)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    first, second = tl.exp(top - safe), tl.exp(top2 - safe)
    total = total * first + total2 * second
    values = values * first[:, None] + values2 * second[:, None]
    return highest, total, values


@triton.jit(do_not_specialize=["num_sequences", "splits_each", "groups"])
def _attend(
    q,
    k_store,
    v_store,
    query_starts,
    context_lens,
    block_tables,
    alibi,
    bias,
    tops,
    totals,
    accs,
    q_stride,
    q_head_stride,
    table_stride,
    num_sequences,
    splits_each,
    groups,
    scale,
    KV_HEADS: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Compute the states of a tile of rows over a group of splits: `tops`, `totals` `[T, H, groups]` and
    `accs` `[T, H, groups, Dv]`.
    """
    tile, kv_head, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The tiles of sequence s begin at query_starts[s] // TOKENS + s: find the last not above `tile`.
    low: tl.int32 = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    s = low - 1
    start, stop = tl.load(query_starts + s), tl.load(query_starts + s + 1)
    first_row = start + (tile - start // TOKENS - s) * TOKENS
    if first_row >= stop:
        return
    first_position = tl.load(context_lens + s) - stop + first_row
    num_keys = first_position + tl.minimum(TOKENS, stop - first_row)
    first_split = group * splits_each
    if first_split * SPLIT >= num_keys:
        return

    row = tl.arange(0, ROWS)
    token = first_row + row // HEADS_EACH
    row_mask = (row < TOKENS * HEADS_EACH) & (token < stop)
    head = kv_head * HEADS_EACH + row % HEADS_EACH
    position = first_position + row // HEADS_EACH
    at_key, at_value = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    where_q = token.to(tl.int64) * q_stride + head * q_head_stride
    queries = tl.load(
        q + where_q[:, None] + at_key[None, :],
        mask=row_mask[:, None] & (at_key < KEY)[None, :],
        other=0.0,
    )
    if queries.dtype != COMPUTE:
        queries = widened(queries)
    if alibi is not None:
        slope = tl.load(alibi + head, mask=row_mask, other=0.0)
    if bias is not None:
        where_bias = bias + (token.to(tl.int64) * (KV_HEADS * HEADS_EACH) + head) * BIAS_SIZE

    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first_position - WINDOW + 1, 0)
    if CHUNK > 0:
        lowest = tl.maximum(lowest, first_position // CHUNK * CHUNK)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    last_split = tl.minimum(first_split + splits_each, (num_keys + SPLIT - 1) // SPLIT)
    for split in range(tl.maximum(first_split, lowest // SPLIT), last_split):
        split_top = tl.full([ROWS], float("-inf"), tl.float32)
        split_total = tl.full([ROWS], 0.0, tl.float32)
        split_acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
        begin = tl.maximum(split * SPLIT, lowest // KEYS * KEYS)
        for first_key in range(begin, tl.minimum(split * SPLIT + SPLIT, num_keys), KEYS):
            key = first_key + tl.arange(0, KEYS)
            mask = key < num_keys  # later keys are unwritten, or of another sequence
            block = tl.load(block_tables + s * table_stride + key // BLOCK_SIZE, mask, other=0)
            slot = (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
            keys = load_rows(k_store, slot, mask, KEYS, KEY, KEY_BLOCK, BITS, KEY_GROUP, COMPUTE)
            score = product(queries, tl.trans(keys), tl.zeros([ROWS, KEYS], tl.float32)) * scale
            if SOFTCAP > 0:  # softcap * tanh(score / softcap)
                score = SOFTCAP - 2 * SOFTCAP / (tl.exp(score * (2 / SOFTCAP)) + 1)
            if alibi is not None:
                score += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
            if bias is not None and BIAS_SIZE > 0:
                behind = position[:, None] - key[None, :]
                near = row_mask[:, None] & (behind >= 0) & (behind < BIAS_SIZE)
                score += widened(tl.load(where_bias[:, None] + behind, mask=near, other=0.0))
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (position[:, None] - key[None, :] < WINDOW)
            if CHUNK > 0:
                seen = seen & (key[None, :] >= (position // CHUNK * CHUNK)[:, None])
            score = tl.where(seen, score, float("-inf"))
            highest = tl.maximum(split_top, tl.max(score, 1))
            safe = tl.where(highest == float("-inf"), 0.0, highest)
            weight = tl.exp(score - safe[:, None])
            factor = tl.exp(split_top - safe)
            values = load_rows(
                v_store, slot, mask, KEYS, VALUE, VALUE_BLOCK, BITS, VALUE_GROUP, COMPUTE
            )
            split_total = split_total * factor + tl.sum(weight, 1)
            split_acc = product(rounded(weight, COMPUTE), values, split_acc * factor[:, None])
            split_top = highest
        top, total, acc = _merge(top, total, acc, split_top, split_total, split_acc)

    heads: tl.constexpr = KV_HEADS * HEADS_EACH
    place = (token.to(tl.int64) * heads + head) * groups + group
    tl.store(tops + place, top, mask=row_mask)
    tl.store(totals + place, total, mask=row_mask)
    tl.store(
        accs + place[:, None] * VALUE + at_value[None, :],
        acc,
        mask=row_mask[:, None] & (at_value < VALUE)[None, :],
    )


@triton.jit(do_not_specialize=["num_sequences", "splits_each", "groups"])
def _finish(
    out,
    query_starts,
    context_lens,
    sinks,
    tops,
    totals,
    accs,
    num_sequences,
    splits_each,
    groups,
    KV_HEADS: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SINK_STRIDE: tl.constexpr,
):
    """Combine the states of one row, for all heads of one KV head: merge its groups of splits in order, add
    the sink, and divide.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    low: tl.int32 = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) <= row:
            low = middle + 1
        else:
            high = middle
    position = tl.load(context_lens + low - 1) - tl.load(query_starts + low) + row
    count = position // (SPLIT * splits_each) + 1
    at_head, at_value = tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    mask = at_head < HEADS_EACH
    values_mask = mask[:, None] & (at_value < VALUE)[None, :]
    place = (row.to(tl.int64) * KV_HEADS + kv_head) * HEADS_EACH + at_head
    top = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    acc = tl.zeros([HEAD_BLOCK, VALUE_BLOCK], tl.float32)
    for group in range(count):
        state = place * groups + group
        top2 = tl.load(tops + state, mask=mask, other=float("-inf"))
        total2 = tl.load(totals + state, mask=mask, other=0.0)
        acc2 = tl.load(
            accs + state[:, None] * VALUE + at_value[None, :], mask=values_mask, other=0.0
        )
        top, total, acc = _merge(top, total, acc, top2, total2, acc2)
    if sinks is not None:  # an additional score without a value
        sink_at = row.to(tl.int64) * SINK_STRIDE + kv_head * HEADS_EACH + at_head
        sink = tl.load(sinks + sink_at, mask=mask, other=float("-inf"))
        one = tl.full([HEAD_BLOCK], 1.0, tl.float32)
        top, total, acc = _merge(top, total, acc, sink, one, tl.zeros_like(acc))
    total = tl.where(mask, total, 1.0)
    tl.store(
        out + place[:, None] * VALUE + at_value[None, :],
        rounded(tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape)), out.dtype.element_ty),
        mask=values_mask,
    )


def paged_attention(
    q: Tensor,
    k_store: Tensor,
    v_store: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
    *,
    batch_invariant: bool = True,
    packing: Packing | None = None,
    value_size: int = 0,
) -> Tensor:
    """Compute `verbatim.kv.attention.paged_attention` for tensors on one GPU; `supports` must hold.

    Nothing is read back from the GPU: the width of `block_tables` bounds the context lengths.

    Args:
        batch_invariant: prefills use the same tiles as single rows. False selects taller tiles, which are
            faster and round differently.
        packing, value_size: as in `verbatim.kv.attention.paged_attention`.
    """
    num_tokens, heads, key_size = q.shape
    _, kv_heads, block_size, width = v_store.shape
    value_size = width if packing is None else value_size
    query_starts, context_lens, block_tables = batch
    num_sequences, sinks = len(context_lens), options.sinks
    assert k_store.is_contiguous() and v_store.is_contiguous() and block_tables.stride(1) == 1
    out = q.new_empty((num_tokens, heads, value_size))
    if not num_tokens:
        return out
    if q.stride(2) != 1:
        q = q.contiguous()
    heads_each = heads // kv_heads
    rows = ROWS if batch_invariant or num_tokens == num_sequences else _FAST_ROWS
    rows = max(rows, triton.next_power_of_2(heads_each))
    tokens = rows // heads_each
    tiles = num_tokens // tokens + num_sequences
    splits = -(-block_tables.shape[1] * block_size // SPLIT)
    state_bytes = num_tokens * heads * (value_size + 2) * 4 * splits
    alone = tiles * kv_heads < _PROGRAMS and state_bytes <= _PARTIAL_BYTES
    splits_each, groups = (1, splits) if alone else (splits, 1)
    tops, totals = q.new_empty((2, num_tokens, heads, groups), dtype=torch.float32)
    accs = q.new_empty((num_tokens, heads, groups, value_size), dtype=torch.float32)
    stored = q.dtype if packing else k_store.dtype
    compute = q.dtype if q.dtype == stored else torch.float32
    key_block = max(16, triton.next_power_of_2(key_size))
    value_block = max(16, triton.next_power_of_2(value_size))
    keys, key_bytes = KEYS, (key_block + value_block) * compute.itemsize
    while keys * key_bytes > _TILE_BYTES:
        keys //= 2
    sizes = {"VALUE": value_size, "VALUE_BLOCK": value_block, "SPLIT": SPLIT, **EXACT}
    sizes |= {"KV_HEADS": kv_heads, "HEADS_EACH": heads_each}
    _attend[(tiles, kv_heads, groups)](
        q,
        k_store,
        v_store,
        query_starts,
        context_lens,
        block_tables,
        options.alibi,
        options.bias,
        tops,
        totals,
        accs,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        num_sequences,
        splits_each,
        groups,
        options.scale,
        KEY=key_size,
        KEY_BLOCK=key_block,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        TOKENS=tokens,
        KEYS=keys,
        WINDOW=options.window,
        CHUNK=options.chunk,
        SOFTCAP=options.softcap,
        BIAS_SIZE=0 if options.bias is None else options.bias.shape[2],
        BITS=packing.bits if packing else 0,
        KEY_GROUP=min(packing.group, key_block) if packing else 0,
        VALUE_GROUP=min(packing.group, value_block) if packing else 0,
        COMPUTE=DTYPES[compute],
        num_warps=4 if max(key_block, value_block) <= 256 else 8,
        num_stages=max(1, min(3, 160 * 1024 // (keys * key_bytes))),  # all stages share 227 KB
        **sizes,
    )
    _finish[(num_tokens, kv_heads)](
        out,
        query_starts,
        context_lens,
        sinks,
        tops,
        totals,
        accs,
        num_sequences,
        splits_each,
        groups,
        HEAD_BLOCK=triton.next_power_of_2(heads_each),
        SINK_STRIDE=0 if sinks is None else heads * (sinks.dim() - 1),
        num_warps=4,
        **sizes,
    )
    return out
