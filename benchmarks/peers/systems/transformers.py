"""transformers: the model called as `generate` calls it, without generate's own work between steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.peers.protocol import PeerSystem, serve
from benchmarks.peers.shape import Shape
from verbatim.bench import peers


class Transformers(PeerSystem):
    """SDPA attention if supported, else eager; a dynamic cache, no compilation, only bf16."""

    def about(self) -> dict[str, Any]:
        return {
            "version": transformers.__version__,
            "settings": f"torch {torch.__version__}, SDPA (gpt-oss: eager), DynamicCache, not compiled",
        }

    def load(self, folder: str, fmt: str, kv: str, threads: int, **_: Any) -> dict[str, Any]:
        if fmt != "bf16" or kv != "16bit":
            raise ValueError(f"{fmt} weights with {kv} KV: only bf16 and 16bit are measured")
        torch.set_num_threads(threads)
        self.vocab = Shape.of(json.loads((Path(folder) / "config.json").read_text())).vocab
        self.peer = peers.Transformers(folder, torch.bfloat16)
        return {}

    def unload(self) -> None:
        del self.peer

    def check(self, prompts: list[list[int]], forced: list[list[int]]) -> np.ndarray:
        cache = self.peer.make_cache()
        logits = self.peer.logits(torch.tensor(prompts), cache)
        for ids in zip(*forced, strict=True):  # decoded one by one
            logits = self.peer.logits(torch.tensor(ids)[:, None], cache)
        return logits.float().numpy()


if __name__ == "__main__":
    serve(Transformers())
