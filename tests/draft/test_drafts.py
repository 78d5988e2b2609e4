"""Drafts do not change a bit of any result: all drafters, draft lengths, kinds of requests and schedules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support import kempner_toys
from support.drafters import HOSTILE, Answers, Hostile, Moody, Oracle, Random, answers_of
from support.odd_toys import DTYPES
from support.pairwise import slow_but
from support.pools import check_pool
from support.requests_mixed import all_facts, facts, mixed_requests
from support.toy_tokenizers import byte_level
from support.toys import make_toy, random_ids
from verbatim import LLM, Delta, RequestFailed, Result, SamplingParams
from verbatim.cli.options import MODEL
from verbatim.draft.config import BY_NAME
from verbatim.draft.ngram import Ngram

LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)


@cache
def model(name: str, dtype: str = "float32") -> Any:
    if name == "kempner":
        return kempner_toys.kempner_toy()
    return make_toy(name, dtype=DTYPES[dtype])


def open_toy(name: str, dtype: str = "float32", **options: Any) -> LLM:
    return LLM(model(name, dtype), **{"kv_memory": "4MB", "block_size": 4, **options})


def draftable_requests(name: str) -> tuple[list[list[int]], list[SamplingParams]]:
    """The mixed requests, somewhat longer; beams ask for no drafts."""
    prompts, params = mixed_requests()
    moe = name in ("qwen3_moe", "gpt_oss", "deepseek_v3")
    return prompts, [
        p.replace(
            max_tokens=min(6 + i % 9, 64 - len(prompts[i])) if name == "kempner" else 6 + i % 9,
            record_routing=moe and p.num_beams == 1,
            hidden_states=p.hidden_states and name != "kempner",
        )
        for i, p in enumerate(params)
    ]


@cache
def plain_results(name: str, dtype: str) -> list[Result]:
    with open_toy(name, dtype, prefix_cache=False) as llm:
        return llm.generate(*draftable_requests(name))


def moody(answers: Answers) -> Any:
    return Moody(answers, seed=3)


MAKERS: list[Callable[[Answers], Any]] = [moody, Oracle, lambda _: Ngram(1), lambda _: Random()]
LENGTHS = (0, 1, 2, 3, 5, 8, None)
SCHEDULES: list[dict[str, Any]] = [
    dict(),
    dict(max_batch_tokens=7, block_size=5),
    dict(tokens=108, block_size=8),  # the longest request fits, two of them do not
    dict(max_sequences=3, prefix_cache=False),
    dict(tokens=116, max_batch_tokens=13),
    dict(num_threads=3, block_size=1),
    dict(num_threads=2, max_batch_tokens=40),
]


def check_schedules(name: str, dtype: str, shift: int, lengths: Any = LENGTHS) -> None:
    """Compare drafted with plain results for some draft lengths, each with another drafter and schedule."""
    prompts, params = draftable_requests(name)
    plain = plain_results(name, dtype)
    expected, answers = all_facts(plain), answers_of(plain)
    for i, length in enumerate(lengths):
        options = dict(SCHEDULES[(i + shift) % len(SCHEDULES)])
        proposer = MAKERS[(i + shift // 2) % len(MAKERS)](answers)
        if tokens := options.pop("tokens", None):
            with open_toy(name, dtype) as llm:
                options["kv_memory"] = llm.info()["kv_bytes_per_token"] * tokens
        with open_toy(name, dtype, draft=proposer, num_draft_tokens=length, **options) as llm:
            where = f"{length} tokens, {proposer}, {options}"
            assert all_facts(llm.generate(prompts, params)) == expected, where
            stats = llm.stats()
            assert stats["blocks_used"] == 0
            assert tokens is None or stats["preemptions"] > 0, where
            check_pool(llm.engine.scheduler.pool)
            drafts, drafted = isinstance(proposer, Oracle) and length, stats["draft"]["drafted"]
            assert drafted > 0 if drafts else not (drafted and length == 0), where
            assert all_facts([llm.generate(prompts[i], params[i])[0]]) == [expected[i]], "alone"
            *_, last = llm.stream(prompts[-2], params[-2])
            assert last.result is not None and facts(last.result) == expected[-2], "streamed"


@pytest.mark.parametrize(
    ("name", "dtype", "shift"),
    [
        ("llama", "float32", 0),
        pytest.param("qwen3_moe", "bfloat16", 3, marks=pytest.mark.slow),
        ("gpt_oss", "bfloat16", 5),  # a sliding window and sinks
        ("deepseek_v3", "float32", 6),  # latent attention
        # No attention interface; a module with kv_caches of its own.
        pytest.param("falcon_alibi", "bfloat16", 1, marks=pytest.mark.slow),
        pytest.param("kempner", "float32", 3, marks=pytest.mark.slow),
    ],
)
def test_drafter_length_and_schedule_do_not_change_bits(name: str, dtype: str, shift: int) -> None:
    check_schedules(name, dtype, shift, LENGTHS[shift % 2 :: 2])


@pytest.mark.slow
def test_every_draft_length_in_every_schedule_gives_same_bits() -> None:
    names = ("llama", "qwen3_moe", "gemma2", "bloom", "gpt2", "deepseek_v3", "gpt_oss")
    for shift, name in enumerate(names):
        check_schedules(name, "float32" if shift % 2 else "bfloat16", shift)


# ---- misbehaving drafters


@cache
def plain_few() -> list[Result]:
    with open_toy("llama") as llm:
        return llm.generate(*few_requests())


def few_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts, params = draftable_requests("llama")
    chosen = (0, 1, 3, 4, 7, 8, 10)  # greedy, sampled, penalties, n, stops, processors
    return [prompts[i] for i in chosen], [params[i] for i in chosen]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_drafter_does_not_change_results_and_is_reported(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Hostile(name)
    with (
        open_toy("llama", draft=drafter, num_draft_tokens=3) as llm,
        caplog.at_level(logging.WARNING, "verbatim"),
    ):
        assert all_facts(llm.generate(*few_requests())) == all_facts(plain_few())
        stats = llm.stats()
    assert drafter.num_calls > 5
    assert stats["blocks_used"] == 0
    assert stats["draft"]["errors"] == (drafter.num_calls if drafter.fails else 0)
    messages = [record.getMessage() for record in caplog.records if record.name == "verbatim"]
    assert len(messages) == drafter.fails  # logged once, however often it fails
    assert all("the proposer Hostile failed" in line for line in messages)
    assert (stats["draft"]["last_error"] is None) != drafter.fails


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("outside the vocabulary", 7),  # with the ids after it
        ("negative", 9),
        ("floats", 8),
        ("a string", 11),
        ("too many", 4),  # reading one id more than requested is enough to know
        ("an endless draft", 4),
        ("end of sequence", 0),  # ends a draft without an error
    ],
)
def test_invalid_draft_ids_are_cut_and_counted(name: str, cut: int) -> None:
    with open_toy("llama", draft=Hostile(name), num_draft_tokens=3) as llm:
        greedy = SamplingParams(max_tokens=6, temperature=0.0)
        (result,) = llm.generate(random_ids(5, 3), greedy)
        stats = llm.stats()["draft"]
    assert len(result.outputs[0].token_ids) == stats["tokens"] == 6
    assert stats["accepted"] == 0  # so drafts of 3, 3, 2 and 1 tokens were requested
    assert stats["cut"] == result.metrics.draft.num_cut == cut
    assert stats["drafted"] == {"end of sequence": 0, "outside the vocabulary": 4}.get(
        name, 9 * (name in ("too many", "an endless draft"))
    )


def test_drafter_may_read_stats_but_not_generate() -> None:
    num_running = []

    class Meddler:
        def propose(self, sequences: list[Any], lengths: list[int]) -> list[list[int]]:
            num_running.append(llm.stats()["running"])
            llm.generate([5, 6], LONG)
            raise AssertionError("it was served in the middle of a step")

    with open_toy("llama", draft=Meddler(), num_draft_tokens=2) as llm:
        assert all_facts(llm.generate(*few_requests())) == all_facts(plain_few())
        assert "own forward" in llm.stats()["draft"]["last_error"]
        assert max(num_running) > 1


def test_module_with_propose_method_is_used_as_proposer() -> None:
    class Head(torch.nn.Module):
        def propose(self, sequences: list[Any], lengths: list[int]) -> list[list[int]]:
            return [[9] * length for length in lengths]

    with open_toy("llama", draft=Head(), num_draft_tokens=2) as llm:
        assert llm.info()["draft"]["proposer"] == "Head"
        assert all_facts(llm.generate(*few_requests())) == all_facts(plain_few())
        assert llm.stats()["draft"]["drafted"] > 0


def test_stream_deltas_report_accepted_draft_tokens() -> None:
    prompt, params = random_ids(9, 4), LONG.replace(n=1)
    with open_toy("llama") as llm:
        answers = answers_of(llm.generate([prompt], params))
    proposer = Noted(answers, lambda sequence: len(sequence.output_ids) % 3)
    with open_toy("llama", draft=proposer, num_draft_tokens=4) as llm:
        deltas = list(llm.stream(prompt, params))
    place = 0
    for delta in deltas:
        drafted = proposer.drafts.get(place, [])[: delta.num_accepted]
        assert delta.token_ids[:-1] == drafted and len(drafted) == delta.num_accepted
        place += len(delta.token_ids)
    assert deltas[-1].result is not None
    figures = deltas[-1].result.metrics.draft
    assert sum(delta.num_accepted for delta in deltas) == sum(figures.num_accepted) > 10


class Noted(Oracle):
    """Records its drafts, by the number of output tokens before them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drafts: dict[int, list[int]] = {}

    def draft(self, sequence: Any, length: int) -> list[int]:
        self.drafts[len(sequence.output_ids)] = found = super().draft(sequence, length)
        return found


