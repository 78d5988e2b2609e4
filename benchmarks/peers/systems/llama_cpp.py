"""llama.cpp, through llama-cpp-python's low-level calls: all rows in one batch of one decode call."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.checkpoint import Checkpoint
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.protocol import enough, random_ids, serve

# Flash attention is faster in prefill (by a tenth) and behind few tokens; behind 1,024, decode is faster
# without (26 tokens/s to 20 at one row, 67 to 57 at eight). K and V in 8 bits need it.
FLASH_BELOW = 512
BATCH = 2048  # tokens of a call, of which it computes UBATCH at once
UBATCH = 512
_GGML_F16, _GGML_Q8_0 = 1, 8


class LlamaCpp:
    """One stream of KV for each sequence, as its server has them; the next id is the largest logit's."""

    def about(self) -> dict[str, Any]:
        info = llama_cpp.llama_print_system_info().decode().strip(" |")
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "settings": f"bf16, Q8_0, Q4_0; flash attention in prefill, and in decode behind fewer than "
            f"{FLASH_BELOW} tokens; ubatch {UBATCH}; {info}",
        }

    def load(
        self, folder: str, fmt: str, kv: str, head_bits: int, threads: int, **_: Any
    ) -> dict[str, Any]:
        checkpoint = Checkpoint(folder)
        file = Path(folder) / f"{fmt}-head{head_bits}.gguf"
        if not file.exists():
            write_gguf(checkpoint, fmt, head_bits, file)
        self.vocab, self.threads = checkpoint.shape.vocab, threads
        self.kv_type = _GGML_Q8_0 if kv == "int8" else _GGML_F16
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self.model:
            raise ValueError(f"llama.cpp can't open {file.name}")
        return {
            "weight_bytes": file.stat().st_size,
            "kv_dtype": "q8_0" if kv == "int8" else "f16",
        }

    def unload(self) -> None:
        llama_cpp.llama_model_free(self.model)

    def check(self, prompts: list[list[int]], forced: list[list[int]]) -> np.ndarray:
        with _Context(self, len(prompts), len(prompts[0]) + len(forced[0])) as context:
            context.prefill_all(prompts)
            for step, ids in enumerate(zip(*forced, strict=True)):
                context.step(list(ids), len(prompts[0]) + step)
            return context.logits().copy()

    def prefill(self, length: int) -> float:
        ids = random_ids(length, 0, self.vocab)
        with _Context(self, 1, length) as context:
            context.prefill_all([ids[:32]])  # what is set up in the first call
            context.clear()
            start = time.perf_counter()
            context.prefill_all([ids])
            context.next_ids()
            return time.perf_counter() - start

    def decode(self, rows: int, length: int, steps: int, seconds: float) -> list[float]:
        flash = length < FLASH_BELOW or self.kv_type != _GGML_F16
        with _Context(self, rows, length + steps + 2, flash=flash) as context:
            context.prefill_all([random_ids(length, 0, self.vocab)])
            ids = random_ids(rows, 1, self.vocab)  # rows of different ids choose different experts
            context.copy_first()
            times: list[float] = []
            for step in range(2 + steps):
                start = time.perf_counter()
                context.step(ids, length + step)
                ids = context.next_ids()
                if step >= 2:
                    times.append(time.perf_counter() - start)
                if enough(times, steps, seconds):
                    break
            return times


class _Context:
    """KV for so many sequences of so many tokens, and the batch that is filled anew for each call."""

    def __init__(self, system: LlamaCpp, rows: int, tokens: int, *, flash: bool = True) -> None:
        params = llama_cpp.llama_context_default_params()
        room = -(-(tokens + 1) // 256) * 256
        params.n_ctx = rows * room
        params.n_seq_max = rows
        params.n_batch, params.n_ubatch = BATCH, UBATCH
        params.n_threads = params.n_threads_batch = system.threads
        params.type_k = params.type_v = system.kv_type
        params.flash_attn_type = int(flash)
        params.kv_unified = False
        params.swa_full = False  # sliding layers keep their window alone, as its server does
        params.no_perf = True
        self.vocab, self.rows = system.vocab, rows
        self.handle = llama_cpp.llama_init_from_model(system.model, params)
        if not self.handle:
            raise ValueError(f"llama.cpp has no context for {rows} x {tokens} tokens")
        self.memory = llama_cpp.llama_get_memory(self.handle)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.outputs: list[int] = []

    def __enter__(self) -> _Context:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.handle)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)

    def copy_first(self) -> None:
        """Give every sequence a copy of the first one's K and V, in its own stream."""
        for row in range(1, self.rows):
            llama_cpp.llama_memory_seq_cp(self.memory, 0, row, -1, -1)

    def prefill_all(self, prompts: list[list[int]]) -> None:
        """Prompt by prompt, keeping the logits of the last token of each only for the last prompt."""
        for row, ids in enumerate(prompts):
            for start in range(0, len(ids), BATCH):
                part = ids[start : start + BATCH]
                entries = [(token, start + i, row) for i, token in enumerate(part)]
                self._run(entries, [len(part) - 1])

    def step(self, ids: list[int], position: int) -> None:
        """One token of each sequence."""
        entries = [(token, position, row) for row, token in enumerate(ids)]
        self._run(entries, list(range(len(ids))))

    def _run(self, entries: list[tuple[int, int, int]], outputs: list[int]) -> None:
        batch = self.batch
        for i, (token, position, row) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row
            batch.logits[i] = 0
        for i in outputs:
            batch.logits[i] = 1
        batch.n_tokens, self.outputs = len(entries), outputs
        status = llama_cpp.llama_decode(self.handle, batch)
        if status != 0:
            raise ValueError(f"llama_decode says {status}")

    def logits(self) -> np.ndarray:
        """Of the last call's outputs, `[rows, vocab]`; a view into llama.cpp's memory."""
        data = llama_cpp.llama_get_logits(self.handle)
        address = ctypes.cast(data, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (len(self.outputs), self.vocab))

    def next_ids(self) -> list[int]:
        return self.logits().argmax(-1).tolist()


if __name__ == "__main__":
    serve(LlamaCpp())
