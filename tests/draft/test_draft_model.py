"""Drafting with a draft model: structured output, KV cache, memory, weights, rejected models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from support.checkpoints import opening_fails
from support.drafters import check_no_drafts_left
from support.kempner_toys import kempner_toy
from support.poison import poison_draft_model
from support.requests_mixed import all_facts, facts, generated, mixed_requests
from support.toy_tokenizers import byte_level, metaspace
from support.toys import make_toy, random_ids
from verbatim import LLM, InvalidRequest, NotSupported, SamplingParams, storyteller
from verbatim.api.drafters import open_drafting
from verbatim.draft import DraftModel
from verbatim.draft.model import DraftModelProposer
from verbatim.engine import drafting, scheduler
from verbatim.errors import ModelError, OutOfBlocks
from verbatim.placement.distributed import ranks
from verbatim.sampling import grammar

PROMPT = random_ids(21, seed=5)


def proposer_of(llm: LLM) -> DraftModelProposer:
    proposer = llm.engine.drafting.proposer  # type: ignore[union-attr]
    assert isinstance(proposer, DraftModelProposer)
    return proposer


def note_calls(llm: LLM) -> list[tuple[int, int]]:
    """Rows of each call of the draft model from now on, and its last position."""
    runner, calls = proposer_of(llm).runner, []
    plain = runner.draft

    def noting(k: int, batch: Any, *rest: Any) -> Any:
        drawn = plain(k, batch, *rest)
        more = [
            len(ids) - 1 for ids in drawn
        ]  # tokens of one call are computed one after the other
        last = int(batch.positions.max()) + max(more, default=0)
        calls.append((batch.num_tokens + sum(more), last))
        return drawn

    runner.draft = noting  # type: ignore[method-assign]
    return calls


def rows_of(calls: list[tuple[int, int]]) -> int:
    """The rows of all calls so far, which are cleared."""
    rows = sum(count for count, _ in calls)
    calls.clear()
    return rows


# ---- structured output


def test_drafts_follow_structured_output_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (drafting, scheduler):  # a slow mask would cut a draft
        monkeypatch.setattr(module, "MASK_WAIT_S", 30.0)
    monkeypatch.setattr(grammar, "SLOW_S", 30.0)  # and the steps after it would have no drafts
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    }
    params = [
        SamplingParams(regex=r"[A-Z][a-z]{2,6}( [a-z]{1,6}){2}\.", temperature=0.7, seed=1, n=3),
        SamplingParams(json_schema=schema, temperature=0.7, seed=2, max_tokens=40, logprobs=2),
        SamplingParams(choice=["a cat", "a dog", "an owl"], temperature=1.3, seed=3),
        SamplingParams(
            regex=r"[a-z ]*\.", temperature=0.0, seed=5, frequency_penalty=0.3, max_tokens=20
        ),
        SamplingParams(temperature=0.7, seed=4, max_tokens=30),
    ]
    prompts = ["Once upon a time"] * len(params)
    with LLM() as llm:
        expected = all_facts(llm.generate(prompts, params))
        vocab_size = llm.info()["vocab_size"]
    with LLM(draft=storyteller.path(), num_draft_tokens=5) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
        assert llm.stats()["draft"]["acceptance"] == [1.0] * 5
        # Alone, each forward but the first gives five drafted tokens and one more.
        for p in params[1:]:
            (result,) = llm.generate(prompts[0], p)
            (completion,) = result.outputs
            forwards = 1 + math.ceil((len(completion.token_ids) - 1) / 6)
            assert result.metrics.draft.num_forwards == forwards
        check_no_drafts_left(llm)
    for other in (vocab_size, vocab_size - 70, vocab_size + 70):
        draft = make_toy("llama", vocab_size=other, num_hidden_layers=1)
        with LLM(draft=draft, num_draft_tokens=3) as llm:
            assert all_facts(llm.generate(prompts, params)) == expected
            assert llm.stats()["draft"]["drafted"] > 0
            check_no_drafts_left(llm)


# ---- computation and KV cache


def test_draft_model_computes_no_token_twice_and_samples_share_prompt() -> None:
    model = make_toy("qwen3")
    twin = make_toy("qwen3")
    with LLM(model, draft=twin, num_draft_tokens=3, block_size=4) as llm:
        calls = note_calls(llm)
        params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
        llm.generate(PROMPT, params)
        assert (one := rows_of(calls)) < len(PROMPT) + 30
        forwards = llm.stats()["forwards"]
        assert forwards == 1 + math.ceil(29 / 4)  # and none of the draft model's
        llm.generate(PROMPT[::-1], params.replace(n=4))
        assert rows_of(calls) < 4 * one - 3 * 18  # of 21 ids of the prompt, 20 are in full blocks
        # Nothing is drafted after an end of sequence.
        two: dict[str, Any] = dict(allowed_token_ids=[5, 2], min_tokens=2, logit_bias={2: 60.0})
        result = llm.generate(PROMPT, SamplingParams(seed=1, max_tokens=30, **two))[0]
        assert result.outputs[0].token_ids == [5, 5, 2]
        assert rows_of(calls) == len(PROMPT) + 2
        check_no_drafts_left(llm)


def test_drafts_with_kv_cache_match_drafts_recomputed_from_scratch() -> None:
    prompts = [random_ids(9 + 4 * i, i) for i in range(3)]
    params = [SamplingParams(seed=i, n=2, max_tokens=30, ignore_eos=True) for i in range(3)]
    model, draft = make_toy("qwen3", num_hidden_layers=2), make_toy("qwen3")
    with torch.no_grad():  # similar enough for some drafts to be accepted
        model.model.embed_tokens.weight.copy_(draft.model.embed_tokens.weight)
        model.lm_head.weight.copy_(draft.lm_head.weight)
    found: list[dict[Any, list[int]]] = [{}, {}]
    for drafts, afresh in zip(found, (False, True), strict=True):
        with LLM(model, draft=draft, num_draft_tokens=4, block_size=4) as llm:
            poison_draft_model(llm)
            proposer = proposer_of(llm)
            plain = proposer.propose

            def propose(
                sequences: Any,
                lengths: Any,
                plain: Any = plain,
                drafts: Any = drafts,
                forget: Any = proposer.clear if afresh else lambda: None,
            ) -> Any:
                answers = []
                for sequence, length in zip(sequences, lengths, strict=True):
                    # Some steps go without it, and tokens differ from its drafts.
                    asked = sequence.num_tokens % 5 > 1
                    forget()
                    answers += plain([sequence], [length]) if asked else [[]]
                    key = sequence.request.request_id, sequence.index, sequence.num_tokens
                    drafts[key] = answers[-1]
                return answers

            proposer.propose = propose  # type: ignore[method-assign]
            llm.generate(prompts, params)
            acceptance = llm.stats()["draft"]["acceptance"]
            assert 0.1 < acceptance[0] < 0.95 and len(acceptance) == 4
    assert found[0] == found[1]
    assert len(found[0]) > 60


def test_drafts_get_shorter_with_little_memory_and_tokens_stay_the_same() -> None:
    model = make_toy("qwen3")
    prompts = [random_ids(9 + 3 * i, i) for i in range(6)]
    params = [SamplingParams(seed=i, max_tokens=25, ignore_eos=True) for i in range(6)]
    with LLM(model) as llm:
        expected = all_facts(llm.generate(prompts, params))
        per_token = llm.info()["kv_bytes_per_token"]
    drafted = []
    for num_blocks in (2, 4, 9, 18, 60):
        draft = DraftModel(make_toy("qwen3"), kv_memory=4 * per_token * num_blocks)
        with LLM(model, draft=draft, num_draft_tokens=5, block_size=4) as llm:
            poison_draft_model(llm)
            proposer = proposer_of(llm)
            assert proposer.runner.num_blocks == num_blocks
            assert all_facts(llm.generate(prompts, params)) == expected
            acceptance = llm.stats()["draft"]["acceptance"]
            assert set(acceptance) <= {1.0}
            drafted.append(llm.stats()["draft"]["drafted"])
            check_no_drafts_left(llm)
            # A request that runs alone has all memory, also after others.
            alone = llm.generate(prompts[0], params[0])[0]
            assert facts(alone) == expected[0]
            assert bool(alone.metrics.draft.num_drafted) == (num_blocks > 3)
    assert drafted == sorted(drafted) and drafted[0] == 0 < drafted[1] < drafted[-1]


def test_draft_model_reuses_cached_prefix_of_earlier_request(tmp_path: Path) -> None:
    model = make_toy("qwen3")
    model.save_pretrained(tmp_path)
    params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
    with LLM(model, draft=tmp_path, num_draft_tokens=3, block_size=4) as llm:
        poison_draft_model(llm)
        calls = note_calls(llm)
        spent = []
        with llm.session(seed=1) as session:
            for prompt in (PROMPT, [7], [8]):
                session.generate(prompt, params)
                spent.append(rows_of(calls))
        llm.generate(PROMPT, params)
        again = rows_of(calls)
        assert spent[0] - 20 == again
        assert max(spent[1:]) < again + 3 * 4  # the last blocks of a turn are not shared
        assert llm.stats()["draft"]["acceptance"] == [1.0] * 3
        check_no_drafts_left(llm)


def test_samples_waiting_for_first_block_do_not_count_as_rejected_drafts() -> None:
    model, twin = make_toy("qwen3"), make_toy("qwen3")
    with LLM(model, draft=twin, num_draft_tokens=3, block_size=4) as llm:
        assert llm.engine.drafting is not None
        lengths, noted = llm.engine.drafting._lengths, list[tuple[int, int]]()
        lengths.note_draft = lambda sequence, *counts: noted.append(counts)  # type: ignore[method-assign]
        llm.generate(PROMPT, SamplingParams(seed=1, max_tokens=10, n=6, ignore_eos=True))
        assert len(noted) >= 12 and all(length == accepted for length, accepted in noted)


def test_without_prefix_cache_only_samples_share_blocks(tmp_path: Path) -> None:
    model = make_toy("qwen3")
    model.save_pretrained(tmp_path)
    params = SamplingParams(seed=1, max_tokens=9, ignore_eos=True)
    options: dict[str, Any] = dict(num_draft_tokens=3, block_size=4, prefix_cache=False)
    with LLM(model, draft=tmp_path, **options) as llm:
        calls = note_calls(llm)
        llm.generate(PROMPT, params)
        one = rows_of(calls)
        llm.generate(PROMPT, params)
        assert rows_of(calls) == one
        llm.generate([PROMPT] * 4, params)
        assert rows_of(calls) == 4 * one
        llm.generate(PROMPT, params.replace(n=4))
        assert rows_of(calls) < 4 * one - 3 * 18


def test_position_limit_of_draft_model_ends_drafts_but_not_request() -> None:
    model, draft = make_toy("gpt2"), make_toy("gpt2", max_position_embeddings=32, n_positions=32)
    params = SamplingParams(seed=2, max_tokens=40, ignore_eos=True)
    expected = generated(LLM(model), PROMPT, params)
    with LLM(model, draft=draft, num_draft_tokens=4) as llm:
        calls = note_calls(llm)
        assert all_facts(llm.generate(PROMPT, params)) == expected
        assert max(last for _, last in calls) == 31
        check_no_drafts_left(llm)


# ---- weights and memory


def test_kv_cache_of_draft_model_is_dropped_when_weights_change() -> None:
    model, draft = make_toy("qwen3"), make_toy("qwen3")
    with LLM(model, draft=draft, num_draft_tokens=2) as llm:
        stream = llm.stream(PROMPT, SamplingParams(seed=1, max_tokens=40, ignore_eos=True))
        next(stream), next(stream)
        (cache,) = proposer_of(llm)._caches.values()
        with torch.no_grad():
            draft.lm_head.weight.mul_(2)
        next(stream)
        proposer_of(llm).update()
        (again,) = proposer_of(llm)._caches.values()
        assert again is not cache and again.num_computed > len(PROMPT)
        stream.close()
    # A model that drafts for itself, and is updated.
    with LLM(model, draft=model, num_draft_tokens=3) as llm:
        poison_draft_model(llm)
        params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
        llm.update_weights(make_toy("qwen3", seed=5))
        with LLM(make_toy("qwen3", seed=5)) as other:
            assert facts(llm.generate(PROMPT, params)[0]) == facts(
                other.generate(PROMPT, params)[0]
            )
        assert llm.stats()["draft"]["acceptance"] == [1.0] * 3


def test_rejected_weight_sleep_leaves_engine_and_drafter_awake(tmp_path: Path) -> None:
    model = make_toy("qwen3")
    model.save_pretrained(tmp_path)
    params = SamplingParams(seed=1, max_tokens=12)
    for both in ((model, tmp_path), (tmp_path, model)):
        with LLM(both[0], draft=both[1], num_draft_tokens=3) as llm:
            before = facts(llm.generate(PROMPT, params)[0])
            with pytest.raises(NotSupported, match="live module"):
                llm.sleep(weights=True)
            assert not llm.stats()["asleep"]
            result = llm.generate(PROMPT, params)[0]
            assert facts(result) == before
            assert result.metrics.draft.acceptance == [1.0] * 3


def test_failed_sleep_of_runner_leaves_drafter_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(seed=1, max_tokens=12)
    with LLM(make_toy("qwen3"), draft=make_toy("qwen3"), num_draft_tokens=3) as llm:

        def fail(weights: bool) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(llm.engine.runner, "sleep", fail)
        with pytest.raises(OSError, match="no space left"):
            llm.sleep()
        assert not llm.stats()["asleep"]
        assert llm.generate(PROMPT, params)[0].metrics.draft.acceptance == [1.0] * 3


# ---- failing and rejected draft models


def test_draft_model_with_nan_or_errors_does_not_change_tokens() -> None:
    prompts, params = mixed_requests(12)
    model = make_toy("qwen3")
    expected = generated(LLM(model), prompts, params)
    draft = make_toy("llama")
    with torch.no_grad():
        draft.model.embed_tokens.weight.fill_(math.nan)
    with LLM(model, draft=draft, num_draft_tokens=3) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
        assert llm.stats()["draft"]["drafted"] == 0
        check_no_drafts_left(llm)
    draft = make_toy("llama")

    def fail(*_: Any) -> None:
        raise OSError("no more")

    draft.model.layers[1].register_forward_hook(fail)
    with LLM(model, draft=draft, num_draft_tokens=3) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
        assert llm.stats()["draft"]["errors"] > 0
        assert llm.stats()["draft"]["last_error"] == "OSError: no more"
        proposer_of(llm).update()
        assert proposer_of(llm).pool.num_used == 0
    # One that loses a layer while it is open.
    with LLM(model, draft=(draft := make_toy("llama")), num_draft_tokens=3) as llm:
        del draft.model.layers[2]
        assert all_facts(llm.generate(prompts, params)) == expected
        assert "ModelChanged" in llm.stats()["draft"]["last_error"]


def test_draft_model_with_other_vocabulary_is_rejected(tmp_path: Path) -> None:
    ours, theirs = byte_level().hf, metaspace().hf
    size = max(len(ours), len(theirs))
    model = make_toy("qwen3", vocab_size=size)
    make_toy("llama", vocab_size=size).save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match=r"tokenizer differs from .*: id \d+ is '.*' there"):
        LLM(model, tokenizer=ours, draft=tmp_path)
    # Without a tokenizer of the model, only sizes are compared, which may differ by padding.
    LLM(model, draft=tmp_path).close()
    with pytest.raises(InvalidRequest, match=rf"has 2000 ids, and the model's has {size}"):
        LLM(model, tokenizer=ours, draft=make_toy("llama", vocab_size=2000))
    # The same tokenizer with a few ids more, in a bigger vocabulary.
    ours.save_pretrained(tmp_path)
    small = make_toy("llama", vocab_size=size + 2000)
    small.save_pretrained(tmp_path)
    with LLM(model, tokenizer=ours, draft=tmp_path, num_draft_tokens=2) as llm:
        drafted = llm.generate("the quick", SamplingParams(seed=1, max_tokens=9))[0]
        plain = SamplingParams(seed=1, max_tokens=9, draft=False)
        assert facts(drafted) == facts(llm.generate("the quick", plain)[0])
        assert llm.stats()["draft"]["drafted"] > 0


def test_invalid_draft_models_are_rejected(tmp_path: Path) -> None:
    model = make_toy("qwen3")
    named = r"draft='\./nowhere': not one of 'ngram', 'mtp', 'early-exit', and can't be opened as a model: "
    opening_fails(ModelError, named, model, draft="./nowhere")
    opening_fails(ModelError, r"config\.json", model, draft=tmp_path)
    with pytest.raises(NotSupported, match="'auto'"):
        LLM(model, draft=DraftModel(make_toy("llama"), dtype="bfloat16"))
    opening_fails(NotSupported, "float64", model, draft=make_toy("llama", dtype=torch.float64))
    opening_fails(NotSupported, "kv_caches", model, draft=kempner_toy())
    opening_fails(ModelError, "no transformers model", model, draft=torch.nn.Linear(2, 2))
    with pytest.raises(OutOfBlocks, match="kv_memory"):
        LLM(model, draft=DraftModel(make_toy("llama"), kv_memory=100))
    for bad in (None, "", 3, b"x"):
        with pytest.raises(InvalidRequest, match="must be a folder"):
            DraftModel(bad)  # type: ignore[arg-type]
    for memory in (-1, "much", "200%", True):
        with pytest.raises(InvalidRequest, match="kv_memory"):
            DraftModel(model, kv_memory=memory)


def test_following_rank_opens_no_draft_model() -> None:
    attributes, unused = dict.fromkeys(ranks._ATTRIBUTES, 9) | {"info": {}}, cast(Any, None)
    runner: Any = ranks.FollowingRunner(unused, attributes)
    drafting = open_drafting(DraftModel("no/such/folder"), 3, runner, unused, unused)
    assert drafting is not None and drafting.info()["num_draft_tokens"] == 3
