"""Rows that somebody watches while they grow: stopping criteria, and a streamer."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, cast

import torch
from torch import Tensor

from verbatim.compat.petals.processors import Chain
from verbatim.compat.petals.settings import Settings
from verbatim.core import Request
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM


class Following:
    """What is called with the tokens of a call's rows.

    Attributes:
        stops: for each row, after how many new tokens a criterion ended it.
    """

    def __init__(self, criteria: list[Any], streamer: Any, fill_id: int) -> None:
        self._criteria, self._streamer, self._fill_id = criteria, streamer, fill_id
        self.stops: dict[int, int] = {}
        self._seen: list[int] = []
        self._sent = 0

    @property
    def wanted(self) -> bool:
        return bool(self._criteria) or self._streamer is not None

    def run(
        self,
        llm: LLM,
        requests: list[Request],
        rows: list[int],
        given: Tensor,
        chains: list[Chain | None],
    ) -> None:
        """Step until all `requests` have ended, by themselves or by a criterion.

        Args:
            rows: the row of the result that each request is for.
            given: `[B, P]`, which a streamer gets first.
            chains: of each request, where its scores are.
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
        self, requests: list[Request], chains: list[Chain | None], end: Callable[[Request], None]
    ) -> None:
        """Let the criteria see each new token of each row, one after the other."""
        for number, request in enumerate(requests if self._criteria else []):
            if number in self.stops or not request.sequences:
                continue
            made = list(request.sequences[0].output_ids)
            seen, self._seen[number] = self._seen[number], len(made)
            for count in range(seen + 1, len(made) + 1):
                ids = torch.tensor([request.prompt_ids + made[:count]])
                scores = _scores(chains[number], len(request.prompt_ids), count)
                if any(_says_stop(criterion, ids, scores) for criterion in self._criteria):
                    self.stops[number] = count
                    end(request)
                    break

    def _send(self, requests: list[Request], rows: list[int], num_rows: int) -> None:
        """Hand on the columns that are certain."""
        if self._streamer is None:
            return
        made = [self.kept(n, r.sequences[0].output_ids) for n, r in enumerate(requests)]
        growing = [
            len(ids)
            for number, (request, ids) in enumerate(zip(requests, made, strict=True))
            if not (number in self.stops or request.sequences[0].finished)
        ]
        ready = min(growing) if growing else max(map(len, made), default=0)
        for column in range(self._sent, ready):
            ids = torch.full((num_rows,), self._fill_id)
            for row, found in zip(rows, made, strict=True):
                if column < len(found):
                    ids[row] = found[column]
            self._streamer.put(ids)
        self._sent = max(self._sent, ready)

    def kept(self, number: int, ids: list[int]) -> list[int]:
        """What a criterion leaves of a request's new ids."""
        return ids[: self.stops.get(number, len(ids))]


def _scores(chain: Chain | None, num_given: int, count: int) -> tuple[Tensor, ...] | None:
    if chain is None or not chain.scores:
        return None
    return tuple(chain.scores[num_given + place][None] for place in range(count))


def _says_stop(criterion: Any, ids: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
    said = criterion(ids, scores)
    return bool(said.any()) if isinstance(said, Tensor) else bool(said)


def following(llm: LLM, settings: Settings, criteria: Any, streamer: Any, tok: Any) -> Following:
    """What of a call's arguments watches its rows.

    Args:
        tok: a transformers tokenizer for `stop_strings`; None takes the model's.

    Raises:
        InvalidRequest, NotSupported: something that can't be called, or with beams.
    """
    found = [] if criteria is None else criteria
    if not isinstance(found, list | tuple) or not all(map(callable, found)):
        raise InvalidRequest(
            f"stopping_criteria={criteria!r}: must be a StoppingCriteriaList or a list of callables"
        )
    found = list(found)
    if settings["stop_strings"] is not None:
        found.append(_stop_strings(llm, settings["stop_strings"], tok))
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InvalidRequest(f"streamer={streamer!r}: must have put and end")
    beams = settings.num_beams
    for name, value in (("streamer", streamer), ("stopping_criteria, stop_strings", found)):
        if beams > 1 and value:
            raise NotSupported(
                f"{name} with num_beams={beams}: which beam is the best is known in the end alone"
            )
    return Following(found, streamer, settings.fill_id)


def _stop_strings(llm: LLM, strings: Any, tok: Any) -> Any:
    from transformers import StopStringCriteria

    tok = tok if tok is not None or llm.tokenizer is None else llm.tokenizer.hf
    if tok is None:
        raise InvalidRequest(
            f"stop_strings={strings!r}: need a tokenizer, and this engine has none; give tokenizer="
        )
    return StopStringCriteria(tok, strings)
