"""Generation for a static batch, each request with its own params, and its streams."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from verbatim.compat.batches import draw_seed
from verbatim.compat.megatron.params import SamplingParams
from verbatim.compat.megatron.request import InferenceRequest, Status
from verbatim.compat.megatron.stream import AsyncStream
from verbatim.compat.megatron.tokenizer import Segments
from verbatim.compat.megatron.translation import Translation
from verbatim.core import Delta, FinishReason, Request
from verbatim.errors import InvalidRequest


def run_static_batch(
    translation: Translation,
    requests: dict[int, InferenceRequest],
    streams: Mapping[Any, AsyncStream],
) -> dict[int, InferenceRequest]:
    """Generate for all requests, fill in their outputs, and return `requests`.

    A failing request does not affect the others; the first error is raised when all
    have ended.
    """
    for name, given in (("active_requests", requests), ("active_streams", streams)):
        if not isinstance(given, Mapping):
            raise InvalidRequest(
                f"{name} is {type(given).__name__}; it must be a dict, by request id"
            )
    admitted: dict[int, Request] = {}
    errors: list[BaseException | None] = []
    begun = False
    try:
        by_id, seed = _by_request(streams, requests), draw_seed()
        for row, (number, request) in enumerate(requests.items()):
            admitted[number] = translation.admit(request, row, seed)
        for number, request in requests.items():
            translation.begin(request, admitted[number])
        begun = True
        _generate(translation, requests, admitted, by_id)
    except BaseException as reason:  # ends the whole batch: refused, or Ctrl-C
        errors.append(reason)
    if begun:
        errors += _fill_all(translation, requests, admitted, *errors)
    error = next((each for each in errors if each is not None), None)
    for stream in streams.values():  # unblock readers; finished streams are unchanged
        stream.finish(error)
    if error is None:
        return requests
    try:
        raise error
    finally:
        del error, errors  # else the error and this frame would hold each other


def _by_request(
    streams: Mapping[Any, AsyncStream], requests: Mapping[int, InferenceRequest]
) -> dict[int, AsyncStream]:
    """Return the streams by the keys of `requests`; a key may also be a request id as text."""
    texts = {str(number): number for number in requests}
    by_id: dict[int, AsyncStream] = {}
    for key, stream in streams.items():
        number = key if key in requests else texts.get(str(key))
        if number is None:
            raise InvalidRequest(f"active_streams has {key!r}, which is no active_request")
        if number in by_id:
            raise InvalidRequest(f"active_streams has two streams for request {number}")
        by_id[number] = stream
    return by_id


def _generate(
    translation: Translation,
    requests: Mapping[int, InferenceRequest],
    admitted: Mapping[int, Request],
    streams: Mapping[int, AsyncStream],
) -> None:
    """Run until all requests have ended; raise nothing for those that failed alone."""
    handle, rows = translation.llm.engine, list(admitted.values())
    feeds = {
        admitted[number].request_id: _StreamFeed(
            translation, requests[number], admitted[number], stream
        )
        for number, stream in streams.items()
    }

    def deliver(delta: Delta) -> None:
        if feed := feeds.get(delta.request_id):
            feed.take(delta)

    try:
        if feeds:
            handle.refuse_collective("active_streams")
            handle.run_here(rows, deliver)
        else:
            handle.run(rows)
    except Exception as error:
        if all(error is not request.error for request in rows):
            raise


def _fill_all(
    translation: Translation,
    requests: Mapping[int, InferenceRequest],
    admitted: Mapping[int, Request],
    batch_error: BaseException | None = None,
) -> list[BaseException | None]:
    """Fill in the outputs of finished requests, and the errors of the others; return these errors.

    Args:
        batch_error: the error that ended the whole batch, also for aborted requests.
    """
    for number, request in requests.items():
        result, error = admitted[number].result, admitted[number].error
        if error is None and batch_error is not None:
            aborted = result is None or result.outputs[0].finish_reason is FinishReason.ABORT
            error = batch_error if aborted else None
        if error is None:
            try:
                translation.fill(request, admitted[number])
            except Exception as reason:  # of the tokenizer
                error = reason
        if error is not None:
            request.status, request.error = Status.FAILED, error
    lengths = [request.generated_length or 0 for request in requests.values()]
    for request in requests.values():
        request.generated_sequence_lengths = torch.tensor(lengths, dtype=torch.int32)
    return [request.error for request in requests.values()]


class _StreamFeed:
    """Puts the partial results of one request into its stream, and ends the stream with it.

    Text that may be part of a stop word or of an incomplete character is delayed. An error here, such
    as one of the tokenizer, ends this request alone.
    """

    def __init__(
        self,
        translation: Translation,
        request: InferenceRequest,
        admitted: Request,
        stream: AsyncStream,
    ) -> None:
        assert request.sampling_params is not None
        self._translation, self._request, self._admitted = translation, request, admitted
        self._params, self._stream = request.sampling_params, stream
        self._text = ""
        self._segments = None
        if translation.text is not None and self._params.return_segments:
            self._segments = Segments(translation.text, admitted.prompt_ids)
        admitted.on_end = self._end

    def _end(self) -> None:
        """End the stream, unless the request was aborted: the end of the batch then has the reason."""
        result = self._admitted.result
        if result is None or result.outputs[0].finish_reason is not FinishReason.ABORT:
            self._stream.finish(self._admitted.error)

    def take(self, delta: Delta) -> None:
        """Put the output of one step; end the request if the reader has left."""
        if self._stream.finished:
            self._translation.llm.engine.abort(self._admitted)
            return
        try:
            self._put(delta)
        except Exception as error:
            self._stream.finish(error)
            raise

    def _put(self, delta: Delta) -> None:
        sequence, last = self._admitted.sequences[0], delta.finish_reason is not None
        ids, logprobs = sequence.output_ids, None
        if self._params.return_log_probs:
            logprobs = [token.logprob for token in sequence.tokens]
        self._text += delta.text
        if last and self._translation.tokenizer is not None:
            self._text = self._translation.with_end(self._params, ids, self._text)
        if self._segments is not None:
            self._segments.extend(delta.token_ids, last=last)
        put_partial(
            self._stream,
            self._request.request_id,
            self._request,
            self._params,
            ids,
            logprobs,
            self._text,
            None if self._segments is None else self._segments.texts,
        )


def put_partial(
    stream: AsyncStream,
    request_id: int,
    request: InferenceRequest,
    params: SamplingParams,
    ids: list[int],
    logprobs: list[float] | None,
    text: str,
    segments: list[str] | None,
) -> None:
    """Put a copy of the request with its output so far into its stream."""
    shows_text = params.detokenize_generations and not params.no_detokenize_streaming_text
    partial = copy.copy(request)
    partial.request_id, partial.generated_text = request_id, text if shows_text else ""
    partial.generated_segments = list(segments) if segments is not None and shows_text else None
    partial.generated_tokens = torch.tensor(ids, dtype=torch.int64)
    partial.generated_log_probs = None if logprobs is None else list(logprobs)
    partial.generated_length = len(ids)
    stream.put(partial)
