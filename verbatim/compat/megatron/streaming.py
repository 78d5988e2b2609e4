"""Delivery of partial results to streams."""

from __future__ import annotations

import threading

import torch

from verbatim.compat.megatron.params import SamplingParams
from verbatim.compat.megatron.request import InferenceRequest
from verbatim.compat.megatron.stream import AsyncStream
from verbatim.compat.megatron.tokenizer import Segments
from verbatim.compat.megatron.translation import Translation
from verbatim.core import Delta, Request
from verbatim.engine.handle import EngineHandle


class Feed:
    """Puts the partial results of one request into its stream.

    Text that may be part of a stop word or of an incomplete character is delayed.
    """

    def __init__(
        self,
        translation: Translation,
        request: InferenceRequest,
        admitted: Request,
        stream: AsyncStream,
        handle: EngineHandle,
    ) -> None:
        assert request.sampling_params is not None
        self._translation = translation
        self._request = request
        self._params = request.sampling_params
        self._admitted = admitted
        self._stream = stream
        self._handle = handle
        self.ended = threading.Event()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._text = ""
        self._segments = None
        if translation.text is not None and self._params.return_segments:
            self._segments = Segments(translation.text, admitted.prompt_ids)

    def take(self, delta: Delta) -> None:
        """Put the output of one step."""
        if self._stream.finished:  # the reader has left
            self._handle.abort(self._admitted)
            return
        last = delta.finish_reason is not None
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._text += delta.text
        if last and self._translation.tokenizer is not None:
            self._text = self._translation.with_end(self._params, self._ids, self._text)
        if self._segments is not None:
            self._segments.extend(delta.token_ids, last=last)
        shown = shows_text(self._params)
        self._stream.put(
            partial(
                self._request.request_id,
                self._request,
                self._ids,
                self._logprobs if self._params.return_log_probs else None,
                self._text if shown else "",
                list(self._segments.texts) if self._segments is not None and shown else None,
            )
        )
        if last:
            self._stream.finish()

    def end(self) -> None:
        """End the stream, with the request's error if there is one."""
        self.ended.set()  # first: an error of the stream must not block the batch
        self._stream.finish(self._admitted.error)


def shows_text(params: SamplingParams) -> bool:
    """Return whether the stream carries text."""
    return params.detokenize_generations and not params.no_detokenize_streaming_text


def put(
    translation: Translation,
    params: SamplingParams,
    request_id: int,
    request: InferenceRequest,
    stream: AsyncStream,
    prompt_ids: list[int],
    ids: list[int],
    logprobs: list[float] | None,
) -> None:
    """Put a partial result made from ids."""
    text, parts = "", None
    if shows_text(params) and translation.text is not None:
        text = translation.detokenize(ids)
        if params.return_segments:
            parts = Segments(translation.text, prompt_ids)
            parts.extend(ids, last=True)
    stream.put(
        partial(request_id, request, ids, logprobs, text, None if parts is None else parts.texts)
    )


def partial(
    request_id: int,
    request: InferenceRequest,
    ids: list[int],
    logprobs: list[float] | None,
    text: str,
    segments: list[str] | None,
) -> InferenceRequest:
    """Return a copy of the request with its output so far."""
    return InferenceRequest(
        request_id=request_id,
        prompt=request.prompt,
        sampling_params=request.sampling_params,
        prompt_tokens=request.prompt_tokens,
        prompt_length=request.prompt_length,
        arrival_time=request.arrival_time,
        status=request.status,
        generated_text=text,
        generated_segments=segments,
        generated_tokens=torch.tensor(ids, dtype=torch.int64),
        generated_log_probs=None if logprobs is None else list(logprobs),
        generated_length=len(ids),
    )
