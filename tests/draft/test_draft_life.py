"""Drafts together with weight updates, aborts, timeouts and other APIs; draft metrics; rejected options."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.drafters import Hostile, Moody, Oracle, Random, answers_of
from support.pools import check_pool
from support.requests_mixed import all_facts, facts, submitted
from support.toys import make_toy, random_ids
from verbatim import LLM, FinishReason, InvalidRequest, NotSupported, SamplingParams, rl
from verbatim.core import DraftStats, Request
from verbatim.draft.ngram import Ngram

PROMPTS = [random_ids(5 + 6 * i, seed=i) for i in range(4)]
LONG = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9)
ASKED = [LONG.replace(seed=i, n=1 + i % 2) for i in range(4)]


def open_toy(module: Any, draft: Any = None, length: int | None = None, **options: Any) -> LLM:
    return LLM(
        module,
        draft=draft,
        num_draft_tokens=length,
        **{"kv_memory": "4MB", "block_size": 4, **options},
    )


def finish(llm: LLM, requests: list[Request]) -> list[Any]:
    while llm.engine.step():
        check_pool(llm.engine.scheduler.pool)
    assert llm.stats()["blocks_used"] == 0
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.result for request in requests]


# ---- weight updates, aborts, timeouts


def other_weights() -> dict[str, torch.Tensor]:
    return make_toy("llama", seed=1).state_dict()


@pytest.mark.parametrize("length", [3, None])
def test_requests_restarted_by_weight_update_match_plain_decoding(length: int | None) -> None:
    with open_toy(make_toy("llama")) as llm:
        old = llm.generate(PROMPTS, ASKED)
        llm.update_weights(other_weights())
        new = llm.generate(PROMPTS, ASKED)
    for drafter in (Ngram(1), Oracle(answers_of(old)), Moody(answers_of(new), 5), Random(3)):
        with open_toy(make_toy("llama"), drafter, length) as llm:
            requests = submitted(llm, PROMPTS, ASKED)
            for _ in range(4):
                llm.engine.step()
            llm.update_weights(other_weights(), restart=True)
            assert all_facts(finish(llm, requests)) == all_facts(new)
            if isinstance(drafter, Ngram):
                del requests
                gc.collect()  # a request and its sequences reference each other
                assert not drafter._histories  # it keeps no sequence alive


def test_requests_continued_after_weight_update_match_plain_decoding() -> None:
    with open_toy(make_toy("llama")) as llm:
        answers = answers_of(llm.generate(PROMPTS[:1], ASKED[:1]))
    split = None
    found = []
    for drafter in (Oracle(answers), None):
        with open_toy(make_toy("llama"), drafter, drafter and 4) as llm:
            requests = submitted(llm, PROMPTS[:1], ASKED[:1])
            ids = requests[0].sequences[0].output_ids
            while len(ids) < (split or 11):
                llm.engine.step()
            assert split in (None, len(ids))
            split = len(ids)  # 11: two windows of five after the first token
            llm.update_weights(other_weights())
            (result,) = finish(llm, requests)
            assert result.outputs[0].weight_versions == [0] * split + [1] * (30 - split)
            found.append(facts(result))
    assert found[0] == found[1]


def test_abort_and_timeout_keep_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_toy("llama")
    asked = [q.replace(timeout_s=1000.0 if i == 2 else None) for i, q in enumerate(ASKED)]
    with open_toy(module) as llm:
        plain = llm.generate(PROMPTS, asked)
    with open_toy(module, Moody(answers_of(plain), 1), 5) as llm:
        requests = submitted(llm, PROMPTS, asked)
        for _ in range(4):
            llm.engine.step()
        llm.engine.abort(requests[1])
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 1001.0)
        results = finish(llm, requests)
        assert llm.engine.drafting is not None
    for i, reason in ((1, FinishReason.ABORT), (2, FinishReason.TIMEOUT)):
        for c, d in zip(results[i].outputs, plain[i].outputs, strict=True):
            assert c.finish_reason is reason
            assert 4 <= len(c.token_ids) < 30 and c.token_ids == d.token_ids[: len(c.token_ids)]
            assert c.logprobs == d.logprobs[: len(c.token_ids)]
    assert all_facts([results[0], results[3]]) == all_facts([plain[0], plain[3]])


def test_optimizer_step_on_live_module_takes_effect_between_drafts() -> None:
    """The step counts as a weight update, with drafts and without."""
    found = []
    for drafter in (None, Random(2)):
        module = make_toy("llama")
        with open_toy(module, drafter, drafter and 3) as llm:
            requests = submitted(llm, PROMPTS, ASKED)
            for _ in range(6):  # none of these drafts is accepted
                llm.engine.step()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.25)
            found.append(all_facts(finish(llm, requests)))
            assert llm.stats()["weight_version"] == 1
    assert found[0] == found[1]


# ---- other APIs


def test_rollout_with_process_group_is_same_with_drafts() -> None:
    """A rank's step is one forward, with drafts or without. A group of one rank stands in for any."""
    module = make_toy("llama")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for drafter in (None, Ngram(1), Hostile("an error"), Random(1)):
            with open_toy(module, drafter, drafter and 3) as llm:
                rollout = rl.rollout(
                    llm, PROMPTS, LONG, group_size=2, seed=5, process_group=dist.group.WORLD
                )
                found.append((rollout.responses.tolist(), rollout.logprobs.tolist()))
        assert found == found[:1] * 4
        with LLM(module, draft="early-exit") as llm:  # its drafts run a module that may communicate
            with pytest.raises(NotSupported, match="process group with drafts by LayersProposer"):
                rl.rollout(llm, PROMPTS, LONG, process_group=dist.group.WORLD)
            assert llm.stats()["forwards"] == 0
    finally:
        dist.destroy_process_group()


