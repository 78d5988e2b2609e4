"""The worker's side of the protocol: one JSON object per line, in each direction."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any, Protocol

import numpy as np

COMMANDS = ("about", "load", "check", "prefill", "decode", "unload", "measure")


class Worker(Protocol):
    """One measured system. The prompts of a call have equal length, which all systems run fastest."""

    def about(self) -> dict[str, Any]:
        """Return `version` and `settings`, for the report."""
        ...

    def load(self, **setup: Any) -> dict[str, Any]:
        """Open the weights, and return details for the log.

        `setup` has `folder`, `fmt`, `kv`, `head_bits` (of int4 models), `threads`, and the largest cell's
        `rows` and `tokens` of KV.

        Raises:
            ValueError: the system does not support the format.
        """
        ...

    def check(self, prompts: list[list[int]], forced: list[list[int]]) -> np.ndarray:
        """Prefill the prompts, decode the forced ids, and return the last logits, `[rows, vocab]`."""
        ...

    def prefill(self, length: int) -> float:
        """Return the seconds from a prompt of `length` ids to its next id."""
        ...

    def decode(self, rows: int, length: int, steps: int, seconds: float) -> list[float]:
        """Return the seconds of each decode step, from ids to next ids, after `length` tokens in every row.

        Ends after `steps` steps, or after 3 or more that took `seconds` in all. Two untimed steps come first.
        Each row has its own memory for K and V, though these may be copies of one another.
        """
        ...

    def unload(self) -> None:
        """Free the memory."""
        ...


def serve(worker: Any) -> None:
    """Answer commands until the input ends. Output of libraries goes to stderr."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("do")
        try:
            if command not in COMMANDS:
                raise ValueError(f"do={command!r}: must be one of {COMMANDS}")
            answer = {"answer": encode(getattr(worker, command)(**request))}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _die_with_parent() -> None:
    """On Linux, end with the driver. A stopped worker would otherwise remain, with all its memory."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def encode(value: Any) -> Any:
    """Return an array as JSON, with its bytes in base64; other values are returned unchanged."""
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, dtype="<f4")
        return {"shape": data.shape, "float32": base64.b64encode(data.tobytes()).decode()}
    return value


def decode(value: Any) -> Any:
    """Return the value that was passed to `encode`."""
    if isinstance(value, dict) and "float32" in value:
        return np.frombuffer(base64.b64decode(value["float32"]), "<f4").reshape(value["shape"])
    return value


def random_ids(count: int, seed: int, vocab: int) -> list[int]:
    """Return random ids, the same in every system."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


class PeerSystem:
    """Base of the workers of systems that `verbatim.bench` measures as well; `load` sets the attributes.

    Attributes:
        peer: a `verbatim.bench.converted.Converted`, or an object with its `prefill` and `decode`.
        vocab: number of ids.
    """

    peer: Any
    vocab: int

    def check(self, prompts: list[list[int]], forced: list[list[int]]) -> np.ndarray:
        with self.peer.context(len(prompts), len(prompts[0]) + len(forced[0])) as context:
            logits = context(prompts)
            for ids in zip(*forced, strict=True):  # decoded one by one
                logits = context([[token] for token in ids])
            return logits.copy()

    def prefill(self, length: int) -> float:
        return self.peer.prefill(random_ids(length, 0, self.vocab))

    def decode(self, rows: int, length: int, steps: int, seconds: float) -> list[float]:
        return self.peer.decode([random_ids(length, 0, self.vocab)] * rows, steps, seconds)
