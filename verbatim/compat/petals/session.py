"""`InferenceSession`: rows with K and V that persist between calls of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor

from verbatim.api.llm import LLM
from verbatim.api.padded import PaddedRows
from verbatim.api.session import CacheHolder
from verbatim.api.tensors import draw_seed
from verbatim.common.checks import integer
from verbatim.compat.petals.call import GenerateCall
from verbatim.compat.petals.settings import Settings
from verbatim.core import SessionCache
from verbatim.errors import InvalidRequest, NotSupported, PromptTooLong
from verbatim.params import SamplingParams
from verbatim.placement.actor import run_layers

Entered = tuple[LLM, "InferenceSession | None"]

# The sessions of the `with` blocks of this thread or task, for all models, outermost first.
_entered: ContextVar[tuple[Entered, ...]] = ContextVar("entered", default=())


class InferenceSession(CacheHolder):
    """Rows that grow over several calls; opened by `model.inference_session`, preferably in a `with` block.

    The first call sets the number of rows. All draws use one seed, row b with sample index b. A
    failing call of `generate` leaves the session unchanged.
    """

    def __init__(self, llm: LLM, *, max_length: int, seed: int | None = None) -> None:
        if llm.engine.collective is not None:
            raise NotSupported(
                "a session: not supported when the user starts the ranks, because their calls are "
                "collective"
            )
        length = integer("max_length", max_length, 1)
        if length > llm.max_length:
            raise InvalidRequest(
                f"max_length={length}: at most {llm.max_length} ({llm.engine.admission.limit_source})"
            )
        super().__init__(llm.engine)
        self._llm, self._max_length = llm, length
        self.seed = seed
        self._columns: PaddedRows | None = None
        # For a session that runs hidden states: transformers' cache, and its numbers of columns and rows.
        self._hidden: Any = None
        self._num_hidden = self._hidden_rows = 0
        self._block = ExitStack()

    @property
    def seed(self) -> int | None:
        """The seed of all draws; None until the first call, which draws one from torch's generator."""
        return self._seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._seed = SamplingParams(seed=seed).seed  # validates it

    @property
    def output_ids(self) -> Tensor | None:
        """A copy of all columns so far, pads included: `[B, L]` int64; None before the first call."""
        return None if self._columns is None else self._columns.ids.clone()

    @property
    def position(self) -> int:
        """Number of columns so far. Setting it rolls back: later columns are dropped."""
        return self._num_hidden if self._columns is None else self._columns.width

    @position.setter
    def position(self, value: int) -> None:
        with self._claim():
            position = integer("position", value, 0)
            if position > self.position:
                raise InvalidRequest(
                    f"position={position}: must be from 0 to {self.position}, the tokens so far"
                )
            if not position:
                self._reset()
            elif self._columns is not None:
                self._columns = self._columns.first(position)
            else:
                self._crop_hidden(position)

    @property
    def max_length(self) -> int:
        """Maximum number of columns."""
        return self._max_length

    @property
    def last_token_id(self) -> Tensor | None:
        """The last column, `[B, 1]`; None if there is none."""
        return self.output_ids[:, -1:] if self.position and self.output_ids is not None else None

    def step(self, inputs: Tensor, prompts: None = None, hypo_ids: None = None) -> Tensor:
        """Run hidden states `[B, T, H]` through all layers, at the positions after those of earlier steps.

        This uses transformers' own code without gradients; such a session can't generate. T may be 0. An
        error in a layer leaves the session unchanged or, if its cache can't be cropped (recurrent states,
        full windows), closes it.

        Raises:
            NotSupported: this process does not have the whole unquantized module; `prompts` or `hypo_ids`.
            PromptTooLong: more columns than `max_length`.
            InvalidRequest: no hidden states, another number of rows than before, or a session with ids.
        """
        for name, value in (("prompts", prompts), ("hypo_ids", hypo_ids)):
            if value is not None:
                raise NotSupported(f"{name}: a step takes only hidden states")
        with self._claim():
            if self._columns is not None:
                raise InvalidRequest(
                    "InferenceSession.step: this session holds token ids; open another one"
                )
            self._check_hidden(inputs)
            width = self._num_hidden + inputs.shape[1]
            if width > self._max_length:
                raise PromptTooLong(
                    f"{width} columns; the session's max_length is {self._max_length}"
                )
            if not inputs.shape[1]:
                return inputs
            outputs: Tensor
            try:
                with torch.no_grad():
                    outputs, cache = self._llm.engine.call_module(run_layers, inputs, self._hidden)
            except BaseException:
                try:
                    self._crop_hidden(self._num_hidden)
                except NotSupported:
                    self.close()
                raise
            self._hidden, self._num_hidden, self._hidden_rows = cache, width, len(inputs)
        return outputs

    def _crop_hidden(self, num_columns: int) -> None:
        """Crop the cache to `num_columns`; raise NotSupported if a layer's cache can't be cropped."""
        layers = [] if self._hidden is None else getattr(self._hidden, "layers", [self._hidden])
        for layer in layers:
            if not getattr(layer, "is_croppable", False) or (
                layer.is_sliding and layer.get_seq_length() >= layer.sliding_window
            ):
                raise NotSupported(
                    f"position={num_columns}: a {type(layer).__name__} can't be shortened; open another "
                    "session"
                )
        for layer in layers:
            layer.crop(num_columns - layer.get_seq_length())
        self._num_hidden = num_columns

    def _check_hidden(self, inputs: Any) -> None:
        good = isinstance(inputs, Tensor) and inputs.dim() == 3 and inputs.is_floating_point()
        if not good:
            shown = list(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise InvalidRequest(f"inputs={shown}: must be hidden states [B, T, H]")
        if self._num_hidden and len(inputs) != self._hidden_rows:
            raise InvalidRequest(
                f"inputs has {len(inputs)} rows, but the session has {self._hidden_rows}"
            )

    def close(self) -> None:
        """Free K and V; a call in progress fails."""
        super().close()
        self._hidden = None

    def __enter__(self) -> Self:
        self._check_open()
        self._block.enter_context(entered(self._llm, self))
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()
        self.close()

    # ---- a call

    def _generate(
        self,
        begin: Callable[..., GenerateCall],
        settings: Settings,
        new_columns: PaddedRows | None,
        seed: int | None,
    ) -> Any:
        """Run the call that `begin` builds on the session's columns and `new_columns`, None to continue."""
        with self._claim():
            self._check_turn(new_columns, settings.num_copies)
            seed = self._resolve_seed(seed)
            columns, past_width = self._columns or new_columns, self.position
            assert columns is not None
            if self._columns is not None and new_columns is not None:
                columns = self._columns.followed_by(new_columns)
            width = columns.width
            length = width + settings.new_tokens(width)
            if length > self._max_length:
                raise PromptTooLong(
                    f"{past_width} tokens of the session, {width - past_width} given and "
                    f"{length - width} new ones make {length}; the session's max_length is "
                    f"{self._max_length}"
                )
            if not self._caches and new_columns is not None:
                self._caches += [SessionCache(self._max_length) for _ in new_columns.ids]
            try:
                call = begin(columns, past_width=past_width, seed=seed, session_caches=self._caches)
                with self._running(list(call.requests.values())):
                    for cache in self._caches:
                        list(self._handle.sessions.acquire(cache, 0.0))
                    output = call.run()
            except BaseException:
                if self._columns is None:
                    self._reset()
                raise
            self._columns, self.seed = call.columns, seed
        return output

    def _reset(self) -> None:
        """Drop all columns and caches; keep the seed."""
        for cache in self._caches:
            self._handle.sessions.close_session(cache)
        self._caches.clear()
        self._columns = self._hidden = None
        self._num_hidden = 0

    def _check_turn(self, new_columns: PaddedRows | None, copies: int) -> None:
        if copies != 1:
            raise NotSupported(
                f"num_return_sequences={copies} in a session: a session row has a single "
                "continuation; call generate without a session, or repeat the row"
            )
        if self._num_hidden:
            raise InvalidRequest("this session passes hidden states; open another one to generate")
        if self._columns is None or new_columns is None:
            return
        if new_columns.num_rows != self._columns.num_rows:
            raise InvalidRequest(
                f"inputs has {new_columns.num_rows} rows, but the session has {self._columns.num_rows}"
            )

    def _resolve_seed(self, seed: int | None) -> int:
        if self.seed is None:
            return draw_seed() if seed is None else seed
        if seed not in (None, self.seed):
            raise InvalidRequest(
                f"seed={seed}: this session's is {self.seed}; leave it None, or open another one"
            )
        return self.seed


def active_session(llm: LLM) -> InferenceSession | None:
    """Return the model's session of the innermost enclosing `with` block; None outside of one."""
    return next((session for entered, session in reversed(_entered.get()) if entered is llm), None)


@contextmanager
def entered(llm: LLM, session: InferenceSession | None) -> Iterator[InferenceSession | None]:
    """Make a session, or None, the model's active one in the block, which may end in another thread."""
    block = llm, session
    _entered.set((*_entered.get(), block))
    try:
        yield session
    finally:
        _entered.set(tuple(other for other in _entered.get() if other is not block))