def test_proposer_passed_by_user_is_not_closed_with_engine() -> None:
    class Kept(Ngram):
        closed = False

        def close(self) -> None:
            self.closed = True

    proposer = Kept()
    for _ in range(2):
        with open_toy(make_toy("llama"), proposer, 2) as llm:
            assert llm.info()["draft"] == {"proposer": "Kept", "num_draft_tokens": 2}
    assert not proposer.closed


def test_info_reports_weights_kv_and_layers_of_drafter() -> None:
    module, small = make_toy("llama"), make_toy("llama", num_hidden_layers=1)
    with LLM(module, draft=small) as llm:
        report = llm.info()["draft"]
    assert report["proposer"] == "DraftModelProposer" and report["num_draft_tokens"] is None
    assert report["weight_bytes"] == sum(p.nbytes for p in small.parameters())
    assert report["kv_bytes"] > 0 and report["layers"] == 1
    with LLM(module, draft="early-exit") as llm:
        assert llm.info()["draft"]["layers"] == 1
    with LLM(module) as llm:
        assert llm.info()["draft"] is None


# ---- metrics


def test_draft_metrics_of_requests_add_up_to_stats_of_engine() -> None:
    module = make_toy("llama")
    with open_toy(module) as llm:
        plain = llm.generate(PROMPTS, ASKED)
        assert llm.stats()["draft"] is None
        assert all(r.metrics.draft == DraftStats() for r in plain)
        assert math.isnan(plain[0].metrics.draft.tokens_per_forward)
    asked = [*ASKED, LONG.replace(seed=9, draft=False)]
    prompts = [*PROMPTS, PROMPTS[0]]
    right = Oracle(answers_of(plain), lambda sequence: sequence.request.seed)
    with open_toy(module, right, 3) as llm:
        results = llm.generate(prompts, asked)
        assert all_facts(results[:4]) == all_facts(plain)
        reported = llm.stats()["draft"]
        total = llm.engine.drafting.totals  # type: ignore[union-attr]
    assert results[4].metrics.draft == DraftStats()  # it disabled drafts
    each = [result.metrics.draft for result in results[:4]]
    assert total.num_drafted == [sum(f.num_drafted[j] for f in each) for j in range(3)]
    for name in ("num_forwards", "num_tokens", "num_cut"):
        assert getattr(total, name) == sum(getattr(f, name) for f in each)
    assert total.time_s == pytest.approx(sum(f.time_s for f in each)) and total.time_s > 0
    assert reported["drafted"] == sum(total.num_drafted)
    assert reported["accepted"] == sum(total.num_accepted)
    assert reported["time_s"] == total.time_s
    assert (reported["cut"], reported["errors"], reported["last_error"]) == (0, 0, None)
    assert reported["acceptance"] == total.acceptance
    for seed, (figures, result) in enumerate(zip(each, results, strict=False)):
        tokens = sum(len(c.token_ids) for c in result.outputs)
        assert figures.num_tokens == tokens
        assert figures.num_tokens == figures.num_forwards + sum(figures.num_accepted)
        assert figures.tokens_per_forward == tokens / figures.num_forwards
        assert figures.acceptance == [1.0] * seed + [0.0] * (3 - seed)
        assert figures.num_drafted == sorted(figures.num_drafted, reverse=True)


