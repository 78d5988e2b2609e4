"""`verify`: the same requests in different schedules, on one model and this machine.

The requests are greedy, sampled, filtered and penalized, with short and long prompts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verbatim.api.llm import LLM
from verbatim.batch import Batch
from verbatim.common.checks import integer, optional_integer
from verbatim.core import Delta, Result, Sequence
from verbatim.errors import InvalidRequest, VerbatimError
from verbatim.model.products import threads
from verbatim.params import SamplingParams
from verbatim.placement.distributed.choice import Cluster
from verbatim.placement.offload.choice import Offload
from verbatim.verify.report import DIFFERS, EQUAL, FAILED, NOT_RUN, Report, Row

MAX_PROMPT = 72
_MIN_LIMIT = 4  # minimum length limit of a model to verify
# Prompt lengths in tokens; prompts of 17 tokens and more fill a KV block.
_LENGTHS = (1, 5, 17, 33, 2, 48, 8, 40, 13, 64, 21, 72)


@dataclass(frozen=True, slots=True)
class TestRequest:
    """A request of the self-test; `kind` names the feature that it covers."""

    kind: str
    prompt: list[int]
    params: SamplingParams


def make_requests(llm: LLM, num_tokens: int, seed: int) -> list[TestRequest]:
    """Return twelve requests, with prompts drawn from the vocabulary, within the model's length limit.

    They select the adapters of `llm`, and no adapter, in turn.

    Args:
        num_tokens: length of the longest completions; the others are slightly shorter.
        seed: seed of the prompts and of the requests' seeds.

    Raises:
        InvalidRequest: `num_tokens` or `seed` out of range, or a length limit below 4.
    """
    limit = llm.max_length
    num_tokens = integer("tokens", num_tokens)
    seed = integer("seed", seed, 0, 2**53 - 1)
    if limit < _MIN_LIMIT:
        raise InvalidRequest(
            f"the model's length limit is {limit}; to verify it takes {_MIN_LIMIT}"
        )
    num_tokens = min(num_tokens, max(1, limit // 2))
    longest = min(MAX_PROMPT, limit - num_tokens)
    rng = random.Random(f"verify-{seed}")
    ids, adapters = _ordinary_ids(llm), [*llm.adapters, None]
    requests = []
    for number, (kind, fields) in enumerate(_kinds(ids, rng).items()):
        length = min(_LENGTHS[number], longest)
        if kind.startswith("repeating"):  # so that drafts can be accepted
            phrase = rng.choices(ids, k=5)
            prompt = (phrase * length)[:length]
        else:
            prompt = rng.choices(ids, k=length)
        params = SamplingParams(
            seed=rng.randrange(2**53),
            max_tokens=max(1, num_tokens - number % 4),
            ignore_eos=number % 3 > 0,
            adapter=adapters[number % len(adapters)],
            **fields,
        )
        requests.append(TestRequest(kind, prompt, params))
    return requests


def _kinds(ids: list[int], rng: random.Random) -> dict[str, dict[str, Any]]:
    biased = rng.sample(ids, k=min(4, len(ids)))
    count, num_logprobs = max(2, len(ids) // 4), min(3, len(ids))
    return {
        "greedy": dict(temperature=0.0, logprobs=num_logprobs),
        "sampled": dict(),
        "top-k, top-p": dict(temperature=0.8, top_k=20, top_p=0.9),
        "repeating, greedy": dict(temperature=0.0),
        "min-p, top log-probs": dict(temperature=1.3, min_p=0.02, logprobs=num_logprobs),
        "penalties": dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        "typical, biases": dict(typical_p=0.8, logit_bias={biased[0]: 2.0, biased[-1]: -3.0}),
        "two samples, prompt log-probs": dict(n=2, prompt_logprobs=num_logprobs),
        "allowed ids": dict(allowed_token_ids=sorted(rng.sample(ids, k=min(count, len(ids))))),
        "repeating, sampled": dict(temperature=0.5, top_p=0.95),
        "beams": dict(num_beams=3, n=2),
        "top-p": dict(top_p=0.9, temperature=0.7),
    }


def _ordinary_ids(llm: LLM) -> list[int]:
    """Return the ids of the vocabulary except special tokens."""
    vocab_size, tokenizer = llm.engine.admission.vocab_size, llm.tokenizer
    special = set(llm.engine.admission.eos_ids)
    if tokenizer is not None:
        vocab_size = min(vocab_size, tokenizer.vocab_size)
        special |= tokenizer.special_ids
    return [i for i in range(vocab_size) if i not in special] or list(range(vocab_size))


DEFAULT_TOKENS = 16
OPTIONS = (
    "tokenizer config revision trust_remote_code dtype device deterministic max_length kv_dtype quantization "
    "fused adapters"
).split()

_CHUNK_ROWS, _CHUNK_BLOCK = 7, 5  # neither divides the other, nor the lengths of prompts
_EVICTION_BLOCK = 8
_DRAFT_TOKENS = 4


class NotRun(Exception):
    """Raised, with the reason, if a schedule is impossible here or had no effect."""


class Trial:
    """The model under test, and the schedule that is running on it.

    Attributes:
        options: options of `LLM` for all schedules.
        cluster: placement of the row "two-stages".
        requests: the requests of every schedule.
        expected: the results of the requests when each runs alone.
        max_alone: maximum number of sequences per forward when each request runs alone.
        info: `LLM.info` of the resident engine.
        row: the result of the current schedule so far.
        notes: evidence that the current schedule took effect.
    """

    def __init__(self, model: Any, options: dict[str, Any], cluster: Cluster) -> None:
        self.options, self.cluster = options, cluster
        self.requests: list[TestRequest] = []
        self.expected: list[Result] = []
        self.max_alone = 0
        self.info: dict[str, Any] = {}
        self._model = model
        self._plain: LLM | None = None

    def run(self, schedule: Schedule) -> Row:
        """Run a schedule, and return its row. The first schedule is the reference; its errors are raised."""
        self.row, self.notes = Row(schedule.name, schedule.what), list[str]()
        self._run = self._num_rows = 0
        begin, is_reference = time.perf_counter(), not self.expected
        try:
            schedule.run(self)
        except Exception as error:  # continue with the other rows after any error
            if is_reference:
                raise
            ran = self.row
            self.row = Row(ran.name, ran.what)  # nothing counts as compared
            self.row.forwards, self.row.rows_per_forward = ran.forwards, ran.rows_per_forward
            self.row.sequences_at_once = ran.sequences_at_once
            message = " ".join(str(error).split())
            if isinstance(error, NotRun):
                self.row.status, self.notes = NOT_RUN, [message]
            else:
                self.close()
                self.row.status, self.notes = FAILED, [f"{type(error).__name__}: {message}"]
        else:
            if not is_reference:
                equal = self.row.ids_equal and self.row.logprobs_equal
                self.row.status = EQUAL if equal else DIFFERS
        self.row.note, self.row.seconds = "; ".join(self.notes), time.perf_counter() - begin
        return self.row

    def plain(self) -> LLM:
        """Return the resident engine, opened on first use."""
        if self._plain is None:
            self._plain = LLM(self._model, **self.options)
            self.info = self._plain.info()
        return self._plain

    def close(self) -> None:
        """Close the resident engine, to free its memory."""
        if self._plain is not None:
            self._plain.close()
            self._plain = None

    @contextmanager
    def opened(self, **changes: Any) -> Iterator[LLM]:
        """Open an engine with `changes`, or raise NotRun; without changes, use the resident engine."""
        llm = self.plain()
        if changes:
            self.close()
            try:
                llm = LLM(self._model, **(self.options | changes))
            except VerbatimError as error:
                raise NotRun(str(error)) from None
        runner: Any = llm.engine.runner
        forward = runner.forward

        def counted(batch: Batch) -> Any:
            row, self._num_rows = self.row, self._num_rows + batch.num_tokens
            row.forwards += 1
            row.rows_per_forward = self._num_rows / row.forwards
            row.sequences_at_once = max(row.sequences_at_once, batch.num_sequences)
            return forward(batch)

        runner.forward = counted
        try:
            yield llm
        finally:
            del runner.forward
            if changes:
                llm.close()

    def _params(self, number: int) -> SamplingParams:
        """Return the parameters of one request, with a cache salt that separates the runs."""
        params = self.requests[number].params
        salt = f"verify/{self.row.name}/{self._run}"
        return params.replace(cache_salt=salt, draft=params.num_beams == 1)  # beams draw nothing

    def alone(self, llm: LLM, numbers: SequenceOf[int]) -> list[Result]:
        """Run requests one after the other."""
        return [self.together(llm, [i])[0] for i in numbers]

    def together(self, llm: LLM, numbers: SequenceOf[int]) -> list[Result]:
        """Run requests as one batch."""
        self._run += 1
        prompts = [self.requests[i].prompt for i in numbers]
        return llm.generate(prompts, [self._params(i) for i in numbers])

    async def streamed(self, llm: LLM, number: int) -> Result:
        """Run one request and join its streamed deltas."""
        stream = llm.astream(self.requests[number].prompt, self._params(number))
        return _joined([delta async for delta in stream])

    @property
    def numbers(self) -> list[int]:
        """The indices of all requests."""
        return list(range(len(self.requests)))

    def add(
        self,
        found: list[Result],
        numbers: SequenceOf[int] | None = None,
        *,
        label: str = "",
        expected: list[Result] | None = None,
    ) -> None:
        """Compare results with `expected`, by default those of each request alone."""
        for at, number in enumerate(self.numbers if numbers is None else numbers):
            reference = self.expected[number] if expected is None else expected[at]
            self.row.compare(number, self.requests[number].kind, reference, found[at], label)

    def check_batched(self) -> None:
        """Raise NotRun if no forward had more sequences than when each request runs alone."""
        num_at_once = self.row.sequences_at_once
        if num_at_once <= self.max_alone:
            raise NotRun(f"no forward had more than {num_at_once} sequences, as in the reference")


def _joined(deltas: list[Delta]) -> Result:
    result = deltas[-1].result
    assert result is not None
    outputs = []
    for output in result.outputs:
        parts = [delta for delta in deltas if delta.index == output.index]
        joined: dict[str, Any] = {
            name: [entry for part in parts for entry in getattr(part, name) or ()]
            for name in ("token_ids", "logprobs", "sampled_logprobs", "top_logprobs")
            if getattr(output, name) is not None
        }
        text = "".join(part.text for part in parts)
        outputs.append(dataclasses.replace(output, text=text, **joined))
    return dataclasses.replace(result, outputs=outputs)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row of the matrix. `run` adds results and notes to the trial."""

    name: str
    what: str
    run: Callable[[Trial], None]


