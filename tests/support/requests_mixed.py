"""A batch of mixed requests, and what of a result must be equal everywhere."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

from support.toys import VOCAB, random_ids
from verbatim import LLM, Result, SamplingParams
from verbatim.core import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def lift_even_ids(ids: Any, logits: Any) -> Any:
    """A logits processor that looks at both of its arguments."""
    logits = logits.clone()
    logits[::2] += 0.5 + 0.01 * float(ids[-1])
    return logits


def mixed_requests(count: int = 17) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 60 tokens, and params that use most of what there is; 17 use all of it.

    Beams ask for no drafts, which they can't have.
    """
    kinds: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=20, top_p=0.9),
        dict(temperature=1.3, min_p=0.02, logprobs=3),
        dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        dict(typical_p=0.8, logit_bias={5: 2.0, 9: -3.0}),
        dict(allowed_token_ids=list(range(3, 40)), min_tokens=4),
        dict(n=2, bad_words=[[7], [8, 9]], prompt_logprobs=2),
        dict(stop_token_ids=[11, [12, 13]], temperature=1.5),
        dict(num_beams=3, n=2, logprobs=1, repetition_penalty=1.2, draft=False),
        dict(logits_processors=[lift_even_ids], temperature=0.9, n=3),
        dict(hidden_states=True, priority=-1, prompt_logprobs=0),
    ]
    lengths = [1, 2, 3, 5, 8, 13, 16, 17, 21, 29, 31, 33, 34, 40, 47, 55, 60]
    prompts = [random_ids(lengths[i % len(lengths)], i, high=VOCAB) for i in range(count)]
    params = [
        SamplingParams(seed=1000 + i, max_tokens=3 + i % 8, **kinds[i % len(kinds)])
        for i in range(count)
    ]
    return prompts, params


def facts(result: Result) -> Any:
    """Everything of a result that no schedule may change."""
    return (
        result.prompt_token_ids,
        result.prompt_logprobs,
        result.prompt_top_logprobs,
        _bits(result.prompt_hidden_states),
        [
            (
                c.index,
                c.text,
                c.token_ids,
                c.logprobs,
                c.sampled_logprobs,
                c.top_logprobs,
                c.finish_reason,
                c.stop_reason,
                c.seed,
                c.score,
                _bits(c.hidden_states),
                _bits(c.routing),
                _bits(c.indices),
            )
            for c in result.outputs
        ],
    )


def _bits(tensor: Any) -> Any:
    """Something that is equal where shape, dtype and every bit are."""
    if tensor is None:
        return None
    return str(tensor.dtype), tuple(tensor.shape), tensor.float().numpy().tobytes()


def all_facts(results: list[Result]) -> list[Any]:
    return [facts(result) for result in results]


def generated(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    """Return the facts of what an engine generates, and close it."""
    with llm:
        return all_facts(llm.generate(prompts, params))


@cache
def resident_facts(folder: Path, count: int = 17, **options: Any) -> list[Any]:
    """Return the facts of mixed requests to a model in memory."""
    return generated(LLM(folder, max_length=200, **options), *mixed_requests(count))


def mixed_facts(llm: LLM, count: int = 17) -> list[Any]:
    """Return the facts of the same requests."""
    return all_facts(llm.generate(*mixed_requests(count)))


def submitted(llm: LLM, prompts: Any, params: Any) -> list[Request]:
    """Requests that run from now on, whenever a test makes a step."""
    admit, requests = llm.engine.admission.admit, []
    for prompt, asked in zip(prompts, params, strict=True):
        requests.append(admit(prompt, asked))
        llm.engine.submit(requests[-1])
    return requests


def keep_prefixes(llm: LLM, keep: bool = True) -> None:
    """Let cached prefixes outlive the requests, as of a model that nobody else can change."""
    llm.engine._engine.live = not keep


def check_nothing_is_left(llm: LLM) -> None:
    """Assert that no request, block or slot of a state is in use, and that no proposal failed."""
    stats, scheduler = llm.stats(), llm.engine.scheduler
    assert stats["running"] == stats["waiting"] == stats["blocks_used"] == 0
    assert not llm.engine.has_work
    scheduler.pool.check()
    if (slots := scheduler.states.pool) is not None:
        slots.check()
        assert not slots.num_used
    if stats["draft"] is not None:
        assert stats["draft"]["errors"] == 0, stats["draft"]["last_error"]


def press_ctrl_c(patch: Any, rng: Any, chance: float, owner: Any, *names: str) -> None:
    """Let Ctrl-C hit by chance before and after each call of these functions of `owner`.

    Args:
        patch: pytest's MonkeyPatch, which puts them back.
    """
    for name in names:
        plain = getattr(owner, name)

        def interrupting(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            if rng.random() < chance:
                signal.raise_signal(signal.SIGINT)
            answer = plain(*args, **kwargs)
            if rng.random() < chance:
                signal.raise_signal(signal.SIGINT)
            return answer

        patch.setattr(owner, name, interrupting)


def finish_despite_ctrl_c(llm: Any, prompts: Any, params: Any) -> tuple[list[Any], int]:
    """Step until all have ended, whatever presses Ctrl-C meanwhile: their results, and how often it hit."""
    engine, raised = llm.engine, 0
    requests = submitted(llm, prompts, params)
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            raised += 1
        engine.scheduler.pool.check()
    return [request.result for request in requests], raised