def test_step_that_completes_a_structure_counts_no_token() -> None:
    with LLM(draft="ngram") as llm:
        params = SamplingParams(choice=["yes"], ignore_eos=True, max_tokens=9)
        (result,) = llm.generate("Once upon a time", params)
    assert result.metrics.draft.num_tokens == len(result.outputs[0].token_ids)


def test_drafter_errors_are_counted_per_call_and_per_request() -> None:
    drafter = Hostile("an error")
    with open_toy(make_toy("llama"), drafter, 3) as llm:
        results = llm.generate(PROMPTS[:2], ASKED[:2])  # the second has two samples
        reported = llm.stats()["draft"]
    # At every token but the first, the last, and the second, before which the samples fork.
    assert reported["errors"] == drafter.num_calls == 27
    assert [r.metrics.draft.num_errors for r in results] == [27, 27]
    assert reported["last_error"] == "ValueError: out of ideas"
    assert reported["tokens_per_forward"] == 1.0 and reported["acceptance"] == []


# ---- rejected requests and options


def test_beam_search_is_rejected_with_drafts_and_works_without() -> None:
    beams = SamplingParams(num_beams=3, n=2, max_tokens=6, seed=1)
    module = make_toy("llama")
    with open_toy(module) as llm:
        expected = facts(llm.generate(PROMPTS[0], beams.replace(draft=False))[0])
        assert facts(llm.generate(PROMPTS[0], beams)[0]) == expected  # no drafter here
    for options in (dict(length=4), dict(length=0), dict()):
        with open_toy(module, "ngram", **options) as llm:
            with pytest.raises(NotSupported, match=r"num_beams=3 .* draft=False"):
                llm.generate(PROMPTS[:2], beams)
            with pytest.raises(NotSupported, match=r"num_beams=3 .* draft=False"):
                next(llm.stream(PROMPTS[0], beams))
            assert llm.stats()["forwards"] == 0
            both = llm.generate(PROMPTS[:2], [beams.replace(draft=False), LONG])
            assert facts(both[0]) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(draft=3), "draft=3"),
        (dict(draft=""), "draft=''"),
        (dict(draft=True), "draft=True"),
        (dict(draft=Random), "draft=<class"),  # the class instead of an instance
        (dict(draft=lambda sequences, lengths: []), "draft=<function"),
        (dict(draft=["ngram"]), r"draft=\['ngram'\]"),
        (dict(num_draft_tokens=2), r"num_draft_tokens=2: requires draft="),
        (dict(draft="ngram", num_draft_tokens=-1), "num_draft_tokens=-1.*0 to 64"),
        (dict(draft="ngram", num_draft_tokens=65), "num_draft_tokens=65.*0 to 64"),
        (dict(draft="ngram", num_draft_tokens=True), "num_draft_tokens=True"),
        (dict(draft="ngram", num_draft_tokens=2.0), "num_draft_tokens=2.0"),
        (dict(draft="ngram", num_draft_tokens="2"), "num_draft_tokens='2'"),
    ],
)
def test_invalid_draft_options_are_rejected(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        LLM(make_toy("llama"), kv_memory="1MB", **options)
