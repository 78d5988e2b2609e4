"""Shared by the scripts: the server's address, the model, and the report of each case."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

URL, MODEL_PATH = sys.argv[1], sys.argv[2]
MODEL = "tales"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


def run(*cases: Callable[[], object]) -> None:
    """Run the cases, and print the outcome of each."""
    for case in cases:
        try:
            case()
            outcome = "ok"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[:300]
        report(case.__name__, outcome)


def report(case: str, outcome: str) -> None:
    print("> " + json.dumps({"case": case, "outcome": outcome}), flush=True)
