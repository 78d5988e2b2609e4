"""`StopWatch`: detects the end of a completion, and collects its text."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Self, cast

from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams
from verbatim.text.detokenizer import Detokenizer


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end of sequence, a stop id or a stop string; `stop_reason` says which
    LENGTH = "length"  # `max_tokens`, or the length limit
    TIMEOUT = "timeout"  # `timeout_s` passed
    ABORT = "abort"  # aborted by the caller
    ERROR = "error"


StopReason = int | str | tuple[int, ...] | None  # the id, the string or the ids; None for length


class StopWatch:
    """Detects stops in one completion, token by token, and collects its text.

    `push` checks, in this order: end of sequence and single stop ids, sequences of ids, stop strings, length.
    Only the completion is searched. Below `min_tokens` only the length ends it, and stops completed before
    then don't count later. The token that completes a stop is part of the completion; only text is cut.

    A stop string ends the completion at the first token after which the text contains it (not counting an
    incomplete character at the end). If one token completes several, the text ends at the one that begins
    earliest, or at the longest of these.

    Attributes:
        num_tokens: tokens pushed.
        finish_reason, stop_reason: None until the end. `stop_reason` is the id for end of sequence and stop
            ids, the tuple for a sequence of ids, the string for a stop string, else None.

    Raises:
        InvalidRequest: stop strings without a tokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        stop_ids: frozenset[int],
        max_tokens: int,
        detokenizer: Detokenizer | None,
    ) -> None:
        if params.stop and detokenizer is None:
            raise InvalidRequest(
                f"stop={list(params.stop)!r}: stop strings need a tokenizer and this engine has none; "
                "use stop_token_ids"
            )
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason = None
        self._max_tokens = max_tokens
        self._min_tokens = params.min_tokens
        self._stop_ids = stop_ids
        self._sequences = sorted((s for s in stop_sequences(params) if len(s) > 1), key=len)[::-1]
        self._ids: list[int] = []  # the last ids, to match stop sequences
        self._stops = tuple(params.stop)
        self._longest_stop = max(map(len, self._stops), default=1)
        self._first_chars = {stop[0] for stop in self._stops}
        self._includes_stop = params.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._parts: list[str] = []  # text that can't be part of a stop string
        self._num_taken = 0  # parts returned by `take`
        self._partial_stop = ""  # final text after `_parts` that may begin a stop string
        self._pending = ""  # text after `_partial_stop` that later tokens may change
        self._sent = ""  # text sent before the resume
        self._unmatched = ""  # the part of `_sent` that is not yet generated again

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def whole_text(self) -> str:
        """The final text so far; all of it when finished."""
        return "".join(self._parts) + self._partial_stop

    @property
    def text(self) -> str:
        """The final text so far, without text sent before the resume."""
        whole = self.whole_text
        return whole[num_in_common(whole, self._sent) :] if self._sent else whole

    def resume(self, token_ids: Iterable[int], sent: str) -> None:
        """Start after existing tokens, none of which ends the completion.

        Args:
            sent: their text as already sent. It is not revised, even if it turns out to end in an incomplete
                character or a prefix of a stop string.
        """
        assert self.num_tokens == 0
        ids = list(token_ids)
        limits = self._min_tokens, self._max_tokens
        self._min_tokens = self._max_tokens = len(ids) + 1
        for token_id in ids:
            self.push(token_id)
        self._min_tokens, self._max_tokens = limits
        self._sent, self._unmatched = sent, sent
        self.take()

    def push(self, token_id: int) -> bool:
        """Add a token; return whether it ends the completion."""
        assert not self.finished, "a token after the end of a completion"
        self.num_tokens += 1
        new = pending = ""
        if self._detokenizer is not None:
            new, pending = self._detokenizer.push(token_id), self._detokenizer.pending
        by_id = self._stop_by_id(token_id)
        if self.num_tokens >= self._min_tokens:
            if by_id is not None:
                self._end(FinishReason.STOP, by_id, new)
            elif self._stops and (match := self._find(new, pending)):
                start, stop = match
                text = self._partial_stop + new + pending
                self._partial_stop = ""
                self._parts.append(text[: start + len(stop) * self._includes_stop])
                self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        if self.finish_reason is None and self.num_tokens >= self._max_tokens:
            self._end(FinishReason.LENGTH, None, new)
        if self.finish_reason is None:
            self._pending = pending
            self._keep(new)
        return self.finished

    def finish(self, reason: FinishReason) -> None:
        """End the completion (abort, the length limit): all text becomes final."""
        if not self.finished:
            self._end(reason, None, "")

    def take(self) -> str:
        """Return the text since the last call, except an end that may be part of a stop string.

        Joined, the returned texts are `text` when finished.
        """
        text = "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        if self._unmatched and text:
            num_repeated = num_in_common(text, self._unmatched)
            self._unmatched = self._unmatched[num_repeated:] if num_repeated == len(text) else ""
            text = text[num_repeated:]
        return text

    def fork(self) -> Self:
        """Return an independent copy, without the text already returned by `take`."""
        fork = copy.copy(self)
        fork._ids = self._ids.copy()
        fork._parts = self._parts.copy()
        if self._detokenizer is not None:
            fork._detokenizer = self._detokenizer.fork()
        return fork

    def _end(self, reason: FinishReason, stop_reason: StopReason, new: str) -> None:
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        self._parts.append(self._partial_stop + new + rest)
        self._partial_stop = self._pending = ""
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _stop_by_id(self, token_id: int) -> int | tuple[int, ...] | None:
        if self._sequences:
            self._ids = [*self._ids[1 - len(self._sequences[0]) :], token_id]
        if token_id in self._stop_ids:
            return token_id
        for sequence in self._sequences:
            if token_id == sequence[-1] and tuple(self._ids[-len(sequence) :]) == sequence:
                return sequence
        return None

    def _find(self, new: str, pending: str) -> tuple[int, str] | None:
        """Return the stop string that this token completed, and its start in `_partial_stop` + new + pending.

        A match that ends in the new text begins in `_partial_stop` or later.
        """
        text = self._partial_stop + new + pending
        # The text already searched.
        seen = len(self._partial_stop) + num_in_common(self._pending, new + pending)
        if seen == len(text):
            return None
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                matches.append((start, -len(stop), stop))
        if not matches:
            return None
        start, _, stop = min(matches)
        return start, stop

    def _keep(self, new: str) -> None:
        """Hold back the longest end of the text that may begin a stop string; release the text before it.

        The start of the end only moves forward, so each character is visited once.
        """
        text = self._partial_stop + new
        start = max(0, len(text) - self._longest_stop + 1)
        while start < len(text) and not (
            text[start] in self._first_chars and self._begins_stop(text[start:])
        ):
            start += 1
        self._partial_stop = text[start:]
        if start:
            self._parts.append(text[:start])

    def _begins_stop(self, end: str) -> bool:
        return any(len(end) < len(stop) and stop.startswith(end) for stop in self._stops)


def num_in_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two strings, or of two lists of ids."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])


def single_stop_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Return the single ids that end a completion."""
    single = frozenset(s[0] for s in stop_sequences(params) if len(s) == 1)
    return single if params.ignore_eos else single | eos_ids


def stop_sequences(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Return `stop_token_ids` as tuples, to which `SamplingParams` normalizes them."""
    return cast("tuple[tuple[int, ...], ...]", params.stop_token_ids)
