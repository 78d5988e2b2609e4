"""What `LLM(draft=...)` may be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from verbatim.draft.ngram import Ngram
from verbatim.errors import InvalidRequest
from verbatim.model.mtp_source import Mtp
from verbatim.options import memory_bytes, total_memory
from verbatim.protocols import Proposer


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Draft with a smaller model that has the same tokenizer.

    Its weights stay as they are when the model's are updated: drafts get worse then, and no word changes.
    `LLM`'s `kv_dtype`, `block_size`, `max_batch_tokens` and `num_threads` are its own as well.

    Attributes:
        model: a folder, a hub id or a live module, whose owner may change its weights at any time. Python
            code that comes with a checkpoint is not run.
        dtype: as `LLM`'s.
        kv_memory: what its K and V may take, as `LLM`'s; None: enough for as many tokens as the model's,
            within a tenth of what is available.

    Raises:
        InvalidRequest: a model or an amount of memory that can't be one.
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


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Draft with the model's own first layers, followed by its own last norm and head.

    Needs no memory. Pays where those layers say much of what all of them say, as in models trained for it.

    Attributes:
        layers: how many of the first layers; None takes a quarter of them, 1 at least.

    Raises:
        InvalidRequest: `layers` is not an integer, or below 1.
    """

    layers: int | None = None

    def __post_init__(self) -> None:
        value = self.layers
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise InvalidRequest(f"layers={value!r}: must be an integer, 1 or more, or None")


Drafter = Proposer | DraftModel | EarlyExit | Mtp


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """`LLM`'s options about drafts, checked."""

    draft: Drafter | None = None
    num_tokens: int | None = None  # of each draft; None: as many as pay


MAX_FIXED = 64  # tokens of a draft, where the length is given

_BY_NAME: dict[str, Callable[[], Drafter]] = {"ngram": Ngram, "mtp": Mtp, "early-exit": EarlyExit}
NAMES = ", ".join(map(repr, _BY_NAME))


def settle_draft(draft: Any) -> Drafter | None:
    """Who drafts, for what a user may write.

    Raises:
        InvalidRequest: it is nothing that can.
    """
    if draft is None or isinstance(draft, DraftModel | EarlyExit | Mtp):
        return draft
    if isinstance(draft, str) and draft in _BY_NAME:
        return _BY_NAME[draft]()
    if isinstance(draft, Proposer) and not isinstance(draft, type):
        return draft  # a module with the method, too
    if isinstance(draft, str | os.PathLike | nn.Module) and draft != "":
        return DraftModel(draft)
    raise InvalidRequest(
        f"draft={draft!r}: must be None, {NAMES}, a folder, a hub id, a module, or "
        "have a method propose(sequences, lengths)"
    )


def settle_draft_tokens(value: Any, draft: Any) -> int | None:
    """`num_draft_tokens`, checked.

    Raises:
        InvalidRequest: out of range, or there is nobody who drafts.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_FIXED:
        raise InvalidRequest(
            f"num_draft_tokens={value!r}: must be an integer, 0 to {MAX_FIXED}, or None"
        )
    if draft is None:
        raise InvalidRequest(f"num_draft_tokens={value}: there is no draft=... to make them")
    return value
