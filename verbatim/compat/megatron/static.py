"""Generation for a static batch of requests, each with its own params, and their `AsyncStream`s."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from verbatim.api.tensors import draw_seed
from verbatim.compat.megatron.request import InferenceRequest, SamplingParams
from verbatim.compat.megatron.translation import Translation
from verbatim.compat.shared import accepts
from verbatim.core import Delta, FinishReason, Request
from verbatim.errors import InvalidRequest, as_exception


class AsyncStream:
    """A queue of partial results; `put` and `finish` may be called from any thread.

    Args:
        request_id: id of the streamed request.
        cancel: called if the stream is closed before its end; receives the request's id if it accepts one.
        loop: the event loop of the reader; None allows any.

    Attributes:
        finished: True once `finish` was called or the stream was closed.
    """

    def __init__(
        self,
        request_id: int | str,
        cancel: Callable[..., Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.request_id, self._cancel, self._loop = request_id, cancel, loop
        self._items: deque[InferenceRequest | BaseException | Callable[[], InferenceRequest]]
        self._items = deque()
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.finished = False

    def put(self, item: InferenceRequest | Exception | Callable[[], InferenceRequest]) -> None:
        """Add a partial result, a function that returns it when it is read, or an exception for the reader.

        Ignored after `finish`.
        """
        if not self.finished:
            self._items.append(item)
            self._wake_reader()

    def finish(self, exception: Any = None) -> None:
        """End the stream; the reader receives the remaining items, then the exception if there is one.

        Args:
            exception: an exception or exception class; any other object ends the stream without an error.
                A KeyboardInterrupt, or other non-`Exception`, reaches the reader as `RequestFailed`.
        """
        if self.finished:
            return
        if isinstance(exception, type) and issubclass(exception, BaseException):
            exception = exception()
        if isinstance(exception, BaseException):
            # A KeyboardInterrupt raised in a reader would end the reader's event loop.
            self._items.append(as_exception(exception))
        self.finished = True
        self._wake_reader()

    async def __anext__(self) -> InferenceRequest:
        """Return the next item. A reader that calls this directly must call `aclose` to stop early.

        Raises:
            InvalidRequest: called in another event loop than `loop`.
        """
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidRequest(
                f"the stream of request {self.request_id} was made for another event loop"
            )
        while True:
            arrival = asyncio.Event()
            self._waiting = loop, arrival
            # Read before the queue: once it is set, nothing is added.
            finished = self.finished
            if self._items:
                item = self._items.popleft()
                if isinstance(item, BaseException):
                    raise item
                return item() if callable(item) else item
            if finished:
                raise StopAsyncIteration
            try:
                await arrival.wait()
            except asyncio.CancelledError:
                self._leave()
                raise

    async def aclose(self) -> None:
        """Stop reading: end the stream, and cancel its request unless it has ended."""
        self._leave()
        self._items.clear()
        self._wake_reader()

    def __aiter__(self) -> AsyncGenerator[InferenceRequest, None]:
        return self.generator()

    async def generator(self) -> AsyncGenerator[InferenceRequest, None]:
        """Yield the results as they arrive. Leaving early cancels the request."""
        with suppress(StopAsyncIteration):
            try:
                while True:
                    yield await anext(self)
            except GeneratorExit:
                self._leave()
                raise

    def _wake_reader(self) -> None:
        if (waiting := self._waiting) is not None:
            loop, arrival = waiting
            with suppress(RuntimeError):  # the loop is closed, so no reader waits
                loop.call_soon_threadsafe(arrival.set)

    def _leave(self) -> None:
        """End the stream, and cancel its request unless it has ended."""
        if not self.finished:
            self.finished = True
            arguments = [self.request_id] if accepts(self._cancel, self.request_id) else []
            self._cancel(*arguments)


def run_static_batch(
    translation: Translation,
    requests: dict[int, InferenceRequest],
    streams: Mapping[Any, AsyncStream],
) -> dict[int, InferenceRequest]:
    """Generate for all requests, fill in their outputs, and return `requests`.

    A failing request does not affect the others; the first error is raised when all have ended.
    """
    _check_mapping("active_streams", streams)
    error: BaseException | None = None
    try:
        _check_mapping("active_requests", requests)
        by_id = _by_request(streams, requests)
        handle, seed = translation.llm.engine, draw_seed()
        rows = [translation.admit(each, row, seed) for row, each in enumerate(requests.values())]
        for (number, request), admitted in zip(requests.items(), rows, strict=True):
            translation.begin(request, admitted)
            if number in by_id:
                _feed(by_id[number], translation, request, admitted)
        try:
            if streams:
                handle.refuse_collective("active_streams")
            handle.run(rows)
        except BaseException as reason:  # of one request, or of the whole batch, for example Ctrl-C
            error = None if any(reason is each.error for each in rows) else reason
        for request, admitted in zip(requests.values(), rows, strict=True):
            translation.settle(request, admitted, reason=error)
        lengths = [request.generated_length or 0 for request in requests.values()]
        for request in requests.values():
            request.generated_sequence_lengths = torch.tensor(lengths, dtype=torch.int32)
        error = next(filter(None, [error, *(each.error for each in requests.values())]), None)
        if error is not None:
            raise error
    except BaseException as reason:
        error = reason
        raise
    finally:
        for stream in streams.values():  # unblock readers; finished streams are unchanged
            stream.finish(error)
        del error  # it would form a reference cycle with this frame
    return requests


def _check_mapping(name: str, argument: Any) -> None:
    if not isinstance(argument, Mapping):
        raise InvalidRequest(
            f"{name} is {type(argument).__name__}; it must be a dict, by request id"
        )


def _by_request(
    streams: Mapping[Any, AsyncStream], requests: Mapping[int, InferenceRequest]
) -> dict[int, AsyncStream]:
    """Return the streams by the keys of `requests`; a stream's key may also be the id as text."""
    numbers = {str(number): number for number in requests}
    by_id: dict[int, AsyncStream] = {}
    for key, stream in streams.items():
        if (number := numbers.get(str(key))) is None:
            raise InvalidRequest(f"active_streams has {key!r}, which is not in active_requests")
        if number in by_id:
            raise InvalidRequest(f"active_streams has two streams for request {number}")
        by_id[number] = stream
    return by_id


