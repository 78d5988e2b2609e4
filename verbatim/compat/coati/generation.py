"""`generate` and `generate_streaming`, with Coati's signatures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from verbatim.checks import integer, optional_integer
from verbatim.compat.batches import PaddedRows, check_search, flag, new_rows
from verbatim.core import Request
from verbatim.engine.handle import EngineHandle
from verbatim.engine.lockstep import run_together
from verbatim.errors import InvalidRequest, NotSupported, PromptTooLong, UnsupportedModel
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.tensors import draw_seed, engine_of, has_known_layers, open_forward

Hooks = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
_LARGEST_ID = 2**63 - 1  # of int64
_OF_A_CACHE = ("use_cache", "cache_position")


def generate(
    model: Any,
    input_ids: Tensor,
    tokenizer: Any,
    max_length: int,
    num_beams: int = 1,
    do_sample: bool = True,
    early_stopping: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float | None = None,
    prepare_inputs_fn: Callable[..., dict[str, Any]] | None = None,
    update_model_kwargs_fn: Callable[..., dict[str, Any]] | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Continue each row of `input_ids`.

    Args:
        model: an open `LLM`; a live transformers module, also inside of PEFT or DistributedDataParallel; a
            module called as `model(tokens, kv_caches=...)`; or anything that is called as
            `model(input_ids=..., attention_mask=...)` and returns an object or a dict with `logits`
            `[B, T, V]`.
        input_ids: `[B, P]` integers, padded on the left.
        tokenizer: its `padding_side` must be "left"; its `eos_token_id` ends a row, its `pad_token_id` is
            masked in front of a row and fills it after its end.
        max_length: columns of the result at most, prompt included. One above the model's limit is clamped,
            with a warning.
        num_beams: above 1, return the best beam of each row; needs `do_sample=False`.
        do_sample: False takes the likeliest token.
        early_stopping: False fills all rows up to the full length; True ends with the last row.
        top_k, top_p, temperature: None is off, and so is `top_k=-1`.
        prepare_inputs_fn: `f(input_ids, past=past, **model_kwargs)` returns the inputs of each forward.
        update_model_kwargs_fn: `f(outputs, model_kwargs)` returns the `model_kwargs` of the next step.
        model_kwargs: `max_new_tokens`; `stop_token_ids`: sequences of ids that end a row, `[[20, 21], [10]]`,
            or a single one, `[20, 21]` or `20`; `attention_mask` `[B, P]`, without which leading pads are
            masked; `seed`: without one, a number is drawn from torch's default generator; `pad_token_id`;
            `stream_interval`, which is for `generate_streaming`; `process_group`, of torch.distributed,
            for a model that communicates between ranks: all then run equally many forwards;
            `use_cache` and `cache_position`, for hooks, and `apply_loss_mask`, which is ignored: they
            change no token. Others are the model's own, for hooks and actors.

    Returns:
        `[B, P + N]` int64 on the device of `input_ids`, an ordinary tensor.

    Raises:
        InvalidRequest, NotSupported, PromptTooLong, UnsupportedModel: before any token is generated.
        RequestFailed: no token can be drawn for a row.

    Exceptions of the model and of hooks are passed on.
    """
    group = model_kwargs.pop("process_group", None)
    sampling = num_beams, do_sample, top_k, top_p, temperature
    hooks = prepare_inputs_fn, update_model_kwargs_fn
    rows = input_ids, tokenizer, max_length, early_stopping
    calls: list[_Call] = []

    def begin() -> tuple[EngineHandle, list[Request]]:
        calls.append(_Call(model, rows, sampling, hooks, model_kwargs))
        return calls[0].llm.engine, calls[0].requests

    try:
        run_together(begin, group)
        return calls[0].output(*calls[0].progress())
    finally:
        for call in calls:
            call.close()


