"""Indexers: which keys they choose, and attention to the chosen keys."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.backends import by
from support.pairwise import parametrize_combinations
from support.poison import poison
from support.toys import make_toy, random_ids
from verbatim import LLM, NotSupported, Offload, SamplingParams, kernels
from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions, IndexOptions
from verbatim.kv.indexing import choose_keys, index_scores
from verbatim.kv.store import KVStore, LayerShape
from verbatim.quantization.formats import KV_PACKINGS

SHAPES = [LayerShape(1, 16, 0), LayerShape(2, 8, 12)]
BLOCK_SIZE = 5
LENGTH = 150
DTYPES = [torch.float32, torch.bfloat16, *KV_PACKINGS.values()]


def choose(q: Tensor, weights: Tensor, keys: Tensor, start: int, top_k: int) -> Tensor:
    """Choose keys for the last rows of one sequence, whose keys `[L, D]` lie in one block."""
    chosen = choose_keys(
        q[start:],
        keys[None, None],
        AttentionBatch(
            torch.tensor([0, len(keys) - start], dtype=torch.int32),
            torch.tensor([len(keys)], dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32),
        ),
        IndexOptions(top_k, weights[start:]),
    )
    return chosen[:, 0]


def test_largest_scores_are_chosen_with_ties_at_the_lowest_positions() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 2.0, 5.0, 2.0, -1.0, 2.0, 0.0])
    q, weights = torch.ones(9, 2, 1), torch.full((9, 2), 0.5)
    chosen = choose(q, weights, scores[:, None], 0, 4)
    assert chosen.tolist() == [
        [0, -1, -1, -1],
        [0, 1, -1, -1],
        [0, 1, 2, -1],
        [0, 1, 2, 3],
        [0, 2, 3, 4],
        [0, 2, 3, 4],
        [0, 2, 3, 4],
        [0, 2, 3, 4],
        [0, 2, 3, 4],
    ]
    # Negative products become 0, so all scores are equal.
    assert choose(q, weights, -1 - scores.abs()[:, None], 5, 3).tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize(("heads", "depth"), [(1, 1), (3, 16), (5, 37), (64, 128)])
@pytest.mark.parametrize("weighted", [True, False])
def test_index_scores_of_every_instruction_set_equal_the_reference(
    name: str, heads: int, depth: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verbatim.kernels.requested", lambda: name)
    numbers = torch.Generator().manual_seed(depth)
    for rows, length in ((1, 1), (3, 16), (2, 143)):
        q = torch.randn(rows, heads, depth, generator=numbers)
        keys = torch.randn(length, depth, generator=numbers)
        keys[0] = torch.nan
        weights = torch.randn(rows, heads, generator=numbers) if weighted else None
        expected = by("none", index_scores)(q, weights, keys, length)
        found = index_scores(q, weights, keys, length)
        assert found[..., 0].isnan().all() and expected[..., 0].isnan().all()
        assert torch.equal(found[..., 1:], expected[..., 1:])
        table = torch.randperm(length // BLOCK_SIZE + 1, generator=numbers).int()
        store = torch.empty(len(table) * BLOCK_SIZE, depth)
        at = torch.arange(length)
        store[table.long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE] = keys
        paged = index_scores(q, weights, store.view(-1, 1, BLOCK_SIZE, depth), length, table)
        assert torch.equal(paged[..., 1:], found[..., 1:])


Step = Callable[[KVStore, Tensor, Tensor, AttentionBatch], Tensor]


def in_any_cut(shapes: list[LayerShape], dtype: Any, step: Step) -> Tensor:
    """Return the output of `step` for all rows of a sequence; check that chunks give the same bits.

    Args:
        step: writes the rows of these positions to these slots, and attends to all rows written so far.
    """

    def run(cuts: list[int]) -> Tensor:
        numbers = torch.Generator().manual_seed(len(cuts))
        blocks = 1 + torch.randperm(30, generator=numbers)
        store = KVStore(shapes, 31, BLOCK_SIZE, dtype, torch.device("cpu"))
        poison(store, range(31))
        outs = []
        for begin, end in pairwise(cuts):
            at = torch.arange(begin, end)
            slots = blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            ends = torch.tensor([0, end - begin]), torch.tensor([end]), blocks[None]
            outs.append(step(store, at, slots, AttentionBatch(*(x.int() for x in ends))))
        return torch.cat(outs)

    whole = run([0, LENGTH])
    assert whole.isfinite().all()
    for cuts in ([0, 1, 20, 21, 90, LENGTH], [0, *range(60, LENGTH + 1)]):
        assert torch.equal(run(cuts), whole)
    return whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 20, LENGTH])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_to_chosen_keys_has_the_same_bits_in_any_chunking(
    dtype: Any, top_k: int, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verbatim.kv.indexing._MAX_ELEMENTS", 4000)  # about 50 rows at a time
    numbers = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers)

    index_q, index_k, weights = noise(LENGTH, 3, 16), noise(LENGTH, 1, 16), noise(LENGTH, 3)
    q, k, v = noise(LENGTH, 4, 8), noise(LENGTH, 2, 8), noise(LENGTH, 2, 12)
    sinks = noise(4) if has_sinks else None

    def plainly(store: KVStore, at: Tensor, slots: Tensor, batch: Any, **chosen: Tensor) -> Tensor:
        store.write(1, k[at], v[at], slots)
        options = AttentionOptions(scale=0.3, sinks=sinks, **chosen)
        return store.attend(1, q[at], batch, options)

    def by_index(store: KVStore, at: Tensor, slots: Tensor, batch: AttentionBatch) -> Tensor:
        store.write(0, index_k[at], index_k[at][..., :0], slots)
        chosen = store.attend(0, index_q[at], batch, IndexOptions(top_k, weights[at]))
        return plainly(store, at, slots, batch, chosen=chosen)

    found, plain = (in_any_cut(SHAPES, dtype, step) for step in (by_index, plainly))
    assert torch.equal(found[:top_k], plain[:top_k])
    assert top_k == LENGTH or not torch.equal(found[top_k:], plain[top_k:])


@parametrize_combinations(dtype=DTYPES, reach=[(7, 4), (LENGTH, 16), (1, 2)])
def test_attention_to_window_and_records_has_the_same_bits_in_any_chunking(
    dtype: Any, reach: tuple[int, int]
) -> None:
    window, every = reach
    numbers = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(LENGTH, heads, 16, generator=numbers) for heads in (1, 1, 4))
    sinks, positions = torch.randn(4, generator=numbers), torch.arange(LENGTH)
    ends = torch.arange(every - 1, LENGTH, every)
    records = torch.where(ends <= positions[:, None], ends, -1).int()

    def step(store: KVStore, at: Tensor, slots: Tensor, batch: AttentionBatch) -> Tensor:
        store.write(0, k[at], v[at], slots)
        options = AttentionOptions(0.3, window=window, sinks=sinks, records=records[at])
        return store.attend(0, q[at], batch, options)

    found = in_any_cut([LayerShape(1, 16, 16, records=True)], dtype, step)
    behind = positions[:, None] - positions
    seen = torch.cat([(behind >= 0) & (behind < window), records >= 0], 1)[:, None]
    rows = torch.cat([k, v[ends]])[:, 0]
    scores = (q @ rows.T * 0.3).masked_fill(~seen, -torch.inf)
    weights = torch.cat([scores, sinks[:, None].expand(LENGTH, 4, 1)], -1).softmax(-1)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}.get(dtype, 0.5)
    assert torch.allclose(found, weights[..., :-1] @ rows, atol=tolerance)


def test_indexer_of_records_chooses_only_complete_windows() -> None:
    keys = torch.zeros(11, 1)
    keys[2::3, 0] = torch.tensor([1.0, 3.0, 2.0])  # of the complete windows of three
    batch = AttentionBatch(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 11], [11], [[0]])))
    options = IndexOptions(2, torch.ones(11, 1), 3, pooled=True, records=True)
    chosen = choose_keys(torch.ones(11, 1, 1), keys[None, None], batch, options)[:, 0].tolist()
    assert chosen == [[-1, -1]] * 2 + [[2, -1]] * 3 + [[2, 5]] * 3 + [[5, 8]] * 3


def test_indexer_changes_logprobs_only_with_more_keys_than_it_chooses() -> None:
    prompts = [random_ids(n, seed=3) for n in (4, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)

    def logprobs() -> list[object]:
        with LLM(model, kv_memory="1MB") as llm:
            return [result.outputs[0].logprobs for result in llm.generate(prompts, params)]

    model = make_toy("deepseek_v32")
    few, many = logprobs()
    for layer in model.model.layers:
        layer.self_attn.indexer.wk.weight.data.neg_()
    assert logprobs()[0] == few
    assert logprobs()[1] != many


def test_attention_top_k_is_rejected_for_a_model_with_an_indexer(tmp_path: Path) -> None:
    make_toy("deepseek_v32").save_pretrained(tmp_path)
    with (
        pytest.raises(NotSupported, match=r"attention_top_k=4.*indexer"),
        LLM(tmp_path, kv_memory="1MB", placement=Offload(attention_top_k=4)),
    ):
        pass
