"""transformers: the model called as `generate` calls it, without generate's own work between steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.peers.protocol import enough, random_ids, serve


class Transformers:
    """SDPA attention, a dynamic cache, no compilation; bf16 alone."""

    def about(self) -> dict[str, Any]:
        return {
            "version": transformers.__version__,
            "settings": f"torch {torch.__version__}, SDPA, DynamicCache, not compiled",
        }

    def load(self, folder: str, fmt: str, kv: str, threads: int, **_: Any) -> dict[str, Any]:
        if fmt != "bf16" or kv != "16bit":
            raise ValueError(f"{fmt} weights with {kv} KV: only bf16 and 16bit are measured")
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.vocab = self.model.config.vocab_size
        return {}

    def unload(self) -> None:
        del self.model

    @torch.inference_mode()
    def check(self, prompts: list[list[int]], forced: list[list[int]]) -> np.ndarray:
        cache = transformers.DynamicCache(config=self.model.config)
        logits = self._forward(torch.tensor(prompts), cache)
        for ids in zip(*forced, strict=True):
            logits = self._forward(torch.tensor(ids)[:, None], cache)
        return logits.float().numpy()

    @torch.inference_mode()
    def prefill(self, length: int) -> float:
        ids = torch.tensor([random_ids(length, 0, self.vocab)])
        cache = transformers.DynamicCache(config=self.model.config)
        start = time.perf_counter()
        self._forward(ids, cache).argmax(-1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, rows: int, length: int, steps: int, seconds: float) -> list[float]:
        cache = transformers.DynamicCache(config=self.model.config)
        ids = torch.tensor([random_ids(length, 0, self.vocab)])
        next_ids = self._forward(ids, cache).argmax(-1).expand(rows)
        cache.batch_repeat_interleave(rows)
        times: list[float] = []
        for step in range(2 + steps):
            start = time.perf_counter()
            next_ids = self._forward(next_ids[:, None], cache).argmax(-1)
            if step >= 2:
                times.append(time.perf_counter() - start)
            if enough(times, steps, seconds):
                break
        return times

    def _forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]


if __name__ == "__main__":
    serve(Transformers())
