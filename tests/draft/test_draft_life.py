"""Drafts beside all that happens to an engine: new weights, sleep, aborts, doors. And what is told."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.drafters import Hostile, Moody, Oracle, Random, answers_of
from support.requests_mixed import all_facts, facts
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


def admitted(llm: LLM, asked: list[SamplingParams] = ASKED) -> list[Request]:
    return [llm.engine.admission.admit(p, q) for p, q in zip(PROMPTS, asked, strict=False)]


def finish(llm: LLM, requests: list[Request]) -> list[Any]:
    while llm.engine.step():
        llm.engine.scheduler.pool.check()
    assert llm.stats()["blocks_used"] == 0
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.result for request in requests]


# ---- new weights, sleep, ends from outside


def other_weights() -> dict[str, torch.Tensor]:
    return make_toy("llama", seed=1).state_dict()


@pytest.mark.parametrize("length", [3, None])
def test_those_who_begin_again_with_new_weights_are_drafted_for_anew(length: int | None) -> None:
    with open_toy(make_toy("llama")) as llm:
        old = llm.generate(PROMPTS, ASKED)
        llm.update_weights(other_weights())
        new = llm.generate(PROMPTS, ASKED)
    for drafter in (Ngram(1), Oracle(answers_of(old)), Moody(answers_of(new), 5), Random(3)):
        with open_toy(make_toy("llama"), drafter, length) as llm:
            requests = admitted(llm)
            for request in requests:
                llm.engine.submit(request)
            for _ in range(4):
                llm.engine.step()
            llm.update_weights(other_weights(), restart=True)
            assert all_facts(finish(llm, requests)) == all_facts(new)
            if isinstance(drafter, Ngram):
                del request, requests
                gc.collect()  # a request and its sequences know each other
                assert not drafter._histories  # it holds on to nobody


def test_those_who_go_on_with_new_weights_draw_the_rest_as_plain_decoding_does() -> None:
    with open_toy(make_toy("llama")) as llm:
        answers = answers_of(llm.generate(PROMPTS[:1], ASKED[:1]))
    split = None
    told = []
    for drafter in (Oracle(answers), None):
        with open_toy(make_toy("llama"), drafter, drafter and 4) as llm:
            (request,) = requests = admitted(llm, ASKED[:1])
            llm.engine.submit(request)
            ids = request.sequences[0].output_ids
            while len(ids) < (split or 11):
                llm.engine.step()
            assert split in (None, len(ids))
            split = len(ids)  # 11: two windows of five behind the first token
            llm.update_weights(other_weights())
            (result,) = finish(llm, requests)
            assert result.outputs[0].weight_versions == [0] * split + [1] * (30 - split)
            told.append(facts(result))
    assert told[0] == told[1]


def test_an_abort_and_a_timeout_keep_what_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_toy("llama")
    asked = [q.replace(timeout_s=1000.0 if i == 2 else None) for i, q in enumerate(ASKED)]
    with open_toy(module) as llm:
        plain = llm.generate(PROMPTS, asked)
    with open_toy(module, Moody(answers_of(plain), 1), 5) as llm:
        requests = admitted(llm, asked)
        for request in requests:
            llm.engine.submit(request)
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


def test_a_live_modules_step_in_the_middle_is_seen_between_drafts() -> None:
    """The optimizer's step counts as an update, whoever drafts."""
    told = []
    for drafter in (None, Random(2)):
        module = make_toy("llama")
        with open_toy(module, drafter, drafter and 3) as llm:
            requests = admitted(llm)
            for request in requests:
                llm.engine.submit(request)
            for _ in range(6):  # no draft of these is ever right
                llm.engine.step()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.25)
            told.append(all_facts(finish(llm, requests)))
            assert llm.stats()["weight_version"] == 1
    assert told[0] == told[1]


# ---- doors


def test_ranks_keep_step_whatever_is_drafted() -> None:
    """A rank's step is one forward, with drafts or without; the group of one stands for any."""
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
        with LLM(module, draft="early-exit") as llm:  # forwards of a module that may talk to ranks
            with pytest.raises(NotSupported, match="process group with drafts by LayersProposer"):
                rl.rollout(llm, PROMPTS, LONG, process_group=dist.group.WORLD)
            assert llm.stats()["forwards"] == 0
    finally:
        dist.destroy_process_group()


def test_a_proposer_that_a_user_brings_is_not_closed_with_the_engine() -> None:
    class Kept(Ngram):
        closed = False

        def close(self) -> None:
            self.closed = True

    proposer = Kept()
    for _ in range(2):
        with open_toy(make_toy("llama"), proposer, 2) as llm:
            assert llm.info()["draft"] == {"proposer": "Kept", "num_draft_tokens": 2}
    assert not proposer.closed


