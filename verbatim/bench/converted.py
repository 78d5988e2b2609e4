"""Systems that need the model in their own format: llama.cpp and OpenVINO.

Does not import torch, which the environment of `benchmarks/peers` does not have.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from verbatim.bench.plan import WARM, random_ids, seconds, step_times
from verbatim.errors import ModelError


class Converted:
    """A system that computes in contexts, which hold the K and V of rows of equal length.

    A context is used in a `with` block. `context(ids)` appends ids `[rows, tokens]` and returns the logits
    `[rows, vocab]` after the last ones; `clear` empties the context, and `repeat` copies its only row.
    """

    def context(self, rows: int, tokens: int, prompt: int = 0) -> Any:
        """Return an empty context for rows of `tokens` tokens; decoding begins after `prompt` tokens."""
        raise NotImplementedError

    def prefill(self, prompt: list[int]) -> float:
        """See `Peer`."""
        with self.context(1, len(prompt)) as context:
            context([prompt[:32]])  # the first call sets up buffers
            context.clear()
            return seconds(lambda: context([prompt]).argmax(-1))

    def decode(self, prompts: list[list[int]], steps: int, most_s: float = math.inf) -> list[float]:
        """See `Peer`; `most_s` as in `step_times`."""
        rows, length = len(prompts), len(prompts[0])
        with self.context(rows, length + steps + WARM, length) as context:
            vocab = context(prompts[:1]).shape[-1]
            context.repeat(rows)
            ids: Any = [[token] for token in random_ids(rows, vocab)]

            def step() -> None:
                nonlocal ids
                ids = context(ids).argmax(-1)[:, None].tolist()

            return step_times(step, steps, most_s)


class LlamaCpp(Converted):
    """llama.cpp with llama-cpp-python's low-level API: all rows in one decode call, each with its own KV.

    Args:
        kv_type: type of K and V: `F16` or `Q8_0`.

    Raises:
        ModelError: llama.cpp can't open the file.
    """

    name, package, option = "llama.cpp", "llama_cpp", "gguf"
    F16, Q8_0 = 1, 8  # ggml's type numbers
    # Flash attention is faster in prefill (by 10%) and with short contexts. After 1,024 tokens, decode is
    # faster without it (26 versus 20 tokens/s with one row, 67 versus 57 with eight). 8-bit K and V need it.
    FLASH_BELOW = 512

    def __init__(self, file: str, threads: int, *, kv_type: int = F16) -> None:
        self.lib: Any = importlib.import_module(self.package)
        self.threads, self.kv_type = threads, kv_type
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = self.lib.llama_model_load_from_file(file.encode(), params)
        if not self.model:
            raise ModelError(f"llama.cpp can't open {file}")

    def context(self, rows: int, tokens: int, prompt: int = 0) -> _LlamaContext:
        flash = prompt < self.FLASH_BELOW or self.kv_type != self.F16
        return _LlamaContext(self, rows, tokens, flash)


class _LlamaContext:
    """The KV cache of some rows, and a batch for calls; raises ModelError if memory or a call fails."""

    BATCH, UBATCH = 2048, 512  # maximum tokens per call, and per computation in it

    def __init__(self, system: LlamaCpp, rows: int, tokens: int, flash: bool) -> None:
        self._lib, self._length = system.lib, 0
        vocab = self._lib.llama_model_get_vocab(system.model)
        self._vocab: int = self._lib.llama_vocab_n_tokens(vocab)
        params = self._lib.llama_context_default_params()
        params.n_ctx = rows * (-(-(tokens + 1) // 256) * 256)
        params.n_seq_max = rows
        params.n_batch, params.n_ubatch = self.BATCH, self.UBATCH
        params.n_threads = params.n_threads_batch = system.threads
        params.type_k = params.type_v = system.kv_type
        params.flash_attn_type = int(flash)
        params.kv_unified = False
        params.swa_full = False  # sliding layers keep only their window, as in llama.cpp's server
        params.no_perf = True
        self._handle = self._lib.llama_init_from_model(system.model, params)
        if not self._handle:
            raise ModelError(f"llama.cpp has no context for {rows} x {tokens} tokens")
        self._memory = self._lib.llama_get_memory(self._handle)
        self._batch = self._lib.llama_batch_init(self.BATCH, 0, 1)

    def __enter__(self) -> _LlamaContext:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._handle)

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)
        self._length = 0

    def repeat(self, rows: int) -> None:
        for row in range(1, rows):
            self._lib.llama_memory_seq_cp(self._memory, 0, row, -1, -1)

    def __call__(self, ids: list[list[int]]) -> Any:
        """Return a view of llama.cpp's memory; several rows must fit into one call."""
        begin, self._length = self._length, self._length + len(ids[0])
        entries = [
            (token, at, row)
            for row, tokens in enumerate(ids)
            for at, token in enumerate(tokens, begin)
        ]
        batch, outputs = self._batch, 0
        for start in range(0, len(entries), self.BATCH):
            part = entries[start : start + self.BATCH]
            for i, (token, at, row) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token % self._vocab, at, 1
                batch.seq_id[i][0], batch.logits[i] = row, at + 1 == self._length
            batch.n_tokens = len(part)
            if status := self._lib.llama_decode(self._handle, batch):
                raise ModelError(f"llama.cpp: llama_decode says {status}")
            outputs = sum(at + 1 == self._length for _, at, _ in part)
        data = self._lib.llama_get_logits(self._handle)  # waits for the result
        address = ctypes.cast(data, ctypes.POINTER(ctypes.c_float))
        numpy = importlib.import_module("numpy")
        return numpy.ctypeslib.as_array(address, (outputs, self._vocab))


