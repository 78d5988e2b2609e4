"""Fixtures shared by all tests: engines over poisoned KV, a thread count that is put back."""

from __future__ import annotations

import os

# Threads that wait by sleeping: where other work shares the processors, spinning costs far more than
# it saves at toy sizes. Must be said before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_put_back() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch and free blocks hold NaN, so that reading one shows in the answer."""
    from verbatim import opening

    plain = opening.open_engine

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        opened = plain(*args, **kwargs)
        store, pool = opened.engine.runner.store, opened.engine.scheduler.pool
        if store.nbytes > 64 * 2**20:  # reserved memory that is not touched stays free of charge
            return opened

        def poison(blocks: list[int]) -> None:
            for k, v in store.layers:
                k[blocks] = torch.nan
                v[blocks] = torch.nan

        give_back = pool.give_back

        def give_back_poisoned(blocks: list[int]) -> None:
            if store.layers:
                poison(blocks)
            give_back(blocks)

        poison(list(range(store.num_blocks)))
        pool.give_back = give_back_poisoned
        return opened

    monkeypatch.setattr(opening, "open_engine", poisoned)
    monkeypatch.setattr("verbatim.llm.open_engine", poisoned)
