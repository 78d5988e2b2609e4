"""What tests of models with recurrent layers share."""

from __future__ import annotations

from verbatim import LLM


def check_nothing_is_left(llm: LLM) -> None:
    """Assert that no request, block or slot of a state is in use."""
    slots = llm.engine.scheduler.states.pool
    assert slots is not None
    slots.check()
    assert slots.num_used == 0
    stats = llm.stats()
    assert stats["blocks_used"] == stats["running"] == stats["waiting"] == 0
