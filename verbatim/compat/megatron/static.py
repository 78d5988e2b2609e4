"""A static batch: all requests at once, each with its own params."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from verbatim.compat.megatron.request import InferenceRequest, Status
from verbatim.compat.megatron.sampling import draw_seed
from verbatim.compat.megatron.stream import AsyncStream
from verbatim.compat.megatron.streaming import Feed
from verbatim.compat.megatron.translation import Translation
from verbatim.core import Request
from verbatim.errors import InvalidRequest


def run_static_batch(
    translation: Translation,
    requests: dict[int, InferenceRequest],
    streams: Mapping[int, AsyncStream],
) -> dict[int, InferenceRequest]:
    """Generate for all requests and write down what became of them; `requests` again."""
    unknown = [number for number in streams if number not in requests]
    if unknown:
        raise InvalidRequest(f"active_streams has {unknown}, which are no active_requests")
    seed = draw_seed()
    admitted = {
        number: translation.admit(request, row, seed)
        for row, (number, request) in enumerate(requests.items())
    }
    for number, request in requests.items():
        translation.begin(request, admitted[number])
    try:
        _run(translation, requests, admitted, streams)
    except BaseException as error:
        for number, request in requests.items():
            request.status, request.error = Status.FAILED, admitted[number].error or error
        for stream in streams.values():
            stream.finish(error)
        raise
    for number, request in requests.items():
        result = admitted[number].result
        assert result is not None
        translation.fill(request, admitted[number], result.outputs[0])
    lengths = [request.generated_length for request in requests.values()]
    for request in requests.values():
        request.generated_sequence_lengths = torch.tensor(lengths, dtype=torch.int32)
    for stream in streams.values():
        stream.finish()
    return requests


def _run(
    translation: Translation,
    requests: Mapping[int, InferenceRequest],
    admitted: Mapping[int, Request],
    streams: Mapping[int, AsyncStream],
) -> None:
    """Until all have ended.

    The steps of those that are streamed are made by the engine's own thread, which tells of each.
    """
    driver = translation.llm._driver
    endings: list[threading.Event] = []
    try:
        for number, stream in streams.items():
            feed = Feed(translation, requests[number], admitted[number], stream, driver)
            endings.append(threading.Event())
            driver.submit(admitted[number], feed.take, endings[-1].set, hosted=True)
        driver.run([request for number, request in admitted.items() if number not in streams])
        for ending in endings:
            ending.wait()
    finally:
        for number in streams:
            driver.abort(admitted[number])
    for request in admitted.values():
        if request.error is not None:
            raise request.error