def test_what_a_drafter_holds_is_told() -> None:
    module, small = make_toy("llama"), make_toy("llama", num_hidden_layers=1)
    with LLM(module, draft=small) as llm:
        told = llm.info()["draft"]
    assert told["proposer"] == "DraftModelProposer" and told["num_draft_tokens"] is None
    assert told["weight_bytes"] == sum(p.nbytes for p in small.parameters())
    assert told["kv_bytes"] > 0 and told["layers"] == 1
    with LLM(module, draft="early-exit") as llm:
        assert llm.info()["draft"]["layers"] == 1
    with LLM(module) as llm:
        assert llm.info()["draft"] is None


# ---- what is told


def test_figures_of_requests_add_up_to_the_engines_and_say_what_became_of_drafts() -> None:
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
        said = llm.stats()["draft"]
        total = llm.engine.drafting.totals  # type: ignore[union-attr]
    assert results[4].metrics.draft == DraftStats()  # it asked for none
    each = [result.metrics.draft for result in results[:4]]
    assert total.num_drafted == [sum(f.num_drafted[j] for f in each) for j in range(3)]
    for name in ("num_forwards", "num_tokens", "num_cut"):
        assert getattr(total, name) == sum(getattr(f, name) for f in each)
    assert total.time_s == pytest.approx(sum(f.time_s for f in each)) and total.time_s > 0
    assert said["drafted"] == sum(total.num_drafted)
    assert said["accepted"] == sum(total.num_accepted)
    assert said["time_s"] == total.time_s
    assert (said["cut"], said["errors"], said["last_error"]) == (0, 0, None)
    assert said["acceptance"] == total.acceptance
    for seed, (figures, result) in enumerate(zip(each, results, strict=False)):
        samples = len(result.outputs)
        # One forward, the prompt's, draws for all samples and has no draft.
        tokens = sum(len(c.token_ids) for c in result.outputs) - (samples - 1)
        assert figures.num_tokens == tokens
        assert figures.num_tokens == figures.num_forwards + sum(figures.num_accepted)
        assert figures.tokens_per_forward == tokens / figures.num_forwards
        assert figures.acceptance == [1.0] * seed + [0.0] * (3 - seed)
        assert figures.num_drafted == sorted(figures.num_drafted, reverse=True)


def test_a_drafter_that_fails_counts_once_a_time_and_once_for_each_request_it_failed() -> None:
    drafter = Hostile("an error")
    with open_toy(make_toy("llama"), drafter, 3) as llm:
        results = llm.generate(PROMPTS[:2], ASKED[:2])  # the second has two samples
        said = llm.stats()["draft"]
    # At every token but the first, the last, and the second, before which the samples part.
    assert said["errors"] == drafter.num_calls == 27
    assert [r.metrics.draft.num_errors for r in results] == [27, 27]
    assert said["last_error"] == "ValueError: out of ideas"
    assert said["tokens_per_forward"] == 1.0 and said["acceptance"] == []


# ---- the door


def test_beams_are_refused_by_name_where_somebody_drafts_and_work_without() -> None:
    beams = SamplingParams(num_beams=3, n=2, max_tokens=6, seed=1)
    module = make_toy("llama")
    with open_toy(module) as llm:
        expected = facts(llm.generate(PROMPTS[0], beams.replace(draft=False))[0])
        assert facts(llm.generate(PROMPTS[0], beams)[0]) == expected  # nobody drafts here
    for options in (dict(length=4), dict(length=0), dict()):
        with open_toy(module, "ngram", **options) as llm:
            for call in (llm.generate, llm.stream):
                with pytest.raises(NotSupported, match=r"num_beams=3 .* draft=False"):
                    list(
                        call(
                            [PROMPTS[0], PROMPTS[1]] if call == llm.generate else PROMPTS[0], beams
                        )
                    )
            assert llm.stats()["forwards"] == 0
            both = llm.generate([PROMPTS[0], PROMPTS[1]], [beams.replace(draft=False), LONG])
            assert facts(both[0]) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(draft=3), "draft=3"),
        (dict(draft=""), "draft=''"),
        (dict(draft=True), "draft=True"),
        (dict(draft=Random), "draft=<class"),  # the class, where one of it is wanted
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
def test_what_cannot_draft_is_refused_with_what_can(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        LLM(make_toy("llama"), kv_memory="1MB", **options)
