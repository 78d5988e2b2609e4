"""Verbatim: whole steps of its engine, from scheduling to the returned ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.protocol import random_ids, serve
from benchmarks.peers.shape import Shape
from verbatim import LLM, SamplingParams, __version__
from verbatim.bench.peers import Ours
from verbatim.quantization.formats import Quantization

BLOCK = 16


class Verbatim:
    """The engine, stepped by hand; its KV cache is filled with copies where only decode is timed."""

    activation_bits: int | None = None

    def about(self) -> dict[str, Any]:
        return {"version": __version__, "settings": f"torch {torch.__version__}, blocks of {BLOCK}"}

    def load(
        self,
        folder: str,
        fmt: str,
        kv: str,
        head_bits: int,
        threads: int,
        rows: int,
        tokens: int,
    ) -> dict[str, Any]:
        self.shape = Shape.of(json.loads((Path(folder) / "config.json").read_text()))
        blocks = tokens // BLOCK + 2 * rows + 2
        quantization = None
        if fmt != "bf16":
            bits = int(fmt.removeprefix("int"))
            head_bits = max(bits, head_bits)
            quantization = Quantization(
                bits, head_bits=head_bits, activation_bits=self.activation_bits
            )
        self.llm = LLM(
            folder,
            dtype="bfloat16",
            quantization=quantization,
            kv_dtype="int8" if kv == "int8" else "auto",
            kv_memory=int(
                blocks * BLOCK * self.shape.kv_bytes("16bit")
                + 8 * (rows + 2) * self.shape.state_bytes  # half of all may be states
            ),
            block_size=BLOCK,
            max_sequences=max(rows, 2),
            prefix_cache=False,
            num_threads=threads,
        )
        self.ours = Ours(self.llm)
        info = self.llm.info()
        self.llm.sleep()
        return {"weight_bytes": info["weight_bytes"], "kv_dtype": info["kv_dtype"]}

    def _fill(self, blocks: int) -> None:
        """Copy one block's K and V to `blocks` blocks: each has its own memory, and plausible numbers."""
        engine: Any = self.llm.engine
        request = self.ours.add([random_ids(BLOCK, 1, self.shape.vocab)], max_tokens=2)[0]
        engine.step()
        filled = request.sequences[0].blocks[0]
        for tensor in engine.runner.store.tensors:
            end = min(blocks + 1, len(tensor))
            tensor[1:end] = tensor[filled].clone()
        states = engine.runner.store.states
        for state in () if states is None else states.tensors:
            state[1:] = state[request.sequences[0].states[BLOCK]].clone()
        engine.abort(request)

    def unload(self) -> None:
        self.llm.close()
        del self.llm, self.ours

    def check(self, prompts: list[list[int]], forced: list[list[int]]) -> np.ndarray:
        last: list[Any] = [None] * len(prompts)

        def forcing(row: int) -> Any:
            def processor(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
                num_done = len(ids) - len(prompts[row])
                last[row] = logits.numpy().copy()
                forced_id = forced[row][num_done] if num_done < len(forced[row]) else 0
                masked = torch.full_like(logits, -torch.inf)
                masked[forced_id] = 0.0
                return masked

            return processor

        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=len(forced[row]) + 1,
                ignore_eos=True,
                logits_processors=[forcing(row)],
            )
            for row in range(len(prompts))
        ]
        with self._awake():
            self.llm.generate(prompts, params)
        return np.stack(last)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Hold memory for K and V, which is free in the other systems' turns."""
        self.llm.wake()
        try:
            yield
        finally:
            self.llm.sleep()

    def prefill(self, length: int) -> float:
        with self._awake():
            self._fill(-(-length // BLOCK) + 1)  # allocates the pages, as in the other systems
            return self.ours.prefill(random_ids(length, 0, self.shape.vocab))

    def decode(self, rows: int, length: int, steps: int, seconds: float) -> list[float]:
        prompts = [random_ids(length, row, self.shape.vocab) for row in range(rows)]
        with self._awake():
            self._fill(rows * (-(-(length + steps + 66) // BLOCK) + 1))
            return self.ours.decode(prompts, steps, seconds)


if __name__ == "__main__":
    serve(Verbatim())