def generate_streaming(
    model: Any,
    input_ids: Tensor,
    tokenizer: Any,
    max_length: int,
    num_beams: int = 1,
    do_sample: bool = True,
    early_stopping: bool = False,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float | None = None,
    prepare_inputs_fn: Callable[..., dict[str, Any]] | None = None,
    update_model_kwargs_fn: Callable[..., dict[str, Any]] | None = None,
    **model_kwargs: Any,
) -> Generator[Tensor, None, None]:
    """Stream `generate`: yield the whole tensor, prompt included, at 1, 1 + k, 1 + 2k, ... new tokens.

    k is `stream_interval`, 2 by default; the last tensor is complete, whatever its length. Arguments are
    checked when this is called; the first forward runs when the first tensor is requested. Leaving early,
    or closing the generator, ends the rows.

    Raises:
        NotSupported: `num_beams` above 1, as the best beam is only known at the end.
    """
    if model_kwargs.pop("process_group", None) is not None:
        raise NotSupported(
            "process_group in a stream: its reader decides when the next forward is made, and ranks must "
            "make theirs together; use generate"
        )
    sampling = num_beams, do_sample, top_k, top_p, temperature
    if _sampling(*sampling)["num_beams"] > 1:
        raise NotSupported(
            f"num_beams={num_beams} in a stream: which beam is the best is known in the end alone; use "
            "generate"
        )
    hooks = prepare_inputs_fn, update_model_kwargs_fn
    rows = input_ids, tokenizer, max_length, early_stopping
    return _Call(model, rows, sampling, hooks, model_kwargs).stream()


def _by_ids(call: Callable[..., Any], early_stopping: bool) -> Callable[..., Any]:
    """Return `call` with the ids that end and fill rows in place of a tokenizer, and sampling only."""

    def sample(
        model: Any,
        input_ids: Tensor,
        max_length: int,
        early_stopping: bool = early_stopping,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        stop_token_ids: Any = None,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float | None = None,
        **kwargs: Any,
    ) -> Any:
        ends = SimpleNamespace(
            padding_side="left", eos_token_id=eos_token_id, pad_token_id=pad_token_id
        )
        kwargs |= {"top_k": top_k, "top_p": top_p, "temperature": temperature}
        kwargs |= {"early_stopping": early_stopping, "stop_token_ids": stop_token_ids}
        return call(model, input_ids, ends, max_length, **kwargs)

    return sample


_sample = _by_ids(generate, early_stopping=True)
_sample_streaming = _by_ids(generate_streaming, early_stopping=False)