def _feed(
    stream: AsyncStream, translation: Translation, request: InferenceRequest, admitted: Request
) -> None:
    """Send a request's partial results to its stream, which ends with the request.

    Text that may be part of a stop word or of an incomplete character is delayed. An error here, such
    as the tokenizer's, ends only this request.
    """
    params = request.sampling_params
    assert params is not None
    ids, logprobs, segments, text = list[int](), list[float](), list[str](), ""
    segmenter = translation.segmenter(admitted.prompt_ids) if params.return_segments else None

    def deliver(delta: Delta) -> None:
        nonlocal text
        if stream.finished:  # its reader has closed it
            translation.llm.engine.abort(admitted)
            return
        last = delta.finish_reason is not None
        ids.extend(delta.token_ids)
        logprobs.extend(delta.logprobs)
        text += delta.text
        if last:
            text = translation.with_end(params, ids, text)
        if segmenter is not None:
            segments.extend(map(segmenter.push, delta.token_ids))
            if last and segments:
                segments[-1] += segmenter.flush()
        # Its output is copied when it is read, so that an unread stream takes linear memory.
        stream.put(partial(output_at, copy.copy(request), len(ids), len(text)))

    def output_at(result: InferenceRequest, num_ids: int, num_chars: int) -> InferenceRequest:
        shown_logprobs = logprobs[:num_ids] if params.return_log_probs else None
        shown_segments = None if segmenter is None else segments[:num_ids]
        shown = ids[:num_ids], shown_logprobs, text[:num_chars], shown_segments
        return fill_partial(result, params, *shown)

    def end() -> None:  # an aborted request's stream is ended by the batch, with the reason
        result = admitted.result
        if result is None or result.outputs[0].finish_reason is not FinishReason.ABORT:
            stream.finish(admitted.error)

    admitted.deliver, admitted.on_end = deliver, end


def fill_partial(
    result: InferenceRequest,
    params: SamplingParams,
    ids: list[int],
    logprobs: list[float] | None,
    text: str,
    segments: list[str] | None,
) -> InferenceRequest:
    """Set the output so far on `result`, a copy of its request, and return it."""
    shows_text = params.detokenize_generations and not params.no_detokenize_streaming_text
    result.generated_text = text if shows_text else ""
    result.generated_segments = segments if shows_text else None
    result.generated_tokens = torch.tensor(ids, dtype=torch.int64)
    result.generated_log_probs = logprobs
    result.generated_length = len(ids)
    return result
