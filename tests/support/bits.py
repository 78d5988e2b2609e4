"""A program that prints the numerics key and a hash of tokens and log-probs of each architecture's toy.

Usage: `python bits.py DTYPE`; the output is JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from typing import Any

import torch

from support import sweep, toys
from verbatim import LLM, SamplingParams


def set_weights(model: Any) -> None:
    """Set the weights to numbers between -1/8 and 1/8 that are exact, so that no processor rounds them."""
    for number, parameter in enumerate(model.parameters()):
        index = torch.arange(parameter.numel()) * 7919 + number * 104_729
        values = (index * index % 65_521 % 257 - 128).float() / 1024
        norm = parameter.dim() == 1
        parameter.data = (values + norm).reshape(parameter.shape).to(parameter.dtype)


def bits_of(case: str, dtype: torch.dtype) -> tuple[str, str]:
    """Return the numerics key of a toy, and a hash of what it generates."""
    model = sweep.build(case)
    set_weights(model)
    noise = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, toys.VOCAB - 1, (n,), generator=noise).tolist() for n in (30, 3)]
    params = SamplingParams(
        max_tokens=10, temperature=1.0, seed=5, logprobs=8, prompt_logprobs=0, ignore_eos=True
    )
    with LLM(sweep.cast(model, dtype)) as llm:
        results = llm.generate(prompts, params)
        key = llm.info()["numerics_key"]
    found = [
        (r.prompt_logprobs, [(o.token_ids, o.logprobs, o.top_logprobs) for o in r.outputs])
        for r in results
    ]
    return key, hashlib.sha256(repr(found).encode()).hexdigest()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    cases = [
        case for case in sweep.supported() if case != "phi3:longrope"
    ]  # too short for these prompts
    print(json.dumps({case: bits_of(case, getattr(torch, sys.argv[1])) for case in cases}))