def _alone(trial: Trial) -> None:
    with trial.opened() as llm:
        trial.expected = trial.alone(llm, trial.numbers)
    trial.max_alone = trial.row.sequences_at_once
    outputs = [output for result in trial.expected for output in result.outputs]
    trial.row.num_tokens = sum(len(output.token_ids) for output in outputs)


def _again(trial: Trial) -> None:
    subset = trial.numbers[1::3]  # running requests alone is slow
    with trial.opened() as llm:
        trial.add(trial.alone(llm, subset), subset)
    trial.notes.append(f"{len(subset)} of the requests")


def _batched(trial: Trial) -> None:
    with trial.opened() as llm:
        trial.add(trial.together(llm, trial.numbers))
    trial.check_batched()


def _reordered(trial: Trial) -> None:
    order = trial.numbers
    random.Random(len(order)).shuffle(order)
    with trial.opened() as llm:
        trial.add(trial.together(llm, order), order)
    trial.check_batched()


def _prefix_hit(trial: Trial) -> None:
    # Each prompt twice: the second waits for the blocks of the first, even with a live module.
    twice = sorted(2 * trial.numbers)
    with trial.opened() as llm:
        results = trial.together(llm, twice)
    cached = sum(result.num_cached_tokens for result in results)
    if not cached:
        raise NotRun("no prompt is long enough to fill a KV block")
    trial.add(results, twice)
    trial.notes.append(f"{cached} prompt tokens cached")


