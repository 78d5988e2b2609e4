"""`verify`: the matrix of schedules, run on one model and this machine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from verbatim.checks import optional_integer
from verbatim.errors import InvalidRequest
from verbatim.model.patching import threads
from verbatim.placement.distributed.choice import Cluster
from verbatim.verify.report import DIFFERS, EQUAL, FAILED, NOT_RUN, REFERENCE, Report, Row
from verbatim.verify.requests import make_requests
from verbatim.verify.schedules import NAMES, SCHEDULES, NotRun, Schedule, Subject, Trial

DEFAULT_TOKENS = 16
OPTIONS = (
    "tokenizer config revision trust_remote_code dtype device max_length kv_dtype quantization fused "
    "adapters"
).split()


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
    """Run the same requests alone and in every schedule, and compare them bit for bit.

    `seed` determines the requests, their prompts (drawn from the vocabulary) and their seeds. The model is
    opened several times, one after the other.

    Args:
        model: as in `LLM`. A live module can't be offloaded or run in stages; those rows are "not run".
        tokens: length of the longest completions.
        seed: seed of prompts and draws.
        only: names of schedules in `verbatim.verify.NAMES`. None: all. The reference is always run.
        on_row: callback for each finished row.
        cluster: placement of the row "two-stages". None: two stages on this machine.
        num_threads: size of torch's thread pool, for all schedules except "threads".
        options: options of `LLM` for all schedules: tokenizer, config, revision, trust_remote_code, dtype,
            device, max_length, kv_dtype, quantization, fused, adapters. Requests take
            the adapters, and none, in turn.

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
    chosen = [schedule for schedule in SCHEDULES if only is None or schedule.name in only]
    subject = Subject(model, options, cluster or Cluster(stages=2))
    rows = []
    with threads(num_threads):
        try:
            llm = subject.plain()
            subject.requests = make_requests(llm, tokens, seed)
            name, key = llm.name, subject.info["numerics_key"]
            rows.append(_reference(subject))
            on_row(rows[-1])
            for schedule in chosen:
                rows.append(_row(subject, schedule))
                on_row(rows[-1])
        finally:
            subject.close()
    return Report(name, key, seed, len(subject.requests), tuple(rows))


def _reference(subject: Subject) -> Row:
    trial = Trial(subject, "alone", "one after the other")
    with trial.opened() as llm:
        subject.expected = trial.alone(llm, trial.numbers)
    subject.most_alone = trial.row.sequences_at_once
    outputs = [output for result in subject.expected for output in result.outputs]
    trial.row.num_tokens = sum(len(output.token_ids) for output in outputs)
    return trial.ended(REFERENCE)


def _row(subject: Subject, schedule: Schedule) -> Row:
    """Run one schedule and compare."""
    trial = Trial(subject, schedule.name, schedule.what)
    try:
        schedule.run(trial)
    except NotRun as why:
        return trial.ended(NOT_RUN, str(why))
    except Exception as error:  # the other rows are run after any error
        subject.close()
        return trial.ended(FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return trial.ended(EQUAL if trial.row.ids_equal and trial.row.logprobs_equal else DIFFERS)
