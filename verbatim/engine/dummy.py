"""Steps that leave no trace: a forward for nobody, and a look at what the next step would draw."""

from __future__ import annotations

from verbatim.batch import dummy_batch
from verbatim.core import Request
from verbatim.engine.driver import Driver
from verbatim.engine.traffic import Mode, Traffic


def dummy_forward(driver: Driver) -> None:
    """Run the model for nobody, as a rank without requests must, between two steps.

    Raises:
        EngineClosed: the engine is closed.
        VerbatimError: it sleeps.
    """

    def forward() -> None:
        driver.check_awake()
        driver.engine.runner.forward(dummy_batch())

    driver._traffic.visit(forward)


def peek(driver: Driver) -> list[tuple[Request, int, float]]:
    """What the next step would draw: request, id and raw log-prob of each sequence that has a row.

    Nothing counts before commit, so the step that follows computes and draws the same once more.
    Nothing is drawn while the engine is paused.

    Raises:
        EngineClosed: the engine is closed.
    """
    return driver._traffic.visit(lambda: _peek(driver._traffic))


def _peek(traffic: Traffic) -> list[tuple[Request, int, float]]:
    traffic.settle()
    try:
        seen = None if traffic.mode is Mode.PAUSED else traffic.engine.peek()
    finally:
        traffic.settle()
    if seen is None:
        return []
    chunks, draws = seen
    rows = [
        (chunk.sequence.request, chunk.first_draw + chunk.num_prompt_targets)
        for chunk in chunks
        if chunk.draws and not chunk.sequence.request.finished
    ]
    return [(request, draws.ids[row], draws.logprobs[row]) for request, row in rows]
