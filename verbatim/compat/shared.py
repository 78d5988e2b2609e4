"""Argument checks, the state of running rows and the base of model objects, shared by the adapters."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from torch import nn

from verbatim.api.llm import LLM
from verbatim.api.tensors import engine_of
from verbatim.core import Completion, FinishReason, Request
from verbatim.core import Sequence as Row
from verbatim.errors import EngineClosed, InvalidRequest, NotSupported, RequestFailed


def accepts(function: Any, *args: Any, unknown: bool = False, **kwargs: Any) -> bool:
    """Return whether a callable accepts these arguments; `unknown` if it has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return unknown
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def by_name(groups: dict[str, str]) -> dict[str, str]:
    """Invert `{reason: "name name ..."}` to `{name: reason}`."""
    return {name: reason for reason, names in groups.items() for name in names.split()}


def declared_pad_id(*sources: Any) -> int | None:
    """Return the first pad id of configs, tokenizers or models; None if no source has one."""
    ids = (getattr(source, "pad_token_id", None) for source in sources)
    return next((i for i in ids if isinstance(i, int) and i >= 0), None)


def flag(name: str, value: Any) -> bool:
    """Return a boolean option as a bool; raise InvalidRequest unless it is True, False, 1 or 0."""
    if not isinstance(value, int) or value not in (0, 1):
        raise InvalidRequest(f"{name}={value!r}: must be True or False")
    return bool(value)


def check_search(num_beams: int, do_sample: bool, temperature: Any) -> None:
    """Reject beam search with sampling, and sampling at temperature 0."""
    if num_beams > 1 and do_sample:
        raise NotSupported(
            f"num_beams={num_beams} with do_sample=True: beams search and do not sample; set do_sample=False"
        )
    if do_sample and temperature == 0:
        raise InvalidRequest(
            f"temperature={temperature!r}: must be above 0; the likeliest token is do_sample=False"
        )


def check_complete(row: int, output: Completion | Row) -> None:
    """Raise RequestFailed if the row was aborted, for example by closing a shared engine."""
    if output.finish_reason is FinishReason.ABORT:
        raise RequestFailed(f"row {row} was ended by close() or pause('abort')")


def new_rows(
    requests: Mapping[int, Request], stops: Mapping[int, int] = MappingProxyType({})
) -> tuple[list[list[int]], int]:
    """Return the new ids of each row so far, and the number of new columns that are final.

    Args:
        requests: by row number.
        stops: for rows that were aborted on purpose, the number of new ids to keep.

    Raises:
        RequestFailed: a row was aborted. The error of a failed request is raised as is.
    """
    rows, growing = [], []
    for number, request in requests.items():
        if request.error is not None:
            raise request.error
        row = request.sequences[0]
        if number not in stops:
            check_complete(number, row)
        rows.append(list(row.output_ids[: stops.get(number)]))
        growing += [] if request.finished or number in stops else [len(row.output_ids)]
    return rows, min(growing) if growing else max(map(len, rows), default=0)


class HasEngine:
    """Base of model objects that wrap an open `LLM`, or a live module with one cached engine."""

    _source: LLM | nn.Module
    _closed = False
    _finalizer: Any = None  # closes an engine that was opened here

    def _close_with(self, llm: LLM) -> None:
        """Close `llm` when this object is closed or garbage-collected."""
        self._finalizer = weakref.finalize(self, llm.close)

    @property
    def llm(self) -> LLM:
        """The engine, with all sampling options, streaming and scoring; raises EngineClosed after `close`."""
        if self._closed:
            raise EngineClosed(f"this {type(self).__name__} was closed")
        return engine_of(self._source)

    def close(self) -> None:
        """Close the engine if it was opened by this object; the caller's `LLM` or module stays open."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