# ---- structured output, stops and text


def open_text(**options: Any) -> LLM:
    """A toy whose random tokens are words, pieces of CJK and emoji, and broken bytes."""
    tokenizer = byte_level()
    return LLM(text_model(), tokenizer=tokenizer.hf, kv_memory="4MB", block_size=4, **options)


@cache
def text_model() -> Any:
    return make_toy("llama", vocab_size=byte_level().vocab_size)


@cache
def plain_texts() -> tuple[list[Result], list[list[Delta]]]:
    params = text_requests()
    with open_text() as llm:
        results = llm.generate([TEXT] * len(params), params)
        return results, [list(llm.stream(TEXT, asked)) for asked in params]


TEXT = "日本 🙂 the fox"
STRUCTURES: list[dict[str, Any]] = [
    dict(regex=r"[a-c]{3}( [d-f]{2,5}){2}\."),
    dict(
        json_schema={
            "type": "object",
            "properties": {"a": {"enum": ["x", "yy"]}},
            "required": ["a"],
        }
    ),
    dict(choice=["fox fox fox", "fox dog", "the lazy dog"], temperature=0.0),
    dict(grammar='start: "(" start ")" | WORD\nWORD: /[a-z]{1,5}/', n=3),
    dict(regex=r"[a-z ]+", ignore_eos=True, top_p=0.9, logprobs=2),
    dict(regex=r"[a-z]{2}", ignore_eos=True),
    dict(stop=["o", "日"], temperature=1.8),
    dict(stop=["a", "e"], temperature=1.8, min_tokens=7, include_stop_str_in_output=True, n=2),
    dict(stop=["xyz"], temperature=1.8, repetition_penalty=1.2),
    dict(temperature=1.8, ignore_eos=True, bad_words=["fox", "the"]),
]


