"""The requests that every schedule runs: greedy, sampled, filtered, penalized; short and long prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from verbatim.checks import integer
from verbatim.errors import InvalidRequest
from verbatim.llm import LLM
from verbatim.params import SamplingParams

MAX_PROMPT = 72
_MIN_LIMIT = 4  # smallest length limit of a model that can be verified
# Prompt tokens; those of 17 and more fill a KV block.
_LENGTHS = (1, 5, 17, 33, 2, 48, 8, 40, 13, 64, 21, 72)


@dataclass(frozen=True, slots=True)
class TestRequest:
    """A request of the self-test; `kind` names the feature that it covers."""

    kind: str
    prompt: list[int]
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """Maximum length of prompt and completion."""
        assert self.params.max_tokens is not None
        return len(self.prompt) + self.params.max_tokens


def make_requests(llm: LLM, num_tokens: int, seed: int) -> list[TestRequest]:
    """Return twelve requests, with prompts drawn from the vocabulary, within the model's length limit.

    They take the adapters of `llm` and the model without one in turn.

    Args:
        num_tokens: length of the longest completions; the others are a little shorter.
        seed: for the prompts and the requests' seeds.

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
    ids, adapters = _plain_ids(llm), [*llm.adapters, None]
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
    some = rng.sample(ids, k=min(4, len(ids)))
    few, top = max(2, len(ids) // 4), min(3, len(ids))
    return {
        "greedy": dict(temperature=0.0, logprobs=top),
        "sampled": dict(),
        "top-k, top-p": dict(temperature=0.8, top_k=20, top_p=0.9),
        "repeating, greedy": dict(temperature=0.0),
        "min-p, top log-probs": dict(temperature=1.3, min_p=0.02, logprobs=top),
        "penalties": dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        "typical, biases": dict(typical_p=0.8, logit_bias={some[0]: 2.0, some[-1]: -3.0}),
        "two samples, prompt log-probs": dict(n=2, prompt_logprobs=top),
        "allowed ids": dict(allowed_token_ids=sorted(rng.sample(ids, k=min(few, len(ids))))),
        "repeating, sampled": dict(temperature=0.5, top_p=0.95),
        "beams": dict(num_beams=3, n=2),
        "top-p": dict(top_p=0.9, temperature=0.7),
    }


def _plain_ids(llm: LLM) -> list[int]:
    """Return the ids of the vocabulary without special tokens."""
    vocab_size, tokenizer = llm.engine.admission.vocab_size, llm.tokenizer
    special = set(llm.engine.admission.eos_ids)
    if tokenizer is not None:
        vocab_size = min(vocab_size, tokenizer.vocab_size)
        special |= tokenizer.special_ids
    return [i for i in range(vocab_size) if i not in special] or list(range(vocab_size))
