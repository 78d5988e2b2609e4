"""The exception classes. Every message names the value, the limit and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class VerbatimError(Exception):
    """Base class of Verbatim's errors."""


class InvalidRequest(VerbatimError, ValueError):
    """An invalid prompt or parameter; raised before any forward runs."""


class PromptTooLong(InvalidRequest):
    """A prompt that leaves no room for a new token within the model's or the engine's length limit."""


class NotSupported(VerbatimError, ValueError):
    """An option or a combination of options that is not supported; never ignored silently."""


class ModelError(VerbatimError):
    """A model that can't be opened: a missing folder, damaged weights, an unreadable config."""


class UnsupportedModel(ModelError, ValueError):
    """An unsupported architecture; the message names it and the reason."""


class ModelChanged(VerbatimError, RuntimeError):
    """A model changed after it was opened: a live module's layers, vocabulary or dtype, or weight files.

    Also raised for requests after an interrupted weight update, until `update_weights` is called again.
    """


class OutOfBlocks(VerbatimError, MemoryError):
    """The KV memory is too small for one sequence of the requested length, or for another open session."""


class QueueFull(VerbatimError, RuntimeError):
    """More queued requests than `max_waiting` allows; retry when some have finished."""


class EngineClosed(VerbatimError, RuntimeError):
    """A call to an engine or a session after its `close()`."""


class SessionBusy(VerbatimError, RuntimeError):
    """A call to a session while another call is in progress."""


class TierFailed(VerbatimError, OSError):
    """A read or write of offloaded weights, K and V or activations failed.

    The message names the tier and the file. The engine is closed: its memory, threads and files are freed,
    and every unfinished request fails with this error.

    Attributes:
        results: from `LLM.generate`, in the order of its prompts: the `Result` of each finished request,
            None for the others. Empty from other calls.
    """

    def __init__(self, message: str, results: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


class RequestFailed(VerbatimError, RuntimeError):
    """An accepted request that failed while it ran; the cause is chained."""


class StageFailed(VerbatimError, RuntimeError):
    """A stage of a cluster was lost and could not be replaced, or was not available at opening.

    The message names the stage and the reason. The requests of the step fail with this error. The engine
    stays open: the next request tries again to replace the stage, and sessions keep their tokens.
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the error's type if the message is empty."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


def as_exception(error: BaseException) -> Exception:
    """Return the error of a step as an Exception for other callers; SystemExit and the like are wrapped."""
    if isinstance(error, Exception):
        return error
    wrapper = RequestFailed(f"the step was interrupted by {error!r}")
    wrapper.__cause__ = error
    return wrapper
