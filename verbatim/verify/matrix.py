"""`verify`: the matrix of schedules, run on one model and this machine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from verbatim.checks import optional_integer
from verbatim.errors import InvalidRequest
from verbatim.model.patching import threads
from verbatim.placement.distributed.choice import Cluster
from verbatim.verify.report import Report, Row
from verbatim.verify.requests import make_requests
from verbatim.verify.schedules import NAMES, REFERENCE, SCHEDULES, Trial

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
    trial = Trial(model, options, cluster or Cluster(stages=2))
    rows = []
    with threads(num_threads):
        try:
            llm = trial.plain()
            trial.requests = make_requests(llm, tokens, seed)
            name, key = llm.name, trial.info["numerics_key"]
            for schedule in (REFERENCE, *chosen):
                rows.append(trial.run(schedule))
                on_row(rows[-1])
        finally:
            trial.close()
    return Report(name, key, seed, len(trial.requests), tuple(rows))
