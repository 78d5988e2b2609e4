"""The session that a call without `session=` belongs to: the innermost `with` block around it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from verbatim.llm import LLM

if TYPE_CHECKING:
    from verbatim.compat.petals.session import InferenceSession

Entry = tuple[LLM, "InferenceSession | None"]

# Of this thread or task, outermost first; those of all models.
_entered: ContextVar[tuple[Entry, ...]] = ContextVar("entered", default=())


def active_session(llm: LLM) -> InferenceSession | None:
    """The innermost session of this model; None where there is none."""
    return next((session for own, session in reversed(_entered.get()) if own is llm), None)


def enter(llm: LLM, session: InferenceSession | None) -> None:
    """Make a session, or none, the model's innermost one."""
    _entered.set((*_entered.get(), (llm, session)))


def leave(llm: LLM, session: InferenceSession | None) -> None:
    """Undo `enter`; harmless in a thread that has not entered it."""
    entries = _entered.get()
    for place in reversed(range(len(entries))):
        if entries[place][0] is llm and entries[place][1] is session:
            _entered.set(entries[:place] + entries[place + 1 :])
            return
