"""Verbatim: whole steps of its engine, from scheduling to the ids that are handed out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.protocol import enough, random_ids, serve
from benchmarks.peers.shape import Shape
from verbatim import LLM, SamplingParams, __version__
from verbatim.model.quantize import Quantization
from verbatim.placement.runner import Forward

BLOCK = 16


class Verbatim:
    """The engine, stepped by hand, with its K and V filled once and prefill left out where only decode is
    timed.
    """

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
            kv_memory=int(blocks * BLOCK * self.shape.kv_bytes("16bit")),
            block_size=BLOCK,
            max_sequences=max(rows, 2),
            prefix_cache=False,
            num_threads=threads,
        )
        self.runner: Any = self.llm._engine.runner
        info = self.llm.info()
        self.llm.sleep()
        return {"weight_bytes": info["weight_bytes"], "kv_dtype": info["kv_dtype"]}

    def _fill(self, blocks: int) -> None:
        """Let every block hold the K and V of the first: memory of its own, and plausible numbers."""
        request = self._add([random_ids(BLOCK, 1, self.shape.vocab)], max_tokens=2)[0]
        self.llm._engine.step()
        filled = request.sequences[0].blocks[0]
        for k, v in self.runner.store.layers:
            for tensor in (k, v):
                end = min(blocks + 1, len(tensor))
                tensor[1:end] = tensor[filled].clone()
        self._drop([request])

    def unload(self) -> None:
        self.llm.close()
        del self.llm, self.runner

    def check(self, prompts: list[list[int]], forced: list[list[int]]) -> np.ndarray:
        last: list[Any] = [None] * len(prompts)

        def follow(row: int) -> Any:
            def processor(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
                done = len(ids) - len(prompts[row])
                last[row] = logits.numpy().copy()
                wanted = forced[row][done] if done < len(forced[row]) else 0
                only = torch.full_like(logits, -torch.inf)
                only[wanted] = 0.0
                return only

            return processor

        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=len(forced[row]) + 1,
                ignore_eos=True,
                logits_processors=[follow(row)],
            )
            for row in range(len(prompts))
        ]
        with self._awake():
            self.llm.generate(prompts, params)
        return np.stack(last)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """With memory for K and V, which is the other systems' in their turns."""
        self.llm.wake()
        try:
            yield
        finally:
            self.llm.sleep()

    def prefill(self, length: int) -> float:
        with self._awake():
            return self._prefill(length)

    def decode(self, rows: int, length: int, steps: int, seconds: float) -> list[float]:
        with self._awake():
            self._fill(rows * (-(-(length + steps + 66) // BLOCK) + 1))
            return self._decode(rows, length, steps, seconds)

    def _prefill(self, length: int) -> float:
        start = time.perf_counter()
        requests = self._add([random_ids(length, 0, self.shape.vocab)], max_tokens=2)
        while not requests[0].sequences[0].output_ids:
            self.llm._engine.step()
        spent = time.perf_counter() - start
        self._drop(requests)
        return spent

    def _decode(self, rows: int, length: int, steps: int, seconds: float) -> list[float]:
        prompts = [random_ids(length, row, self.shape.vocab) for row in range(rows)]
        requests = self._add(prompts, max_tokens=steps + 64)
        self._pretend_prefill(requests)
        times: list[float] = []
        for step in range(2 + steps):
            start = time.perf_counter()
            self.llm._engine.step()
            if step >= 2:
                times.append(time.perf_counter() - start)
            if enough(times, steps, seconds):
                break
        assert not any(r.finished for r in requests)
        self._drop(requests)
        return times

    def _pretend_prefill(self, requests: list[Any]) -> None:
        """Take the prompts in as if they were computed: their blocks are full of numbers already.

        It takes several steps, in which those that are through grow by some tokens.
        """

        def nothing(batch: Any) -> Forward:
            return Forward(torch.zeros(len(batch.logit_rows), self.shape.vocab))

        self.runner.forward = nothing
        try:
            while not requests[-1].sequences[0].output_ids:
                self.llm._engine.step()
        finally:
            del self.runner.forward

    def _add(self, prompts: list[list[int]], *, max_tokens: int) -> list[Any]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        requests = [self.llm._admission.admit(prompt, params) for prompt in prompts]
        for request in requests:
            self.llm._engine.add(request, lambda delta: None)
        return requests

    def _drop(self, requests: list[Any]) -> None:
        for request in requests:
            self.llm._engine.abort(request)


if __name__ == "__main__":
    serve(Verbatim())