def text_requests() -> list[SamplingParams]:
    plain = SamplingParams(max_tokens=24, temperature=1.3)
    return [plain.replace(seed=i, **{"temperature": 1.3, **s}) for i, s in enumerate(STRUCTURES)]


@pytest.mark.parametrize("length", slow_but([2], [1, 2, 4, 8, None]))
def test_structured_output_stop_strings_and_text_are_same_with_drafts(length: int | None) -> None:
    params, (plain, before) = text_requests(), plain_texts()
    expected, answers, vocab = all_facts(plain), answers_of(plain), text_model().config.vocab_size
    assert {c.finish_reason for r in plain for c in r.outputs} == {"stop", "length"}
    for proposer in (Oracle(answers), Moody(answers, 1, vocab), Ngram(1), Random(2, vocab)):
        with open_text(draft=proposer, num_draft_tokens=length) as llm:
            results = llm.generate([TEXT] * len(params), params)
            assert all_facts(results) == expected
            if type(proposer) is not Oracle:
                continue
            accepted = sum(sum(r.metrics.draft.num_accepted) for r in results)
            assert accepted > 50 or length is None
            for asked, deltas in zip(params, before, strict=True):
                after = list(llm.stream(TEXT, asked))
                for index in range(asked.n):
                    assert joined(after, index) == joined(deltas, index)


def joined(deltas: list[Delta], index: int) -> tuple[str, list[int], list[float]]:
    mine = [d for d in deltas if d.index == index]
    return (
        "".join(d.text for d in mine),
        [i for d in mine for i in d.token_ids],
        [p for d in mine for p in d.logprobs],
    )


# ---- experts


@pytest.mark.parametrize("length", [2, 5])
def test_routing_records_and_replays_are_same_with_drafts(length: int) -> None:
    prompt = random_ids(13, seed=4)
    params = SamplingParams(max_tokens=17, seed=3, record_routing=True, ignore_eos=True)
    with open_toy("qwen3_moe") as llm:
        (free,) = llm.generate(prompt, params)
        record = free.outputs[0].routing
        assert record is not None and record.shape == (13 + 17 - 1, 3, 2)
        forced = (record.clone() + 1) % 6
        forced[20:23] = -1  # where the router is free again
        asked = [params.replace(replay_routing=r) for r in (forced, forced[:16], record)]
        plain = [free, *llm.generate([prompt] * 3, asked)]
    answers = {}
    for result in plain[1:2]:
        answers = answers_of([result])
    for proposer in (Moody(answers_of(plain[:1]), 2), Moody(answers, 2), Oracle(answers)):
        with open_toy("qwen3_moe", draft=proposer, num_draft_tokens=length) as llm:
            results = llm.generate([prompt] * 4, [params, *asked])
            assert all_facts(results) == all_facts(plain)
            assert llm.stats()["draft"]["accepted"] > 0


