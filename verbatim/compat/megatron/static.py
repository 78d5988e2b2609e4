"""A static batch: all requests at once, each with its own params."""

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
    """Generate for all requests and write down what became of them; `requests` again.

    One that fails doesn't disturb the others; its error, the first one's of several, is raised when all
    have ended.
    """
    try:
        return _run(translation, requests, _by_request(streams, requests))
    except BaseException as error:
        for stream in streams.values():  # nobody must go on reading; what has ended stays as it is
            stream.finish(error)
        raise


def _by_request(
    streams: Mapping[Any, AsyncStream], requests: Mapping[int, InferenceRequest]
) -> dict[int, AsyncStream]:
    """The streams by the keys of `requests`, of which they may have the text."""
    texts = {str(number): number for number in requests}
    found: dict[int, AsyncStream] = {}
    for key, stream in streams.items():
        number = key if key in requests else texts.get(str(key))
        if number is None:
            raise InvalidRequest(f"active_streams has {key!r}, which is no active_request")
        if number in found:
            raise InvalidRequest(f"active_streams has two streams for request {number}")
        found[number] = stream
    return found


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
    except BaseException as error:  # of the whole batch: refused, or broken off by Ctrl-C
        _write_down(translation, requests, admitted, error)
        raise
    _write_down(translation, requests, admitted, None)
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
    """Until all have ended.

    The steps of those that are streamed are made by the engine's own thread, which tells of each.
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
                raise  # they did not come in
        for feed in feeds:
            feed.ended.wait()
    finally:
        for number in streams:
            handle.abort(admitted[number])


def _write_down(
    translation: Translation,
    requests: Mapping[int, InferenceRequest],
    admitted: Mapping[int, Request],
    broken_off: BaseException | None,
) -> None:
    """Fill in what has a result, and say of the others why not.

    Args:
        broken_off: what ended the whole batch; those that it ended have no result of their own.
    """
    for number, request in requests.items():
        result, error = admitted[number].result, admitted[number].error
        whole = result is not None and (
            broken_off is None or result.outputs[0].finish_reason is not FinishReason.ABORT
        )
        if result is not None and whole:
            translation.fill(request, admitted[number], result.outputs[0])
        else:
            request.status, request.error = Status.FAILED, error or broken_off
    lengths = [request.generated_length or 0 for request in requests.values()]
    for request in requests.values():
        request.generated_sequence_lengths = torch.tensor(lengths, dtype=torch.int32)
