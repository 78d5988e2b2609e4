"""OpenVINO: a stateful model on its CPU plugin, one infer request for all rows."""

from __future__ import annotations

from typing import Any

import openvino as ov

from benchmarks.peers.checkpoint import Checkpoint
from benchmarks.peers.openvino_graph import build
from benchmarks.peers.protocol import PeerSystem, serve
from verbatim.bench import converted

# Group sizes in which activations are quantized: the fastest of 32, 64, 128 and 1024 for weights with one
# scale per row (int8) and per group of 64 (int4). The default, 32, is slower, and none even slower.
ACTIVATIONS = {"int8": "128", "int4": "64"}


class OpenVINO(PeerSystem):
    """All rows in one batch: with equal lengths, a scheduler would only slow down a step."""

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
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "u8" if kv == "int8" else "bf16",
        }
        if fmt in ACTIVATIONS:
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = ACTIVATIONS[fmt]
        self.peer = converted.OpenVINO(model, threads, **settings)
        kv_dtype = self.peer.compiled.get_property("KV_CACHE_PRECISION").get_type_name()
        return {"weight_bytes": nbytes, "kv_dtype": kv_dtype}

    def unload(self) -> None:
        del self.peer, self.arrays


if __name__ == "__main__":
    serve(OpenVINO())
