"""What can go wrong, as one small tree. Every message names the value, the limit and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class VerbatimError(Exception):
    """Base of every error that Verbatim raises on purpose."""


class InvalidRequest(VerbatimError, ValueError):
    """A prompt or a parameter that can't be served as given; raised before any forward runs."""


class PromptTooLong(InvalidRequest):
    """A prompt that leaves no room for a token within the model's or the engine's length limit."""


class NotSupported(VerbatimError, ValueError):
    """An option or a combination that is known by name and not built; never ignored silently."""


class ModelError(VerbatimError):
    """A model that can't be opened: a missing folder, damaged weights, a config that can't be read."""


class UnsupportedModel(ModelError, ValueError):
    """An architecture that can't be run on flat batches; the message names it and the reason."""


class ModelChanged(VerbatimError, RuntimeError):
    """A live module whose layers, vocabulary or dtype are others than when it was opened."""


class OutOfBlocks(VerbatimError, MemoryError):
    """The KV memory is too small for even one sequence of the length that was asked for, or what open
    sessions leave of it for another session.
    """


class QueueFull(VerbatimError, RuntimeError):
    """More requests than `max_waiting` allows; try again when some have ended."""


class EngineClosed(VerbatimError, RuntimeError):
    """A call on an engine after `close()`, or on a session after its own."""


class SessionBusy(VerbatimError, RuntimeError):
    """A call on a session while another one is under way."""


class TierFailed(VerbatimError, OSError):
    """Weights, K and V or activations could not be read or written where they lie.

    The message names the tier and the file. The engine is closed then: its memory, threads and files are
    given back, and every request that had not ended fails with this error.

    Attributes:
        results: raised by `LLM.generate`, in the order of its prompts: the `Result` of each request that had
            ended before, None for the others. Empty elsewhere.
    """

    def __init__(self, message: str, results: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


class RequestFailed(VerbatimError, RuntimeError):
    """A request that was accepted and failed while it ran; the cause is chained."""


class StageFailed(VerbatimError, RuntimeError):
    """A stage of a cluster was lost and could not be replaced; the message names it and the reason.

    The requests of the step fail with this error. The engine goes on: the next request tries to fill the
    place again, and sessions keep what they have.
    """


def first_line(error: Exception) -> str:
    """An error of a library in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
