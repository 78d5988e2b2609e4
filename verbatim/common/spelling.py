"""Suggests names for misspelt arguments, and for arguments named as in other systems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=Callable[..., Any])

# Maps names in vLLM, transformers and others to ours; the first known one is suggested.
_FOREIGN_NAMES = {
    "best_of": ("n",),
    "dtype_kv": ("kv_dtype",),
    "gpu_memory_utilization": ("kv_memory",),
    "guided_choice": ("choice",),
    "guided_grammar": ("grammar",),
    "guided_json": ("json_schema", "response_format", "text"),
    "guided_regex": ("regex",),
    "kv_cache_dtype": ("kv_dtype",),
    "max_length": ("max_tokens", "max_output_tokens"),
    "max_tokens": ("params",),
    "max_model_len": ("max_length",),
    "max_new_tokens": ("max_tokens", "max_output_tokens", "params"),
    "max_num_batched_tokens": ("max_batch_tokens",),
    "max_num_seqs": ("max_sequences",),
    "num_return_sequences": ("n",),
    "enable_prefix_caching": ("prefix_cache",),
    "pipeline_parallel_size": ("placement",),
    "prompt_token_ids": ("prompt", "prompts", "input"),
    "sampling_params": ("params",),
    "speculative_config": ("draft",),
    "stop_strings": ("stop",),
    "temperature": ("params",),
    "structured_outputs": ("json_schema", "response_format", "text"),
    "tensor_parallel_size": ("placement",),
    "use_beam_search": ("num_beams",),
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the known name closest to `name`, or "" if there is none."""
    known = list(known)
    for other in _FOREIGN_NAMES.get(name, ()):
        if other in known:
            return f"; did you mean {other!r}?"
    # Truncated, because the time of a comparison grows with the length.
    close = get_close_matches(name[:64], known, 1, 0.75)
    return f"; did you mean {close[0]!r}?" if close else ""


def suggests_names(function: T) -> T:
    """Make a function, or a class's `__init__`, raise TypeError with a suggestion for unknown arguments."""
    if isinstance(function, type):
        owner: Any = function
        owner.__init__ = suggests_names(owner.__init__)
        return cast(T, function)
    known = inspect.signature(function).parameters.keys()

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                called = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{called}() has no argument {name!r}{did_you_mean(name, known)}")
        return function(*args, **kwargs)

    return cast(T, checked)
