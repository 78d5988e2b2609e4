"""Sparse attention: recorded indices are those the indexers chose, and a replay is bit-identical."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support import sweep, toys
from support.requests_mixed import all_facts
from support.routing_cases import other_keys
from support.toys import Folders
from verbatim import LLM, InvalidRequest, NotSupported, SamplingParams, rl

TOP_K = 8  # keys, or two blocks of four
LAYERS = {"deepseek_v32": 3, "minimax_m3": 2 * 2}  # two layers with indices for two groups of heads
PROMPTS = [toys.random_ids(n, seed=n) for n in (30, 5, 19)]
RECORD = SamplingParams(
    max_tokens=6,
    seed=4,
    ignore_eos=True,
    prompt_logprobs=0,
    record_routing=True,
    record_indices=True,
)
SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": dict(max_batch_tokens=7, max_sequences=3),
    "alone": dict(max_sequences=1, block_size=5),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return toys.make_toy("deepseek_v32")


@pytest.fixture(scope="module", params=LAYERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, folders: Folders) -> Path:
    return folders(name)


@pytest.fixture(scope="module")
def recorded(folder: Path) -> list[Any]:
    with LLM(folder, kv_memory="1MB") as llm:
        return llm.generate(PROMPTS, RECORD)


@contextmanager
def changed_choices(model: Any, change: Callable[[int, Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Replace what each indexer of transformers chooses; yield the list of what they chose."""
    chosen: list[Tensor] = []

    def hook(n: int) -> Any:
        def changed(module: Any, args: Any, output: Tensor) -> Tensor:
            chosen.append(output)
            return change(n, output)

        return changed

    indexers = [m for m in model.modules() if type(m).__name__.endswith("Indexer")]
    hooks = [indexer.register_forward_hook(hook(n)) for n, indexer in enumerate(indexers)]
    yield chosen
    for handle in hooks:
        handle.remove()


def keys_of(chosen: Tensor) -> Tensor:
    """Return the keys `[T, G, k]` of keys `[1, T, k]` or of blocks of four `[1, G, T, blocks]`."""
    if chosen.ndim == 3:
        return chosen[0, :, None]
    keys = (chosen[0, ..., None] * 4 + torch.arange(4)).flatten(-2)
    return keys.where(chosen[0].repeat_interleave(4, -1) >= 0, -1).transpose(0, 1)


def replays(records: list[Tensor]) -> list[SamplingParams]:
    return [RECORD.replace(replay_indices=record) for record in records]


def test_recorded_indices_match_transformers_indexers(name: str, recorded: list[Any]) -> None:
    model = toys.make_toy(name)
    for prompt, result in zip(PROMPTS, recorded, strict=True):
        output = result.outputs[0]
        ids = [*prompt, *output.token_ids]
        with changed_choices(model, lambda n, chosen: chosen) as theirs, torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False)
        indices = output.indices
        assert indices.dtype == torch.int32
        assert indices.shape == (len(ids) - 1, LAYERS[name], TOP_K)
        rows = torch.cat([keys_of(chosen) for chosen in theirs], 1)  # [T, layers, k]
        for position in range(len(ids) - 1):
            for layer in range(LAYERS[name]):
                want = sorted(i for i in rows[position, layer].tolist() if 0 <= i <= position)
                row = indices[position, layer].tolist()
                assert row == want + [-1] * (TOP_K - len(want))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SCHEDULES[name], id=name, marks=[pytest.mark.slow] * (name != "chunks"))
        for name in SCHEDULES
    ],
)
def test_replayed_indices_give_same_bits_in_every_schedule(
    options: dict[str, Any], name: str, folder: Path, recorded: list[Any]
) -> None:
    own = [result.outputs[0].indices for result in recorded]
    changed = [other_keys(*record.shape) for record in own]
    with LLM(folder, kv_memory="1MB") as llm:
        expected = all_facts(llm.generate(PROMPTS, replays(changed)))
        assert expected != all_facts(recorded)
    with LLM(folder, kv_memory="1MB", **options) as llm:
        assert all_facts(llm.generate(PROMPTS, RECORD)) == all_facts(recorded)
        assert all_facts(llm.generate(PROMPTS, replays(own))) == all_facts(recorded)
        found = llm.generate(PROMPTS, replays(changed))
        assert all_facts(found) == expected
        for result, keys in zip(found, changed, strict=True):
            assert torch.equal(result.outputs[0].indices.sort(-1).values, keys.sort(-1).values)
        # Cached prefixes hold no record, and those computed with replayed keys are not shared.
        assert all_facts(llm.generate(PROMPTS, RECORD)) == all_facts(recorded)