class _Call:
    """One call, with all arguments checked and its rows admitted; `stream` it, or run its requests. Close it.

    Args:
        rows: the ids, the tokenizer, the maximum length and whether to stop early.
        options: number of beams, whether to sample, top-k, top-p and temperature.
        functions: the two hooks.
        kwargs: the call's `model_kwargs`.
    """

    def __init__(
        self,
        model: Any,
        rows: tuple[Any, ...],
        options: tuple[Any, ...],
        functions: tuple[Any, Any],
        kwargs: dict[str, Any],
    ) -> None:
        input_ids, tokenizer, max_length, early_stopping = rows
        hooks, self._kwargs = _hooks(*functions), kwargs
        side = getattr(tokenizer, "padding_side", None)
        if side != "left":
            raise InvalidRequest(
                f"tokenizer.padding_side is {side!r}: must be 'left', or prompts do not end where "
                "generation begins"
            )
        self._fills_up = not flag("early_stopping", early_stopping)
        for name in ("use_cache", "apply_loss_mask"):
            if not isinstance(kwargs.get(name), bool | None):
                raise InvalidRequest(f"{name}={kwargs[name]!r}: must be True, False or None")
        kwargs.pop("apply_loss_mask", None)  # Coati's trainer passes it on to every call
        params = SamplingParams(
            seed=kwargs.pop("seed", None),
            stop_token_ids=_stops(kwargs.pop("stop_token_ids", None)),
            ignore_eos=True,  # only the tokenizer's counts, as a stop id
            **_sampling(*options),
        )
        eos_id, pad_id, own_pad = (
            optional_integer(name, value, 0, _LARGEST_ID)
            for name, value in (
                ("tokenizer.eos_token_id", getattr(tokenizer, "eos_token_id", None)),
                ("tokenizer.pad_token_id", getattr(tokenizer, "pad_token_id", None)),
                ("pad_token_id", kwargs.pop("pad_token_id", None)),
            )
        )
        pad_id = pad_id if own_pad is None else own_pad
        self._before = PaddedRows.of(input_ids, kwargs.pop("attention_mask", None), pad_id)
        self._device, self._prompts = input_ids.device, self._before.rows()
        self._beams = params.num_beams
        self._num_new = _new_tokens(
            input_ids.shape[1], max_length, kwargs.pop("max_new_tokens", None)
        )
        interval = optional_integer("stream_interval", kwargs.pop("stream_interval", None), 1)
        self._interval = 2 if interval is None else interval
        self._pad: int | None = eos_id if pad_id is None else pad_id
        self.requests: list[Request] = []
        self._opened: LLM | None = None  # for this call alone
        try:
            self.llm = self._engine_for(model, hooks)
            self._keep_within_limit(columns=hooks is not None)
            if self._pad is None:
                self._pad = self.llm.pad_token_id
            if self._num_new:
                if eos_id is not None and eos_id < self.llm.engine.admission.vocab_size:
                    params = params.replace(stop_token_ids=(eos_id, *params.stop_token_ids))
                if params.seed is None and params.temperature > 0:
                    params = params.replace(seed=draw_seed())
                params = params.replace(max_tokens=self._num_new)
                self.requests = self.llm._admit_rows(self._prompts, params)
        except BaseException:
            self.close()
            raise

    def progress(self) -> tuple[list[list[int]], int]:
        """Return the new ids of each row, and the number of columns that are final."""
        rows, ready = new_rows(self.requests)
        if self._fills_up and all(request.finished for request in self.requests):
            ready = self._num_new
        return rows, ready

    def output(self, rows: list[list[int]], width: int) -> Tensor:
        """Return the prompts with `width` more columns."""
        assert self._pad is not None
        return self._before.joined(rows, self._pad, width).to(self._device)

    def stream(self) -> Generator[Tensor, None, None]:
        """Yield the whole tensor each time it has grown by the stream interval."""
        sent = 1 - self._interval
        with closing(self), closing(self.llm.engine.steps(self.requests)) as steps:
            for _ in steps:
                rows, ready = self.progress()
                for width in range(sent + self._interval, ready + 1, self._interval):
                    yield self.output(rows, width)
                    sent = width
            if sent < max(ready, 1):  # the end between two intervals, or no new token at all
                yield self.output(rows, ready)

    def close(self) -> None:
        """Close the engine if it was opened for this call."""
        if self._opened is not None:
            self._opened.close()

    # ---- the engine

    def _engine_for(self, model: Any, hooks: Hooks | None) -> LLM:
        if hooks is not None and self._beams > 1:
            raise NotSupported(
                f"num_beams={self._beams} with prepare_inputs_fn or update_model_kwargs_fn: hooks keep one "
                "cache for rows that stay what they are, and beams change places"
            )
        if isinstance(model, LLM):
            if hooks is not None:
                raise NotSupported(
                    "prepare_inputs_fn and update_model_kwargs_fn are for a module that is called with "
                    "what they make; an open LLM makes its own inputs"
                )
            self._refuse_kwargs("an open LLM")
            return model
        if hooks is None and has_known_layers(model):
            self._refuse_kwargs(type(model).__name__)
            try:
                return engine_of(model)
            except UnsupportedModel as why:
                try:
                    return self._open_engine(model, None)
                except UnsupportedModel:
                    raise why from None
        return self._open_engine(model, hooks)

    def _refuse_kwargs(self, name: str) -> None:
        for kwarg in self._constants:
            raise InvalidRequest(
                f"{kwarg} is not known: {name} is run on the engine's own inputs. Arguments for the model "
                "go through a prepare_inputs_fn, or to an actor whose forward takes them"
            )

    @property
    def _constants(self) -> dict[str, Any]:
        """The kwargs for a model without hooks, whose cache is not the caller's."""
        return {name: value for name, value in self._kwargs.items() if name not in _OF_A_CACHE}

    def _open_engine(self, model: Any, hooks: Hooks | None) -> LLM:
        """Open an engine over the model's own forward, sized for the full length of all rows."""
        self._opened = open_forward(
            model,
            max_length=max(1, self._before.width + self._num_new),
            max_sequences=max(1, len(self._prompts) * self._beams),
            arguments=self._constants if hooks is None else self._kwargs,
            hooks=hooks,
            batch=(self._before.ids, self._before.mask.long()),
            pad_token_id=self._pad,
        )
        return self._opened

    def _keep_within_limit(self, columns: bool) -> None:
        """Keep rows within the model's limit, with a warning; a longer prompt is refused later.

        Args:
            columns: the model gets padded rows, whose pads count.
        """
        longest = self._before.width if columns else max(map(len, self._prompts), default=0)
        llm = self.llm
        room = llm.max_length - longest
        if 0 <= room < self._num_new:
            warnings.warn(
                f"max_length leaves {self._num_new} new tokens after a prompt of {longest}, "
                f"{self._num_new + longest} together; the model's limit is {llm.max_length} "
                f"({llm.engine.admission.limit_source}), so at most {room} are generated",
                stacklevel=2,
            )
            self._num_new = room


