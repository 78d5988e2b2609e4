"""Stopping criteria and streamers, called while rows are generated."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, cast

import torch
from torch import Tensor

from verbatim.compat.petals.processors import ProcessorChain
from verbatim.compat.petals.settings import Settings
from verbatim.core import Request
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM


class TokenObserver:
    """Calls stopping criteria and a streamer with the new tokens of a call.

    Attributes:
        stops: by request, the number of new tokens after which a criterion ended it.
    """

    def __init__(self, criteria: list[Any], streamer: Any, fill_id: int) -> None:
        self._criteria, self._streamer, self._fill_id = criteria, streamer, fill_id
        self.stops: dict[int, int] = {}
        self._seen: list[int] = []
        self._sent = 0

    @property
    def is_active(self) -> bool:
        return bool(self._criteria) or self._streamer is not None

    def run(
        self,
        llm: LLM,
        requests: list[Request],
        rows: list[int],
        given: Tensor,
        chains: list[ProcessorChain | None],
    ) -> None:
        """Step until all `requests` have ended, also by a criterion.

        Args:
            rows: the result row of each request.
            given: `[B, P]`, sent to the streamer first.
            chains: the processor chain of each request, with its scores.
        """
        self._seen = [0] * len(requests)
        if self._streamer is not None:
            self._streamer.put(given)
        with closing(cast("Generator[None]", llm.engine.steps(requests))) as steps:
            for _ in steps:
                self._check(requests, chains, llm.engine.abort)
                self._send(requests, rows, len(given))
        self._send(requests, rows, len(given))
        if self._streamer is not None:
            self._streamer.end()

    def _check(
        self,
        requests: list[Request],
        chains: list[ProcessorChain | None],
        end: Callable[[Request], None],
    ) -> None:
        """Call the criteria for each new token of each row in turn."""
        for number, request in enumerate(requests if self._criteria else []):
            if number in self.stops or not request.sequences:
                continue
            new_ids = list(request.sequences[0].output_ids)
            seen, self._seen[number] = self._seen[number], len(new_ids)
            for count in range(seen + 1, len(new_ids) + 1):
                ids = torch.tensor([request.prompt_ids + new_ids[:count]])
                scores = _scores(chains[number], len(request.prompt_ids), count)
                if any(_is_stop(criterion, ids, scores) for criterion in self._criteria):
                    self.stops[number] = count
                    end(request)
                    break

    def _send(self, requests: list[Request], rows: list[int], num_rows: int) -> None:
        """Send the final columns to the streamer."""
        if self._streamer is None:
            return
        new_rows = [self.kept(n, r.sequences[0].output_ids) for n, r in enumerate(requests)]
        growing = [
            len(ids)
            for number, (request, ids) in enumerate(zip(requests, new_rows, strict=True))
            if not (number in self.stops or request.sequences[0].finished)
        ]
        ready = min(growing) if growing else max(map(len, new_rows), default=0)
        for column in range(self._sent, ready):
            ids = torch.full((num_rows,), self._fill_id)
            for row, new_ids in zip(rows, new_rows, strict=True):
                if column < len(new_ids):
                    ids[row] = new_ids[column]
            self._streamer.put(ids)
        self._sent = max(self._sent, ready)

    def kept(self, number: int, ids: list[int]) -> list[int]:
        """Return a request's new ids, cut where a criterion ended it."""
        return ids[: self.stops.get(number, len(ids))]


def _scores(chain: ProcessorChain | None, num_given: int, count: int) -> tuple[Tensor, ...] | None:
    if chain is None or not chain.scores:
        return None
    return tuple(chain.scores[num_given + i][None] for i in range(count))


def _is_stop(criterion: Any, ids: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
    stop = criterion(ids, scores)
    return bool(stop.any()) if isinstance(stop, Tensor) else bool(stop)


def open_observer(
    llm: LLM, settings: Settings, criteria: Any, streamer: Any, tok: Any
) -> TokenObserver:
    """Return the observer for a call's arguments.

    Args:
        tok: a transformers tokenizer for `stop_strings`; None takes the model's.

    Raises:
        InvalidRequest, NotSupported: an argument that can't be called, or with beams.
    """
    checks = [] if criteria is None else criteria
    if not isinstance(checks, list | tuple) or not all(map(callable, checks)):
        raise InvalidRequest(
            f"stopping_criteria={criteria!r}: must be a StoppingCriteriaList or a list of callables"
        )
    checks = list(checks)
    if settings["stop_strings"] is not None:
        checks.append(_stop_strings(llm, settings["stop_strings"], tok))
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InvalidRequest(f"streamer={streamer!r}: must have put and end")
    beams = settings.num_beams
    for name, value in (("streamer", streamer), ("stopping_criteria, stop_strings", checks)):
        if beams > 1 and value:
            raise NotSupported(
                f"{name} with num_beams={beams}: which beam is the best is known in the end alone"
            )
    return TokenObserver(checks, streamer, settings.fill_id)


def _stop_strings(llm: LLM, strings: Any, tok: Any) -> Any:
    from transformers import StopStringCriteria

    tok = tok if tok is not None or llm.tokenizer is None else llm.tokenizer.hf
    if tok is None:
        raise InvalidRequest(
            f"stop_strings={strings!r}: need a tokenizer, and this engine has none; give tokenizer="
        )
    return StopStringCriteria(tok, strings)