class OpenVINO(Converted):
    """OpenVINO's CPU plugin with a stateful model, one infer request for all rows.

    Args:
        model: the output folder of `optimum-cli export openvino`, or an `openvino.Model`.
        settings: further settings of the plugin.

    Raises:
        ModelError: not such a folder, or OpenVINO can't open it.
    """

    name, package, option = "OpenVINO", "openvino", "openvino"

    def __init__(self, model: Any, threads: int, **settings: str) -> None:
        openvino: Any = importlib.import_module(self.package)
        if isinstance(model, str):
            file = Path(model) / "openvino_model.xml"
            if not file.is_file():
                raise ModelError(f"{model} has no openvino_model.xml")
            model = str(file)
        settings |= {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(threads),
        }
        try:
            self.compiled: Any = openvino.Core().compile_model(model, "CPU", settings)
        except RuntimeError as error:
            raise ModelError(f"OpenVINO can't open {model}: {error}") from None
        self.inputs = {name for port in self.compiled.inputs for name in port.get_names()}
        if "beam_idx" not in self.inputs:
            raise ModelError(f"{model} keeps no state: export it as a stateful model")

    def context(self, rows: int, tokens: int, prompt: int = 0) -> Any:
        return nullcontext(_OpenVINOContext(self))


class _OpenVINOContext:
    """An infer request with the states of its rows."""

    def __init__(self, system: OpenVINO) -> None:
        self._numpy: Any = importlib.import_module("numpy")
        self._request, self._inputs = system.compiled.create_infer_request(), system.inputs
        self._length = 0

    def clear(self) -> None:
        self._request.reset_state()
        self._length = 0

    def repeat(self, rows: int) -> None:
        tensor = importlib.import_module(OpenVINO.package).Tensor
        for state in self._request.query_state() if rows > 1 else ():
            state.state = tensor(self._numpy.repeat(state.state.data, rows, 0))

    def __call__(self, ids: list[list[int]]) -> Any:
        """Return a view of the request's memory."""
        np, rows = self._numpy, len(ids)
        begin, self._length = self._length, self._length + len(ids[0])
        values = {
            "input_ids": np.array(ids, "int64"),
            "attention_mask": np.ones((rows, self._length), "int64"),
            "position_ids": np.arange(begin, self._length)[None].repeat(rows, 0),
            "beam_idx": np.arange(rows, dtype="int32"),
        }
        self._request.infer({name: value for name, value in values.items() if name in self._inputs})
        return self._request.get_output_tensor(0).data[:, -1]


CONVERTED = (LlamaCpp, OpenVINO)


def installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None
