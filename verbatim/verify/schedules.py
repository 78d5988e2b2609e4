"""The schedules: different ways to compute the same tokens."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

from verbatim.core import Sequence
from verbatim.model.patching import threads
from verbatim.placement.offload.choice import Offload
from verbatim.verify.trial import NotRun, Subject, Trial

_CHUNK_ROWS, _CHUNK_BLOCK = 7, 5  # neither divides the other, nor the lengths of prompts
_EVICTION_BLOCK = 8
_DRAFT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row of the matrix. `run` adds its results and notes to the trial."""

    name: str
    what: str
    run: Callable[[Trial], None]


def _again(trial: Trial) -> None:
    subset = trial.numbers[1::3]  # alone is slow
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
    # Each prompt twice: the second waits for the first one's blocks, also with a live module.
    twice = sorted(2 * trial.numbers)
    with trial.opened() as llm:
        found = trial.together(llm, twice)
    cached = sum(result.num_cached_tokens for result in found)
    if not cached:
        raise NotRun("no prompt is long enough to fill a KV block")
    trial.add(found, twice)
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

    now = torch.get_num_threads()
    counts = [count for count in (1, 3, os.cpu_count() or 1) if count != now]
    counts = list(dict.fromkeys(counts))[:2]
    with trial.opened() as llm:
        for count in counts:
            with threads(count):
                found = trial.together(llm, trial.numbers)
            trial.add(found, label=f"{count} thread{'' if count == 1 else 's'}")
    trial.notes.append(f"{' and '.join(map(str, counts))}, not {now}")


def _chunked(trial: Trial) -> None:
    with trial.opened(max_batch_tokens=_CHUNK_ROWS, block_size=_CHUNK_BLOCK) as llm:
        trial.add(trial.together(llm, trial.numbers))
    longest = max(len(request.prompt) for request in trial.subject.requests)
    if longest <= _CHUNK_ROWS:
        raise NotRun(f"no prompt is longer than {_CHUNK_ROWS} tokens")
    trial.notes.append(f"{_CHUNK_ROWS} rows per forward, prompts up to {longest}")


def _evicted(trial: Trial) -> None:
    subject = trial.subject
    # Blocks for one and a half of the longest request, plus the scratch block.
    longest = max(request.num_tokens for request in subject.requests)
    subject.plain()
    blocks = -(-longest * 3 // (2 * _EVICTION_BLOCK)) + 3
    nbytes = subject.info["kv_bytes_per_token"] * _EVICTION_BLOCK * blocks
    with trial.opened(kv_memory=nbytes, block_size=_EVICTION_BLOCK) as llm:
        trial.add(trial.together(llm, trial.numbers))
        evictions = llm.stats()["preemptions"]
    if not evictions:
        raise NotRun("no request lost its keys and values")
    trial.notes.append(f"evictions: {evictions}")


def _drafted(trial: Trial) -> None:
    for label, proposer in (("ngram", "ngram"), ("oracle", _Oracle(trial.subject))):
        with trial.opened(draft=proposer, num_draft_tokens=_DRAFT_TOKENS) as llm:
            trial.add(trial.together(llm, trial.numbers), label=label)
            figures = llm.stats()["draft"]
        trial.notes.append(f"{label}: {figures['drafted']} drafted, {figures['accepted']} accepted")
    if not 0 < figures["accepted"] < figures["drafted"]:
        raise NotRun("; ".join(trial.notes))


class _Oracle:
    """A proposer of the reference's tokens with some wrong ones, so that drafts are accepted and rejected."""

    def __init__(self, subject: Subject) -> None:
        self._completions = {
            (tuple(result.prompt_token_ids), output.index): output.token_ids
            for result in subject.expected
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
    subject = trial.subject
    subject.plain()
    layers = subject.info.get("fused", {}).get("layers", 0)
    if not layers:
        raise NotRun("no layer is fused here")
    with trial.opened(fused=False) as llm:
        trial.add(trial.together(llm, trial.numbers))
    trial.notes.append(f"{layers} layers, module by module")


def _int8_kv(trial: Trial) -> None:
    if trial.subject.options.get("kv_dtype") in ("int8", "int4"):
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
    options = trial.subject.options
    if options.get("fused") is False:
        raise NotRun("stages decide themselves about fused layers")
    with trial.opened(placement=trial.subject.cluster) as llm:
        trial.add(trial.together(llm, trial.numbers))
        stages = llm.info()["stages"]
    layers = (f"{first} to {end - 1}" for first, end in (stage["layers"] for stage in stages))
    trial.notes.append(f"layers {' and '.join(layers)}")


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
