"""Read a folder's safetensors with numpy alone: the peers' environment has no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType

import numpy as np

from benchmarks.peers.shape import Shape

TIED = {
    "qwen3": True,
    "qwen3_moe": True,
    "gpt_oss": False,
    "qwen3_5_text": True,
    "lfm2": True,
    "granitemoehybrid": True,
}


class Checkpoint:
    """The bf16 tensors of a folder with one `model.safetensors`.

    Attributes:
        model_type: transformers' name of the architecture.
        tied: whether the head shares the embedding's weight.
        shape: dimensions of the model.
        context: maximum number of positions.
    """

    def __init__(self, folder: str | Path) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        self.model_type: str = config["model_type"]
        self.tied: bool = config["tie_word_embeddings"]
        if TIED.get(self.model_type) != self.tied:
            raise ValueError(
                f"{self.model_type} with tied={self.tied} is not written for the peers"
            )
        self.config, self.shape = config, Shape.of(config)
        self.context: int = config["max_position_embeddings"]
        file = Path(folder) / "model.safetensors"
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            self._entries = json.loads(stream.read(size))
        self._entries.pop("__metadata__", None)
        self._data = np.memmap(file, np.uint8, "r", offset=8 + size)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def bits(self, name: str) -> np.ndarray:
        """Return the bits of a bf16 tensor as uint16."""
        entry = self._entries[name]
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is in {entry['dtype']}, not in BF16")
        begin, end = entry["data_offsets"]
        return self._data[begin:end].view(np.uint16).reshape(entry["shape"])

    def floats(self, name: str, part: int | EllipsisType = ...) -> np.ndarray:
        """Return a tensor, or one part of it along its first axis, in float32."""
        return (self.bits(name)[part].astype(np.uint32) << 16).view(np.float32)