def _streamed(trial: Trial) -> None:
    with trial.opened() as llm:

        async def all_at_once() -> None:
            streams = (trial.streamed(llm, i) for i in trial.numbers)
            trial.add(list(await asyncio.gather(*streams)))

        asyncio.run(all_at_once())
    trial.check_batched()


def _threads(trial: Trial) -> None:
    import torch

    current = torch.get_num_threads()
    counts = [count for count in (1, 3, os.cpu_count() or 1) if count != current]
    counts = list(dict.fromkeys(counts))[:2]
    with trial.opened() as llm:
        for count in counts:
            with threads(count):
                results = trial.together(llm, trial.numbers)
            trial.add(results, label=f"{count} thread{'' if count == 1 else 's'}")
    trial.notes.append(f"{' and '.join(map(str, counts))}, not {current}")


def _chunked(trial: Trial) -> None:
    with trial.opened(max_batch_tokens=_CHUNK_ROWS, block_size=_CHUNK_BLOCK) as llm:
        trial.add(trial.together(llm, trial.numbers))
    longest = max(len(request.prompt) for request in trial.requests)
    if longest <= _CHUNK_ROWS:
        raise NotRun(f"no prompt is longer than {_CHUNK_ROWS} tokens")
    trial.notes.append(f"{_CHUNK_ROWS} rows per forward, prompts up to {longest}")


