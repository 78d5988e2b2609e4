"""Generation for a static batch, each request with its own params."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from verbatim.compat.megatron.request import InferenceRequest, Status
from verbatim.compat.megatron.sampling import draw_seed
from verbatim.compat.megatron.stream import AsyncStream
from verbatim.compat.megatron.streaming import Feed
from verbatim.compat.megatron.translation import Translation
from verbatim.core import FinishReason, Request
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
    try:
        return _run(translation, requests, _by_request(streams, requests))
    except BaseException as error:
        for stream in streams.values():  # unblock readers; finished streams are unchanged
            stream.finish(error)
        raise


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


def _run(
    translation: Translation,
    requests: dict[int, InferenceRequest],
    streams: Mapping[int, AsyncStream],
) -> dict[int, InferenceRequest]:
    seed = draw_seed()
    admitted = {
        number: translation.admit(request, row, seed)
        for row, (number, request) in enumerate(requests.items())
    }
    for number, request in requests.items():
        translation.begin(request, admitted[number])
    try:
        _generate(translation, requests, admitted, streams)
    except BaseException as error:  # ends the whole batch: refused, or Ctrl-C
        _fill_all(translation, requests, admitted, error)
        raise
    _fill_all(translation, requests, admitted, None)
    for each in admitted.values():
        if each.error is not None:
            raise each.error
    return requests


def _generate(
    translation: Translation,
    requests: Mapping[int, InferenceRequest],
    admitted: Mapping[int, Request],
    streams: Mapping[int, AsyncStream],
) -> None:
    """Run until all requests have ended.

    Streamed requests are stepped by the engine's thread, which calls their `Feed`s.
    """
    handle = translation.llm.engine
    plain = [request for number, request in admitted.items() if number not in streams]
    feeds: list[Feed] = []
    try:
        for number, stream in streams.items():
            feed = Feed(translation, requests[number], admitted[number], stream, handle)
            handle.submit(admitted[number], feed.take, feed.end, driven=True)
            feeds.append(feed)
        try:
            handle.run(plain)
        except Exception:
            if not plain or not all(request.finished for request in plain):
                raise  # they were not admitted
        for feed in feeds:
            feed.ended.wait()
    finally:
        for number in streams:
            handle.abort(admitted[number])


def _fill_all(
    translation: Translation,
    requests: Mapping[int, InferenceRequest],
    admitted: Mapping[int, Request],
    batch_error: BaseException | None,
) -> None:
    """Fill in the outputs of finished requests, and the errors of the others.

    Args:
        batch_error: the error that ended the whole batch, also for aborted requests.
    """
    for number, request in requests.items():
        result, error = admitted[number].result, admitted[number].error
        whole = result is not None and (
            batch_error is None or result.outputs[0].finish_reason is not FinishReason.ABORT
        )
        if result is not None and whole:
            translation.fill(request, admitted[number], result.outputs[0])
        else:
            request.status, request.error = Status.FAILED, error or batch_error
    lengths = [request.generated_length or 0 for request in requests.values()]
    for request in requests.values():
        request.generated_sequence_lengths = torch.tensor(lengths, dtype=torch.int32)
