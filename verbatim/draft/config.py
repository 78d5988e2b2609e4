"""Resolves the values of `LLM(draft=...)`: a `DraftModel`, other drafters, their names, or a proposer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from verbatim.common.checks import integer, memory_bytes
from verbatim.draft.ngram import Ngram
from verbatim.errors import InvalidRequest
from verbatim.model.early_exit import EarlyExit
from verbatim.model.mtp_source import Mtp
from verbatim.options import total_memory
from verbatim.protocols import Proposer


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Draft with a smaller model that has the same tokenizer.

    Updates of the model's weights do not update the draft model: fewer draft tokens are then accepted, and
    outputs stay the same. `LLM`'s `kv_dtype`, `block_size`, `max_batch_tokens` and `num_threads` apply to the
    draft model as well.

    Attributes:
        model: a folder, a hub id, or a live module with weights that may change at any time. Python code of
            the checkpoint is not run.
        dtype: as in `LLM`.
        kv_memory: size of the draft model's KV cache, as in `LLM`. None: enough for as many tokens as the
            model's KV cache, but at most a tenth of the available memory.

    Raises:
        InvalidRequest: an invalid model or amount of memory.
    """

    model: str | os.PathLike[str] | nn.Module
    dtype: Any = "auto"
    kv_memory: int | str | None = None

    def __post_init__(self) -> None:
        if self.model == "" or not isinstance(self.model, str | os.PathLike | nn.Module):
            raise InvalidRequest(
                f"DraftModel({self.model!r}): must be a folder, a hub id or a module"
            )
        if self.kv_memory is not None:
            memory_bytes(self.kv_memory, total_memory())


Drafter = Proposer | DraftModel | EarlyExit | Mtp


MAX_FIXED = 64  # limit of `num_draft_tokens`

# A new drafter belongs here, in `Drafter`, and in the texts that a test compares with this table.
BY_NAME: dict[str, Callable[[], Drafter]] = {"ngram": Ngram, "mtp": Mtp, "early-exit": EarlyExit}
NAMES = ", ".join(map(repr, BY_NAME))


def resolve_draft(draft: Any) -> Drafter | None:
    """Return the drafter that `draft` names; raise InvalidRequest for an unknown name or type."""
    if draft is None or (isinstance(draft, Drafter) and not isinstance(draft, type)):
        return draft  # before the check for modules, as a proposer may be one
    if isinstance(draft, str) and draft in BY_NAME:
        return BY_NAME[draft]()
    if isinstance(draft, str | os.PathLike | nn.Module) and draft != "":
        return DraftModel(draft)
    raise InvalidRequest(
        f"draft={draft!r}: must be None, {NAMES}, a folder, a hub id, a module, or "
        "an instance of a class with propose(sequences, lengths)"
    )


def resolve_draft_tokens(value: Any, draft: Any) -> int | None:
    """Validate `num_draft_tokens`; raise InvalidRequest if out of range, or set without `draft`."""
    if value is None:
        return None
    num_tokens = integer("num_draft_tokens", value, 0, MAX_FIXED, optional=True)
    if draft is None:
        raise InvalidRequest(f"num_draft_tokens={num_tokens}: requires draft=...")
    return num_tokens