def _evicted(trial: Trial) -> None:
    # Blocks for 1.5 times the longest request, plus the scratch block.
    longest = max(len(r.prompt) + (r.params.max_tokens or 0) for r in trial.requests)
    trial.plain()
    blocks = -(-longest * 3 // (2 * _EVICTION_BLOCK)) + 3
    nbytes = trial.info["kv_bytes_per_token"] * _EVICTION_BLOCK * blocks
    with trial.opened(kv_memory=nbytes, block_size=_EVICTION_BLOCK) as llm:
        trial.add(trial.together(llm, trial.numbers))
        evictions = llm.stats()["preemptions"]
    if not evictions:
        raise NotRun("no request lost its keys and values")
    trial.notes.append(f"evictions: {evictions}")


def _drafted(trial: Trial) -> None:
    for label, proposer in (("ngram", "ngram"), ("oracle", _Oracle(trial.expected))):
        with trial.opened(draft=proposer, num_draft_tokens=_DRAFT_TOKENS) as llm:
            trial.add(trial.together(llm, trial.numbers), label=label)
            figures = llm.stats()["draft"]
        trial.notes.append(f"{label}: {figures['drafted']} drafted, {figures['accepted']} accepted")
    if not 0 < figures["accepted"] < figures["drafted"]:
        raise NotRun("; ".join(trial.notes))


class _Oracle:
    """Proposes the reference's tokens with some wrong ones, so that drafts are accepted and rejected."""

    def __init__(self, expected: list[Result]) -> None:
        self._completions = {
            (tuple(result.prompt_token_ids), output.index): output.token_ids
            for result in expected
            for output in result.outputs
        }

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `verbatim.draft.Proposer`."""
        drafts = []
        for sequence, length in zip(sequences, lengths, strict=True):
            count, prompt = len(sequence.output_ids), tuple(sequence.request.prompt_ids)
            ids = self._completions.get((prompt, sequence.index), [])[count : count + length]
            wrong = sequence.request.prompt_ids[0]
            drafts.append([wrong if (count + j) % 3 == 1 else i for j, i in enumerate(ids)])
        return drafts


def _unfused(trial: Trial) -> None:
    trial.plain()
    layers = trial.info.get("fused", {}).get("layers", 0)
    if not layers and trial.info.get("recorded_steps") is None:
        raise NotRun("no layer is fused here, and no step is recorded")
    with trial.opened(fused=False) as llm:
        trial.add(trial.together(llm, trial.numbers))
    trial.notes.append("module by module" if not layers else f"{layers} layers, module by module")


def _int8_kv(trial: Trial) -> None:
    if trial.options.get("kv_dtype") in ("int8", "int4"):
        raise NotRun("all rows have a quantized KV cache")
    subset = trial.numbers[::2]
    with trial.opened(kv_dtype="int8") as llm:
        alone = trial.alone(llm, subset)
        trial.add(trial.together(llm, subset), subset, expected=alone)
    trial.notes.append("in a batch, against themselves alone")


def _offloaded(trial: Trial) -> None:
    with trial.opened(placement=Offload(weights=(0, 50, 50), policy=None)) as llm:
        trial.add(trial.together(llm, trial.numbers))
    trial.notes.append("half of the weights on the disk")


def _two_stages(trial: Trial) -> None:
    options = trial.options
    if options.get("fused") is False:
        raise NotRun("stages decide themselves about fused layers")
    with trial.opened(placement=trial.cluster) as llm:
        trial.add(trial.together(llm, trial.numbers))
        stages = llm.info()["stages"]
    layers = (f"{first} to {end - 1}" for first, end in (stage["layers"] for stage in stages))
    trial.notes.append(f"layers {' and '.join(layers)}")


REFERENCE = Schedule("alone", "one after the other", _alone)
# Schedules that share an engine come first.
SCHEDULES = (
    Schedule("again", "alone, once more", _again),
    Schedule("batched", "all at once", _batched),
    Schedule("reordered", "all at once, in another order", _reordered),
    Schedule("prefix-hit", "with prompts that are cached", _prefix_hit),
    Schedule("streamed", "all at once, reassembled from streams", _streamed),
    Schedule("threads", "with other thread counts", _threads),
    Schedule("chunked", "prompts in chunks, another block size", _chunked),
    Schedule("evicted", "preempted and recomputed", _evicted),
    Schedule("drafted", "with right and wrong drafts", _drafted),
    Schedule("unfused", "without fused layers", _unfused),
    Schedule("int8-kv", "with an int8 KV cache", _int8_kv),
    Schedule("offloaded", "with weights on disk", _offloaded),
    Schedule("two-stages", "in two processes", _two_stages),
)
NAMES = tuple(schedule.name for schedule in SCHEDULES)


def verify(
    model: Any = None,
    *,
    tokens: int = DEFAULT_TOKENS,
    seed: int = 0,
    only: SequenceOf[str] | None = None,
    on_row: Callable[[Row], object] = lambda row: None,
    cluster: Cluster | None = None,
    num_threads: int | None = None,
    **options: Any,
) -> Report:
    """Run the same requests alone and in every schedule, and compare the results bit for bit.

    `seed` determines the requests: their prompts (drawn from the vocabulary) and their seeds. The model is
    opened several times in succession.

    Args:
        model: as in `LLM`. A live module can't be offloaded or run in stages; those rows are "not run".
        tokens: length of the longest completions.
        seed: seed of prompts and draws.
        only: names of schedules in `verbatim.verify.NAMES`. None: all. The reference is always run.
        on_row: callback for each finished row.
        cluster: placement of the row "two-stages". None: two stages on this machine.
        num_threads: size of torch's thread pool, for all schedules except "threads".
        options: options of `LLM` for all schedules: tokenizer, config, revision, trust_remote_code, dtype,
            device, deterministic (on a GPU, True is needed for bit-identical outputs), max_length, kv_dtype,
            quantization, fused, adapters. Requests select the adapters, and no adapter, in turn.

    Raises:
        InvalidRequest: an unknown option or schedule, or a number out of range.
        ModelError and other errors of `LLM`: the model can't be opened.
    """
    unknown = next((name for name in options if name not in OPTIONS), None)
    if unknown is not None:
        raise InvalidRequest(
            f"{unknown}={options[unknown]!r}: the schedules set it; allowed are {', '.join(OPTIONS)}"
        )
    unknown = next((name for name in only or () if name not in NAMES), None)
    if unknown is not None:
        raise InvalidRequest(f"only={unknown!r}: must be one of {', '.join(NAMES)}")
    num_threads = optional_integer("num_threads", num_threads)
    selected = [schedule for schedule in SCHEDULES if only is None or schedule.name in only]
    trial = Trial(model, options, cluster or Cluster(stages=2))
    rows = []
    with threads(num_threads):
        try:
            llm = trial.plain()
            trial.requests = make_requests(llm, tokens, seed)
            name, key = llm.name, trial.info["numerics_key"]
            for schedule in (REFERENCE, *selected):
                rows.append(trial.run(schedule))
                on_row(rows[-1])
        finally:
            trial.close()
    return Report(name, key, seed, len(trial.requests), tuple(rows))