# ---- processors


class Counting:
    """A processor that is not pure: what it adds depends on how often it was called."""

    def __init__(self, most: int | None = None) -> None:
        self.seen: list[list[int]] = []
        self.most = most

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(ids.tolist())
        if self.most is not None and len(self.seen) > self.most:
            raise LookupError(f"call {len(self.seen)}")
        logits[(7 * len(self.seen)) % 128] += 6.0
        return logits


@pytest.mark.parametrize("length", [1, 3, 8, None])
@pytest.mark.parametrize("stop", [False, True])
def test_processors_are_called_exactly_as_in_plain_decoding(length: int | None, stop: bool) -> None:
    prompt, params = random_ids(9, 2), LONG.replace(max_tokens=20, temperature=0.8)
    with open_toy("llama") as llm:
        if stop:
            ids = llm.generate(prompt, params.replace(logits_processors=[Counting()]))
            params = params.replace(stop_token_ids=[ids[0].outputs[0].token_ids[9:11]])
        before = Counting()
        plain = llm.generate(prompt, params.replace(logits_processors=[before]))
    more = answers_of(plain)
    for ids in more.values():
        ids.extend(random_ids(9, seed=8))  # drafts that continue past the end
    for proposer in (Oracle(more), Moody(more, 4), Random(1)):
        after = Counting()
        with open_toy("llama", draft=proposer, num_draft_tokens=length) as llm:
            results = llm.generate(prompt, params.replace(logits_processors=[after]))
            if isinstance(proposer, Oracle) and length == 8:
                assert llm.stats()["draft"]["accepted"] > 4
        for ids in more.values():
            assert ids[:-9] == plain[0].outputs[0].token_ids[: len(ids) - 9]
        assert [c.logprobs for c in results[0].outputs] == [c.logprobs for c in plain[0].outputs]
        assert results[0].outputs[0].finish_reason == plain[0].outputs[0].finish_reason
        assert after.seen == before.seen


@pytest.mark.parametrize("most", [3, 5, 6])
def test_processor_error_after_draft_still_delivers_earlier_tokens(most: int) -> None:
    prompt, params = random_ids(9, 2), LONG.replace(max_tokens=20)
    found = []
    with open_toy("llama") as llm:
        answers = answers_of(llm.generate(prompt, params.replace(logits_processors=[Counting()])))
    for draft in (None, Oracle(answers)):
        with open_toy("llama", draft=draft, num_draft_tokens=draft and 4) as llm:
            processor, ids = Counting(most), []  # type: ignore[var-annotated]
            stream = llm.stream(prompt, params.replace(logits_processors=[processor]))
            with pytest.raises(RequestFailed, match=f"LookupError: call {most + 1}") as caught:
                ids += (i for delta in stream for i in delta.token_ids)
            found.append((ids, processor.seen, str(caught.value).split(":", 1)[1]))
            assert llm.stats()["blocks_used"] == 0
    assert found[0] == found[1] and len(found[0][0]) == most


def test_request_without_drawable_token_still_delivers_earlier_tokens() -> None:
    prompt = random_ids(9, 2)
    # After three times 5, the next one is banned and nothing is left.
    params = LONG.replace(allowed_token_ids=[5], bad_words=[[5, 5, 5, 5]], max_tokens=20)
    answers = {(tuple(prompt), 1, 0): [5] * 20}
    for draft in (None, Oracle(answers)):
        with open_toy("llama", draft=draft, num_draft_tokens=draft and 8) as llm:
            ids: list[int] = []
            stream = llm.stream(prompt, params)
            with pytest.raises(RequestFailed, match="no token can be drawn"):
                ids += (i for delta in stream for i in delta.token_ids)
            assert ids == [5, 5, 5]
            (saved,) = llm.generate(prompt, params.replace(stop_token_ids=[[5, 5, 5]]))
            assert saved.outputs[0].token_ids == [5, 5, 5]
            assert saved.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("name", BY_NAME)
def test_help_and_docs_name_each_drafter(name: str) -> None:
    help_text = next(option.help for option in MODEL if option.name == "draft")
    assert name in help_text
    assert f'"{name}"' in LLM.__doc__
    for page, quoted in (("commands.md", f"`{name}`"), ("drafts.md", f'| `"{name}"` |')):
        assert quoted in (Path(__file__).parents[2] / "docs" / page).read_text()
