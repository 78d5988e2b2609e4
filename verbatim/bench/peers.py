"""The systems that are measured: Verbatim, transformers, llama.cpp and OpenVINO (with converted weights)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from verbatim.bench.machine import WARM, seconds, step_times
from verbatim.core import Request
from verbatim.errors import InvalidRequest, ModelError
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.protocols import Forward


class Peer(Protocol):
    """An inference system, called like its own generation loop calls it."""

    name: str

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds for a prompt, to its next token."""
        ...

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Return the seconds of each decode step after prompts of one length.

        A system may copy the first prompt; the rows then go on with different ids.
        """
        ...


class Ours:
    """An open engine, stepped by the benchmark.

    Args:
        llm: not used by anything else meanwhile.
    """

    name = "Verbatim"

    def __init__(self, llm: LLM) -> None:
        self._handle = llm.engine
        self.vocab = llm.engine.admission.vocab_size
        self.max_length = llm.max_length
        self._budget = llm.engine.scheduler.max_batch_tokens

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds for a prompt, to its next token."""
        return seconds(lambda: self._handle.run(self._admit([prompt], 1)))

    def decode(self, prompts: list[list[int]], steps: int, most_s: float = math.inf) -> list[float]:
        """Return the seconds of each decode step after these prompts; `most_s` as in `step_times`.

        Raises:
            InvalidRequest: a sequence reaches the length limit before all prompts are processed.
        """
        rows, longest = len(prompts), max(map(len, prompts))
        # Running sequences grow by a token in each step that processes further prompts.
        num_prefill_steps = math.ceil(sum(map(len, prompts)) / max(1, self._budget - rows)) + rows
        room = self.max_length - longest
        requests = self.add(prompts, max_tokens=min(num_prefill_steps + steps + WARM + 1, room))
        try:
            self._skip_prefill(requests)
            times = step_times(self._handle.step, steps, most_s)
            if any(request.result is not None for request in requests):
                raise InvalidRequest(
                    f"{rows} rows of {longest} tokens: some reach {self.max_length}, which is all "
                    "that fits, before the others are there; take fewer rows or shorter ones"
                )
            return times
        finally:
            for request in requests:
                self._handle.abort(request)

    def mixed(self, requests: list[tuple[list[int], int]]) -> tuple[int, float]:
        """Run all (prompt, number of new tokens) at once; return the number of new tokens and the seconds."""
        spent = seconds(
            lambda: self._handle.run(
                [request for ids, count in requests for request in self._admit([ids], count)]
            )
        )
        return sum(count for _, count in requests), spent

    def _skip_prefill(self, requests: list[Request]) -> None:
        """Process the prompts without forwards, as the cost of decoding does not depend on K and V.

        This takes several steps, in which earlier rows grow by some tokens. Rows continue with different
        ids, as equal ones would select the same experts.
        """

        def random_logits(batch: Any) -> Forward:
            return Forward(torch.rand(len(batch.logit_rows), self.vocab))

        runner: Any = self._handle.runner
        runner.forward = random_logits
        try:
            while not requests[-1].sequences[0].output_ids:
                self._handle.step()
        finally:
            del runner.forward

    def add(self, prompts: list[list[int]], *, max_tokens: int) -> list[Request]:
        """Submit greedy requests, without a step."""
        requests = self._admit(prompts, max_tokens)
        for request in requests:
            self._handle.submit(request)
        return requests

    def _admit(self, prompts: list[list[int]], max_tokens: int) -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [self._handle.admission.admit(prompt, params) for prompt in prompts]


