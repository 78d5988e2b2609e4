"""A batch of mixed requests, and the parts of a result that must be equal in every setup."""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Any

from support.pools import check_pool
from support.toys import VOCAB, random_ids
from verbatim import LLM, Result, SamplingParams
from verbatim.core import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def lift_even_ids(ids: Any, logits: Any) -> Any:
    """Raise the logits of even ids, depending on the last id: a processor that uses both arguments."""
    logits = logits.clone()
    logits[::2] += 0.5 + 0.01 * float(ids[-1])
    return logits


def mixed_requests(count: int = 17) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of 1 to 60 tokens, and params that use most features; 17 cover all of these.

    Beam search is requested without drafts, which it does not support.
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
    """Return everything in a result that must not depend on the schedule."""
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
    """Return a value that is equal for tensors with equal shape, dtype and bits."""
    if tensor is None:
        return None
    return str(tensor.dtype), tuple(tensor.shape), tensor.float().numpy().tobytes()


def all_facts(results: list[Result]) -> list[Any]:
    return [facts(result) for result in results]


def generated(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    """Generate, close the engine, and return the facts of the results."""
    with llm:
        return all_facts(llm.generate(prompts, params))


@cache
def resident_facts(folder: Path, count: int = 17, **options: Any) -> list[Any]:
    """Return the facts of the mixed requests to a resident model."""
    return generated(LLM(folder, max_length=200, **options), *mixed_requests(count))


def mixed_facts(llm: LLM, count: int = 17) -> list[Any]:
    """Return the facts of the mixed requests to `llm`."""
    return all_facts(llm.generate(*mixed_requests(count)))


def submitted(llm: LLM, prompts: Any, params: Any) -> list[Request]:
    """Submit requests, which then run in the steps that a test makes, and return them."""
    admit, requests = llm.engine.admission.admit, []
    for prompt, asked in zip(prompts, params, strict=True):
        requests.append(admit(prompt, asked))
        llm.engine.submit(requests[-1])
    return requests


def keep_prefixes(llm: LLM, keep: bool = True) -> None:
    """Let cached prefixes outlive their requests, as for a model that no one else can change."""
    llm.engine._engine.live = not keep


def check_nothing_is_left(llm: LLM) -> None:
    """Assert that no request, block or state slot is in use, and that no proposal failed."""
    stats, scheduler = llm.stats(), llm.engine.scheduler
    assert stats["running"] == stats["waiting"] == stats["blocks_used"] == 0
    assert not llm.engine.has_work
    check_pool(scheduler.pool)
    if (slots := scheduler.states.pool) is not None:
        check_pool(slots)
        assert not slots.num_used
    if stats["draft"] is not None:
        assert stats["draft"]["errors"] == 0, stats["draft"]["last_error"]


def press_ctrl_c(patch: Any, rng: Any, chance: float, owner: Any, *names: str) -> None:
    """Raise SIGINT with probability `chance` before and after each call of these functions of `owner`.

    Args:
        patch: pytest's MonkeyPatch, which restores the functions.
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
    """Step until all requests have ended, despite KeyboardInterrupts; return results and their number."""
    engine, raised = llm.engine, 0
    requests = submitted(llm, prompts, params)
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            raised += 1
        check_pool(engine.scheduler.pool)
    return [request.result for request in requests], raised
