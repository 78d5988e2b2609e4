"""The worker's side: one JSON object a line comes in, one goes out."""

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
    """One system. Prompts are of equal length, since every system is at its best then."""

    def about(self) -> dict[str, Any]:
        """`version` and `settings`, to be printed."""
        ...

    def load(self, **setup: Any) -> dict[str, Any]:
        """Open the weights: `folder`, `fmt`, `kv`, `head_bits` (of the head, in int4), `threads`, and of the
        largest cell `rows` and `tokens` of KV. Returns what there is to say about it.

        Raises:
            ValueError: the system has no such format.
        """
        ...

    def check(self, prompts: list[list[int]], forced: list[list[int]]) -> np.ndarray:
        """Prefill the prompts and decode the forced ids: logits `[rows, vocab]` behind the last ones."""
        ...

    def prefill(self, length: int) -> float:
        """Seconds from a prompt of so many ids to its next id."""
        ...

    def decode(self, rows: int, length: int, steps: int, seconds: float) -> list[float]:
        """Seconds of each decode step, from ids to next ids, behind `length` tokens in every row.

        At most `steps`, and no more than 3 once they took `seconds` in all; two more come first, untimed.
        The rows' K and V lie in memory of their own, though they may be copies of one another.
        """
        ...

    def unload(self) -> None:
        """Give the memory back."""
        ...


def serve(worker: Any) -> None:
    """Answer until the input ends. What libraries print goes to stderr."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if do not in COMMANDS:
                raise ValueError(f"do={do!r}: must be one of {COMMANDS}")
            answer = {"answer": encode(getattr(worker, do)(**request))}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _die_with_parent() -> None:
    """On Linux: a worker that is stopped when its driver is killed would stay, with all its memory."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def encode(value: Any) -> Any:
    """An array becomes its bytes; everything else is JSON as it is."""
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, dtype="<f4")
        return {"shape": data.shape, "float32": base64.b64encode(data.tobytes()).decode()}
    return value


def decode(value: Any) -> Any:
    """What `encode` made."""
    if isinstance(value, dict) and "float32" in value:
        return np.frombuffer(base64.b64decode(value["float32"]), "<f4").reshape(value["shape"])
    return value


def random_ids(count: int, seed: int, vocab: int) -> list[int]:
    """The same ids in every system."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


class PeerSystem:
    """What workers share whose system `verbatim.bench` measures as well; `load` sets the attributes.

    Attributes:
        peer: a `verbatim.bench.converted.Converted`, or something with its `prefill` and `decode`.
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
