"""OpenVINO: a stateful model on its CPU plugin, one infer request for all rows."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov

from benchmarks.peers.checkpoint import Checkpoint
from benchmarks.peers.openvino_graph import build
from benchmarks.peers.protocol import enough, random_ids, serve

# Activations are quantized on the fly, in groups of so many: the best of 32, 64, 128 and 1024 for weights
# with one scale a row and for groups of 64. Its own default, 32, is slower, and none at all slower still.
ACTIVATIONS = {"int8": "128", "int4": "64"}


class OpenVINO:
    """Rows of equal length in one batch need no scheduler, which would only add to a step."""

    def about(self) -> dict[str, Any]:
        return {
            "version": ov.__version__.split("-")[0],
            "settings": "stateful model, latency hint, one stream, bf16 inference; with int8 and int4 "
            "weights, activations in 8 bits",
        }

    def load(
        self, folder: str, fmt: str, kv: str, head_bits: int, threads: int, **_: Any
    ) -> dict[str, Any]:
        checkpoint = Checkpoint(folder)
        if checkpoint.shape.experts > 1:
            raise ValueError(
                "mixtures of experts are not measured: in the graphs that were tried, the CPU plugin "
                "computed every expert for every token, not the chosen ones alone"
            )
        if checkpoint.shape.recurrent:
            raise ValueError("recurrent layers are not measured: no graph of them is written here")
        self.vocab = checkpoint.shape.vocab
        model, nbytes, self.arrays = build(checkpoint, fmt, head_bits)
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(threads),
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "u8" if kv == "int8" else "bf16",
        }
        if fmt in ACTIVATIONS:
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = ACTIVATIONS[fmt]
        self.compiled = ov.Core().compile_model(model, "CPU", settings)
        kept = self.compiled.get_property("KV_CACHE_PRECISION").get_type_name()
        return {"weight_bytes": nbytes, "kv_dtype": kept}

    def unload(self) -> None:
        del self.compiled, self.arrays

    def check(self, prompts: list[list[int]], forced: list[list[int]]) -> np.ndarray:
        run = _Run(self.compiled, len(prompts))
        logits = run(np.array(prompts))
        for ids in zip(*forced, strict=True):
            logits = run(np.array(ids)[:, None])
        return logits.copy()

    def prefill(self, length: int) -> float:
        ids = np.array([random_ids(length, 0, self.vocab)])
        _Run(self.compiled, 1)(ids[:, :32])  # what is compiled for a shape at its first use
        run = _Run(self.compiled, 1)
        start = time.perf_counter()
        run(ids).argmax(-1)
        return time.perf_counter() - start

    def decode(self, rows: int, length: int, steps: int, seconds: float) -> list[float]:
        run = _Run(self.compiled, 1)
        ids = run(np.array([random_ids(length, 0, self.vocab)])).argmax(-1).repeat(rows)
        run.repeat(rows)
        times: list[float] = []
        for step in range(2 + steps):
            start = time.perf_counter()
            ids = run(ids[:, None]).argmax(-1)
            if step >= 2:
                times.append(time.perf_counter() - start)
            if enough(times, steps, seconds):
                break
        return times


class _Run:
    """A request, whose states grow with what it is given."""

    def __init__(self, compiled: ov.CompiledModel, rows: int) -> None:
        self.request = compiled.create_infer_request()
        self.length, self.rows = 0, rows

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Logits `[rows, vocab]` behind `ids` `[rows, tokens]`; a view of the request's memory."""
        stop = self.length + ids.shape[1]
        positions = np.arange(self.length, stop, dtype=np.int64)[None].repeat(self.rows, 0)
        beams = np.arange(self.rows, dtype=np.int32)
        self.request.set_input_tensor(0, ov.Tensor(ids.astype(np.int64)))
        self.request.set_input_tensor(1, ov.Tensor(positions))
        self.request.set_input_tensor(2, ov.Tensor(beams))
        self.request.infer()
        self.length = stop
        return self.request.get_output_tensor(0).data

    def repeat(self, rows: int) -> None:
        """The one row's K and V, copied for each of so many."""
        if rows > 1:
            for state in self.request.query_state():
                one = state.state.data
                state.state = ov.Tensor(np.repeat(one, rows, 0))
        self.rows = rows


if __name__ == "__main__":
    serve(OpenVINO())