def _hooks(prepare: Any, update: Any) -> Hooks | None:
    for name, hook in (("prepare_inputs_fn", prepare), ("update_model_kwargs_fn", update)):
        if hook is not None and not callable(hook):
            raise InvalidRequest(f"{name}={hook!r}: must be a function or None")
    return None if prepare is None and update is None else (prepare, update)


def _sampling(
    num_beams: Any, do_sample: Any, top_k: Any, top_p: Any, temperature: Any
) -> dict[str, Any]:
    """Return the sampling fields of `SamplingParams`, checked; None disables a filter."""
    samples, beams = flag("do_sample", do_sample), integer("num_beams", num_beams, 1)
    check_search(beams, samples, 1.0)
    fields: dict[str, Any] = {
        "num_beams": beams,
        "top_k": 0 if top_k is None or (isinstance(top_k, int) and top_k == -1) else top_k,
        "top_p": 1.0 if top_p is None else top_p,
        "temperature": 1.0 if temperature is None else temperature,
    }
    check_search(1, True, SamplingParams(**fields).temperature)
    if not samples and beams == 1:
        fields["temperature"] = 0.0  # the likeliest token is in every filter
    return fields


def _new_tokens(prompt_width: int, max_length: Any, max_new_tokens: Any) -> int:
    length = integer("max_length", max_length, 0)
    if prompt_width > length:
        raise PromptTooLong(f"input_ids is {prompt_width} tokens wide, and max_length={length}")
    new = optional_integer("max_new_tokens", max_new_tokens, 0)
    return length - prompt_width if new is None else min(new, length - prompt_width)


def _stops(value: Any) -> list[Any]:
    """Return sequences of ids: [[20, 21], [10]] are two, [20, 21] is one, and so is 20."""
    if value is None:
        return []
    value = value.tolist() if hasattr(value, "tolist") else value
    many = list(value) if isinstance(value, list | tuple) else [value]
    nested = [hasattr(entry, "__len__") for entry in many]
    if any(nested) and not all(nested):
        raise InvalidRequest(
            f"stop_token_ids={value!r}: must be sequences of ids ([[20, 21], [10]]), or a single one "
            "([20, 21]), but not both"
        )
    return many if any(nested) or not many else [many]
