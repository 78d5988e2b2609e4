"""`StopWatch`: follows one completion, says when it ends, and hands out its text."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Self, cast

from verbatim.core import FinishReason
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams
from verbatim.text.detokenizer import Detokenizer

StopReason = int | str | tuple[int, ...] | None


class StopWatch:
    """One completion, token by token: ids in, verdicts and text out.

    `push` decides at each token, first come first: end of sequence and single stop ids, sequences of
    ids, stop strings, length. Stops are looked for in the completion only. Below `min_tokens`
    tokens nothing but length ends it, and what was complete before then is no stop later. Ids keep
    every token through the one that completes a stop; only text is cut.

    A stop string is met by the first token after which the text of the completion's ids contains it
    (an incomplete character at the end doesn't count). Where one token completes several, the one
    that begins earliest ends the text, and of those the longest.

    Attributes:
        num_tokens: tokens pushed.
        finish_reason, stop_reason: None while it grows. `stop_reason` is the id for end of sequence and
            stop ids, the tuple for a sequence of ids, the string for a stop string, else None.

    Raises:
        InvalidRequest: stop strings without a tokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        eos_ids: frozenset[int],
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
        self._stop_ids = single_stop_ids(params, eos_ids)
        self._sequences = sorted((s for s in _stop_ids(params) if len(s) > 1), key=len)[::-1]
        self._ids: list[int] = []  # the last ones, where sequences are looked for
        self._stops = tuple(params.stop)
        self._longest_stop = max(map(len, self._stops), default=1)
        firsts = "".join(re.escape(stop[0]) for stop in self._stops)
        self._first_char = re.compile(f"[{firsts}]" if firsts else "(?!)")  # (?!) is never found
        self._keeps_stop = params.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._parts: list[str] = []  # text that no stop string can claim any more
        self._num_taken = 0  # parts handed out
        self._held = ""  # final text behind them that may begin a stop string
        self._pending = ""  # text behind that which later tokens may yet change
        self._told = ""  # of the whole text, what was told before it was resumed
        self._retold = ""  # the rest of that, which comes again and is not handed out

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def whole_text(self) -> str:
        """The completion's text as far as it is certain; all of it when finished."""
        return "".join(self._parts) + self._held

    @property
    def text(self) -> str:
        """The same without what was told before it was resumed."""
        whole = self.whole_text
        return whole[_in_common(whole, self._told) :] if self._told else whole

    def resume(self, token_ids: Iterable[int], told: str) -> None:
        """Begin behind tokens that are there already, none of which ends anything.

        Args:
            told: what was handed out as their text. It can't be taken back where later tokens show that it
                was half a character, or the beginning of a stop string.
        """
        assert self.num_tokens == 0
        ids = list(token_ids)
        limits = self._min_tokens, self._max_tokens
        self._min_tokens = self._max_tokens = len(ids) + 1
        for token_id in ids:
            self.push(token_id)
        self._min_tokens, self._max_tokens = limits
        self._told, self._retold = told, told
        self.take()

    def push(self, token_id: int) -> tuple[FinishReason, StopReason] | None:
        """Add a token. The verdict if it ends the completion, else None."""
        assert not self.finished, "a token after the end of a completion"
        self.num_tokens += 1
        new = pending = ""
        if self._detokenizer is not None:
            new, pending = self._detokenizer.push(token_id), self._detokenizer.pending
        by_id = self._stop_by_id(token_id)
        if self.num_tokens >= self._min_tokens:
            if by_id is not None:
                return self._end(FinishReason.STOP, by_id, new)
            if self._stops and (match := self._find(new, pending)):
                start, stop = match
                text = self._held + new + pending
                self._held = ""
                self._parts.append(text[: start + len(stop) * self._keeps_stop])
                self.finish_reason, self.stop_reason = FinishReason.STOP, stop
                return FinishReason.STOP, stop
        if self.num_tokens >= self._max_tokens:
            return self._end(FinishReason.LENGTH, None, new)
        self._pending = pending
        self._keep(new)
        return None

    def finish(self, reason: FinishReason) -> None:
        """End it from outside (abort, the length limit): what text there is becomes final."""
        if not self.finished:
            self._end(reason, None, "")

    def take(self) -> str:
        """The text that became certain since the last call and that no stop string can still claim.

        Joined, these are `text` when finished.
        """
        text = "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        if self._retold and text:
            again = _in_common(text, self._retold)
            self._retold = self._retold[again:] if again == len(text) else ""
            text = text[again:]
        return text

    def fork(self) -> Self:
        """A copy that goes its own way from here; what `take` handed out before, it won't again."""
        fork = copy.copy(self)
        fork._ids = self._ids.copy()
        fork._parts = self._parts.copy()
        if self._detokenizer is not None:
            fork._detokenizer = self._detokenizer.fork()
        return fork

    def _end(
        self, reason: FinishReason, stop_reason: StopReason, new: str
    ) -> tuple[FinishReason, StopReason]:
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        self._parts.append(self._held + new + rest)
        self._held = self._pending = ""
        self.finish_reason, self.stop_reason = reason, stop_reason
        return reason, stop_reason

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
        """The stop string that this token completed, and where it begins in held + new + pending.

        Whatever ends in the new text begins in `held` at the earliest, so nothing else is searched.
        """
        text = self._held + new + pending
        seen = len(self._held)  # what the last token showed already
        for old, now in zip(self._pending, text[seen:], strict=False):
            if old != now:
                break
            seen += 1
        if seen == len(text):
            return None
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                found.append((start, -len(stop), stop))
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _keep(self, new: str) -> None:
        """Hold the longest end of the text with which a stop string begins, release what is before.

        That end only ever moves forward, so each character is passed once.
        """
        text = self._held + new
        start = max(0, len(text) - self._longest_stop + 1)
        while char := self._first_char.search(text, start):
            start = char.start()
            if self._begins_stop(text[start:]):
                break
            start += 1
        else:
            start = len(text)
        self._held = text[start:]
        if start:
            self._parts.append(text[:start])

    def _begins_stop(self, end: str) -> bool:
        return any(len(end) < len(stop) and stop.startswith(end) for stop in self._stops)


def _in_common(a: str, b: str) -> int:
    """With how many characters both begin."""
    if a.startswith(b):
        return len(b)
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def banned_until_min_tokens(
    params: SamplingParams, eos_ids: frozenset[int], num_output: int
) -> list[int]:
    """Ids that can't be drawn while fewer than `min_tokens` have been: end of sequence and stop ids."""
    return sorted(single_stop_ids(params, eos_ids)) if num_output < params.min_tokens else []


def single_stop_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end a completion by themselves."""
    single = frozenset(s[0] for s in _stop_ids(params) if len(s) == 1)
    return single if params.ignore_eos else single | eos_ids


def _stop_ids(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """What `SamplingParams` settled `stop_token_ids` to: every entry a tuple."""
    return cast("tuple[tuple[int, ...], ...]", params.stop_token_ids)