class Transformers:
    """transformers' forward as `generate` calls it, with a dynamic cache and, if supported, SDPA.

    Raises:
        ModelError: transformers can't open it.
    """

    name = "transformers"

    def __init__(self, source: str, dtype: torch.dtype, **options: Any) -> None:
        transformers: Any = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()  # no warnings about weights
        transformers.logging.disable_progress_bar()
        try:
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, **options
            )
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(f"transformers can't open it: {error}") from None
        self._vocab = self._model.config.get_text_config().vocab_size
        arguments = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"  # before 5.24
        self.make_cache: Callable[[], Any] = lambda: transformers.DynamicCache(
            config=self._model.config
        )

    def prefill(self, prompt: list[int]) -> float:
        ids, cache = torch.tensor([prompt]), self.make_cache()
        return seconds(lambda: self._next(ids, cache))

    def decode(self, prompts: list[list[int]], steps: int, most_s: float = math.inf) -> list[float]:
        prompt, rows, cache = prompts[0], len(prompts), self.make_cache()
        self._next(torch.tensor([prompt]), cache)
        if rows > 1:
            try:
                cache.batch_repeat_interleave(rows)
            except AttributeError:  # caches of recurrent layers can't
                cache = self.make_cache()
                self._next(torch.tensor([prompt] * rows), cache)
        next_ids = torch.randint(self._vocab, (rows,))

        def step() -> None:
            nonlocal next_ids
            next_ids = self._next(next_ids[:, None], cache)

        return step_times(step, steps, most_s)

    def _next(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        return self.logits(ids, cache).argmax(-1)

    def logits(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the logits after the last id of each row."""
        with torch.inference_mode():
            out = self._model(ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
            logits: torch.Tensor = out.logits[:, -1]
        return logits


class LlamaCpp:
    """llama.cpp by llama-cpp-python's low-level API: all rows in one decode call.

    Raises:
        ModelError: it can't open the file.
    """

    name = "llama.cpp"
    _BATCH = 2048  # tokens per call

    def __init__(self, file: str, threads: int) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        self._threads = threads
        self._lib.llama_backend_init()
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(file.encode(), params)
        if not self._model:
            raise ModelError(f"llama.cpp can't open {file}")
        self._vocab = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))

    def prefill(self, prompt: list[int]) -> float:
        context = self._context(1, len(prompt))
        try:
            return seconds(lambda: self._prompt(context, prompt))
        finally:
            self._lib.llama_free(context)

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        rows, context = len(prompts), len(prompts[0])
        handle = self._context(rows, context + steps + WARM)
        try:
            self._prompt(handle, prompts[0])
            memory = self._lib.llama_get_memory(handle)
            for row in range(1, rows):
                self._lib.llama_memory_seq_cp(memory, 0, row, -1, -1)
            number = itertools.count()

            def step() -> None:
                at = next(number)
                entries = [(at % self._vocab, context + at, row) for row in range(rows)]
                self._run(handle, entries, list(range(rows)))

            return step_times(step, steps)
        finally:
            self._lib.llama_free(handle)

    def _context(self, rows: int, tokens: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = rows * (-(-(tokens + 1) // 256) * 256)
        params.n_seq_max = rows
        params.n_batch = self._BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        params.no_perf = True
        handle = self._lib.llama_init_from_model(self._model, params)
        if not handle:
            raise ModelError(f"llama.cpp has no context for {rows} x {tokens} tokens")
        return handle

    def _prompt(self, handle: Any, ids: list[int]) -> None:
        for start in range(0, len(ids), self._BATCH):
            part = ids[start : start + self._BATCH]
            entries = [(token % self._vocab, start + i, 0) for i, token in enumerate(part)]
            self._run(handle, entries, [len(part) - 1])

    def _run(self, handle: Any, entries: list[tuple[int, int, int]], outputs: list[int]) -> None:
        batch = self._lib.llama_batch_init(len(entries), 0, 1)
        try:
            for i, (token, position, row) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = row, 0
            for i in outputs:
                batch.logits[i] = 1
            batch.n_tokens = len(entries)
            status = self._lib.llama_decode(handle, batch)
            if status != 0:
                raise ModelError(f"llama.cpp: llama_decode says {status}")
            self._lib.llama_get_logits(handle)  # waits for the result
        finally:
            self._lib.llama_batch_free(batch)


class OpenVINO:
    """OpenVINO's CPU plugin with a stateful export of `optimum-cli export openvino`.

    Raises:
        ModelError: no such export.
    """

    name = "OpenVINO"

    def __init__(self, folder: str, threads: int) -> None:
        openvino: Any = importlib.import_module("openvino")
        self._np: Any = importlib.import_module("numpy")
        file = Path(folder) / "openvino_model.xml"
        if not file.is_file():
            raise ModelError(f"{folder} has no openvino_model.xml")
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(threads),
        }
        try:
            self._compiled: Any = openvino.Core().compile_model(str(file), "CPU", settings)
        except RuntimeError as error:
            raise ModelError(f"OpenVINO can't open {file}: {error}") from None
        self._inputs = {name for port in self._compiled.inputs for name in port.get_names()}
        if "beam_idx" not in self._inputs:
            raise ModelError(f"{file} keeps no state: export it as a stateful model")

    def prefill(self, prompt: list[int]) -> float:
        request, ids = self._compiled.create_infer_request(), self._np.array([prompt])
        return seconds(lambda: self._run(request, ids, 0))

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        request = self._compiled.create_infer_request()
        position = itertools.count(len(prompts[0]))
        ids = self._run(request, self._np.array(prompts[:1] * len(prompts)), 0)

        def step() -> None:
            nonlocal ids
            ids = self._run(request, ids[:, None], next(position))

        return step_times(step, steps)

    def _run(self, request: Any, ids: Any, before: int) -> Any:
        rows, length = ids.shape
        values = {
            "input_ids": ids.astype("int64"),
            "attention_mask": self._np.ones((rows, before + length), "int64"),
            "position_ids": self._np.arange(before, before + length)[None].repeat(rows, 0),
            "beam_idx": self._np.arange(rows, dtype="int32"),
        }
        request.infer({name: value for name, value in values.items() if name in self._inputs})
        return request.get_output_tensor(0).data[:, -1].argmax(-1)


def installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None
