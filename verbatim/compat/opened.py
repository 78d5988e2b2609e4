"""A model object of an adapter, and the engine behind it."""

from __future__ import annotations

import weakref
from typing import Any, Self

from torch import nn

from verbatim.errors import EngineClosed
from verbatim.llm import LLM
from verbatim.tensors import engine_of


class Opened:
    """An open `LLM`, or a live module, for which one engine is kept."""

    _source: LLM | nn.Module
    _closed = False
    _end: Any = None  # closes an engine that was opened here

    def _close_with(self, llm: LLM) -> None:
        """Close `llm` together with this object, also when it is collected."""
        self._end = weakref.finalize(self, llm.close)

    @property
    def llm(self) -> LLM:
        """The engine, with every sampling option, streams and scores.

        Raises:
            EngineClosed: after `close`.
        """
        if self._closed:
            raise EngineClosed(f"this {type(self).__name__} was closed")
        return engine_of(self._source)

    def close(self) -> None:
        """Close the engine if it was opened here; leave a given `LLM` or module open."""
        self._closed = True
        if self._end is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