def test_replayed_indices_match_transformers_with_forced_keys(name: str) -> None:
    ids, model, keys = PROMPTS[0], toys.make_toy(name), []
    numbers = torch.Generator().manual_seed(0)

    def change(n: int, chosen: Tensor) -> Tensor:
        """In some rows, replace the choice: random earlier keys, or the first block and the current one."""
        if chosen.ndim == 3:
            other = torch.rand(chosen.shape[1], chosen.shape[1], generator=numbers)
            later = torch.ones_like(other).triu(1).bool()
            other = other.masked_fill(later, -1).topk(TOP_K).indices.int()[None]
        else:
            other = torch.zeros_like(chosen)
            other[..., 1] = torch.arange(chosen.shape[2]) // 4
        free = torch.tensor([position % 3 == 0 for position in range(len(ids))])
        free[: TOP_K + 1] = True
        chosen = torch.where(free[:, None], chosen, other)
        keys.append(keys_of(chosen))
        return chosen

    with changed_choices(model, change):
        theirs = toys.scores_of(model, ids)
    forced = torch.cat(keys, 1)
    forced = forced.where(forced <= torch.arange(len(ids))[:, None, None], -1)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, replay_indices=forced)
    with LLM(model, kv_memory="1MB") as llm:
        (ours,) = llm.generate([ids], params)
        (free,) = llm.generate([ids], params.replace(replay_indices=None))
    found = torch.tensor(ours.prompt_logprobs[1:])
    assert float((found - theirs).abs().max()) < 1e-4
    assert float((found - torch.tensor(free.prompt_logprobs[1:])).abs().max()) > 1e-2


def test_layers_without_own_indexer_record_no_indices() -> None:
    if "glm_moe_dsa" not in sweep.cases():
        pytest.skip("this transformers has no glm_moe_dsa")
    model = sweep.build("glm_moe_dsa")
    own = sum(type(m).__name__ == "GlmMoeDsaIndexer" for m in model.modules())
    with LLM(model, kv_memory="1MB") as llm:
        result = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2, record_indices=True))[0]
    assert result.outputs[0].indices.shape[1] == own


def test_sessions_and_parallel_samples_record_indices(folder: Path) -> None:
    with LLM(folder, kv_memory="1MB") as llm:
        (result,) = llm.generate([PROMPTS[0]], RECORD.replace(n=2))
        for output in result.outputs:
            ids = [*PROMPTS[0], *output.token_ids]
            (plain,) = llm.generate([ids], RECORD.replace(max_tokens=0, prompt_logprobs=None))
            assert torch.equal(output.indices, plain.outputs[0].indices[: len(ids) - 1])
        with llm.session(64, seed=4) as session:
            session.generate(PROMPTS[1], SamplingParams(max_tokens=4, ignore_eos=True))
            turn = session.generate([9, 8], RECORD.replace(prompt_logprobs=None))
            (plain,) = llm.generate(
                [session.token_ids], SamplingParams(max_tokens=0, record_indices=True)
            )
            indices = turn.outputs[0].indices
            assert torch.equal(indices, plain.outputs[0].indices[: len(indices)])


def test_rollout_records_indices_and_score_replays_them(model: Any) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    found = rl.rollout(model, PROMPTS, params, group_size=2, seed=1, record_indices=True)
    assert found.indices is not None
    assert found.indices.dtype == torch.int32
    assert found.indices.shape == (*found.sequences.shape, 3, TOP_K)
    scores = rl.score(model, found.sequences, found.attention_mask, indices=found.indices)
    assert torch.equal(found.of_responses(scores), found.logprobs)
    changed = torch.full_like(found.indices, -1)
    for b, row in enumerate(found.attention_mask):
        for g, mask in enumerate(row.bool()):
            changed[b, g, mask] = other_keys(int(mask.sum()), 3, TOP_K).int()
    other = rl.score(model, found.sequences, found.attention_mask, indices=changed)
    assert not torch.equal(other, scores)
    assert rl.rollout(model, PROMPTS, params).indices is None


def test_invalid_indices_and_unsupported_models_are_rejected(model: Any) -> None:
    fits = other_keys(12, 3, TOP_K)

    def changed(position: int, values: list[int]) -> Tensor:
        keys = fits.clone()
        keys[position, 1] = torch.tensor(values + [-1] * (TOP_K - len(values)))
        return keys

    refused = {
        "below 0 or after the token's own": [changed(2, [0, 1, 3]), fits - 5],
        "names a position twice": [changed(11, [1, 2, 2])],
        "leaves out keys": [changed(3, [0, 1, 3])],
        "must be integers": [fits.float(), fits[0]],
    }
    for message, records in refused.items():
        for record in records:
            with pytest.raises(InvalidRequest, match=message):
                SamplingParams(replay_indices=record)
    with LLM(model, kv_memory="1MB") as llm:
        for record in (fits[:, :2], fits[:, :, :7].clamp(max=-1), fits):
            with pytest.raises(InvalidRequest, match=r"replay_indices has shape .* \[7, 3, 8\]"):
                llm.generate([5, 6, 7], SamplingParams(max_tokens=4, replay_indices=record))
        with pytest.raises(NotSupported, match="record_indices with num_beams=2"):
            llm.generate([5], SamplingParams(record_indices=True, num_beams=2, temperature=0.0))
    reasons = {
        "llama": "none of its layers selects keys with an indexer",
        "deepseek_v4": "its indexers choose records of windows, not keys",
    }
    for name, reason in reasons.items():
        with LLM(toys.make_toy(name), kv_memory="1MB") as llm:
            for params in (dict(record_indices=True), dict(replay_indices=fits[:1])):
                with pytest.raises(NotSupported, match=reason):
                    llm.generate([5], SamplingParams(max_tokens=1, **params))
