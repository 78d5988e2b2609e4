"""`LLM`: open a model, generate, stream, score, chat, update weights, close."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from verbatim.api.opening import open_engine
from verbatim.api.progress import progress_bar
from verbatim.api.session import Session
from verbatim.api.source import open_model
from verbatim.common.checks import integer, optional_integer, switch
from verbatim.common.spelling import suggests_names
from verbatim.core import Delta, Request, Result, TopLogprobs
from verbatim.draft.config import resolve_draft, resolve_draft_tokens
from verbatim.engine.admission import Prompt, as_params, as_prompts
from verbatim.engine.handle import EngineHandle, check_not_forked
from verbatim.errors import InvalidRequest, NotSupported, VerbatimError
from verbatim.model.device import resolve_device
from verbatim.model.limits import pad_id_of
from verbatim.model.loader import ModelSource
from verbatim.model.unused import check_unused_weights
from verbatim.options import on_cpu
from verbatim.params import SamplingParams
from verbatim.placement.distributed.choice import Cluster, PipelineParallel, Ranked
from verbatim.placement.distributed.runner import Clustered
from verbatim.placement.offload.choice import Offload
from verbatim.placement.options import DEFAULT_FOLDER_BYTES, engine_options
from verbatim.quantization.formats import Quantization
from verbatim.text.chat import render_chat
from verbatim.weights.adapter import read_adapter
from verbatim.weights.load import open_weights
from verbatim.weights.update import Weights, named_weights


class LLM:
    """A model opened for generation.

    Args:
        model: None (the storyteller inside the package); a folder in Hugging Face's format, or a hub id; a
            DCP folder, or its parent with a `latest` link; or a live module, either transformers' or one
            with `kv_caches`, which is used in place: never copied, moved or repacked.
        tokenizer: a transformers tokenizer, or the folder or hub id of one. None: the model's own, which a
            live module lacks. Without a tokenizer, prompts and completions are token ids only.
        device: "cpu", "cuda", "cuda:1" and so on. "auto": a live module's device, the CPU otherwise. See
            docs/gpu.md for what is supported on a GPU.
        dtype: weight dtype: "auto" (the checkpoint's), "float32" or "bfloat16". A live module keeps its own.
        kv_dtype: KV cache dtype: "auto" (the dtype of the model's keys), "float32", "bfloat16", or "int8"
            and "int4" (quantized in groups, to about a half and a third of bfloat16's bytes).
        kv_memory: size of the KV cache: bytes, "512MB", or a share of RAM or GPU memory ("40%"). None: up
            to 40% of the available memory, but not more than `max_sequences` full sequences need.
        block_size: token positions per KV block.
        max_batch_tokens: maximum rows per forward; longer prompts are prefilled in chunks. None: 2048, or
            the plan's value with `Offload`.
        max_sequences: maximum number of sequences that run at once.
        max_waiting: maximum queued requests; further ones raise QueueFull. None: unlimited.
        max_unread: maximum number of unread deltas of a stream; one more ends the request with RequestFailed.
        max_length: maximum tokens of prompt and completion together. None: the model's limit.
        deterministic: True: outputs are bit-identical in every schedule. They always are on a CPU, for which
            False is refused. On a GPU, "auto" and False leave matrix products to torch, which is faster.
        num_threads: size of torch's thread pool while this engine computes. None: torch's setting, within the
            CPU quota of the container.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run Python code of the checkpoint.
        unused_weights: "error" refuses a checkpoint with tensors that the model does not use, except those
            that its class lists as ignorable, MTP layers and other modalities. "ignore" opens it.
        prefix_cache: reuse the K and V of shared prompt prefixes. For a live module, with weights that may
            change at any time, only while requests are running.
        prefix_folder: a folder for cached prefixes, so that they survive a restart; None keeps them in
            memory only. Several processes may share it. Not supported for a live module, or with
            `trust_remote_code`.
        prefix_folder_bytes: size limit of the folder: bytes or "20GB"; least recently used files are deleted.
        config: the model of a torch.distributed.checkpoint (DCP) folder, which requires it: KempnerForge's
            TOML (a path that ends in .toml) or a `KempnerConfig`, a transformers config, or the folder,
            config.json or hub id of one. None for every other format.
        draft: how draft tokens are proposed (speculative decoding). Outputs do not depend on it. None,
            "ngram", "mtp", "early-exit"; a folder, a hub id or a module of a smaller model with the same
            tokenizer; an instance of a class in `verbatim.draft`; or any object with a `propose`
            method, as `verbatim.draft.Proposer` describes.
        num_draft_tokens: tokens per draft, 0 to 64. None: adaptive, up to 8.
        placement: None: this process's memory; or an `Offload`, a `Cluster`, a `TensorParallel`, a
            `PipelineParallel` or an `ExpertParallel`.
        quantization: weight quantization of a folder or hub id: "int8", "int4", or a `Quantization` for
            other group sizes. Without a placement, quantized weights are kept in the user's cache. "w8a8" and
            "w4a8" (`activation_bits=8`) also quantize the inputs of linear layers to 8 bits, which is faster
            for many rows and slightly less accurate. None: not quantized. `info` reports the quantized
            weights and their error.
        fused: run each layer of the common architecture with one call of a compiled kernel, and replay
            recordings of short steps of other architectures. Neither changes a bit of the output; `info`
            lists both. False: run module by module; not supported with `Cluster` and `PipelineParallel`.
        adapters: LoRA adapters to load, as PEFT folders by name (see `load_adapter`). Requests select one by
            `SamplingParams.adapter`.

    Attributes:
        engine: the `EngineHandle` that all calls go through.
        name: name of the model.
        tokenizer: the `Tokenizer` (`encode`, `decode`, and transformers' own as `hf`); None if there is none.
        max_length: maximum tokens of prompt and completion together.

    Raises:
        ModelError, UnsupportedModel: the model can't be opened, or its architecture is not supported.
        InvalidRequest, NotSupported: an option is out of range or not supported.
        OutOfBlocks: `kv_memory` is too small for one block.
    """

    @suggests_names
    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module | None = None,
        *,
        tokenizer: Any = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        placement: Any = None,
        draft: Any = None,
        num_draft_tokens: int | None = None,
        quantization: str | Quantization | None = None,
        kv_dtype: str | torch.dtype = "auto",
        kv_memory: int | str | None = None,
        block_size: int = 16,
        max_batch_tokens: int | None = None,
        max_sequences: int = 256,
        max_waiting: int | None = None,
        max_unread: int = 65_536,
        max_length: int | None = None,
        prefix_cache: bool = True,
        prefix_folder: str | os.PathLike[str] | None = None,
        prefix_folder_bytes: int | str = DEFAULT_FOLDER_BYTES,
        fused: bool = True,
        deterministic: bool | str = "auto",
        num_threads: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        unused_weights: str = "error",
        config: Any = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        _weak: bool = False,
    ) -> None:
        check_not_forked()
        resolved_device = resolve_device(device, deterministic, model)
        if placement is not None and not isinstance(placement, Offload | Cluster | Ranked):
            raise NotSupported(
                f"placement={placement!r}: must be None, an Offload, a Cluster, a TensorParallel, a "
                "PipelineParallel or an ExpertParallel"
            )
        offload = placement if isinstance(placement, Offload) else None
        options = engine_options(
            quantization=quantization,
            kv_dtype=kv_dtype,
            kv_memory=kv_memory,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_length=max_length,
            prefix_cache=prefix_cache,
            prefix_folder=prefix_folder,
            prefix_folder_bytes=prefix_folder_bytes,
            num_threads=num_threads,
            fused=fused,
            device=resolved_device,
        )
        if not options.fused and isinstance(placement, Cluster | PipelineParallel):
            raise NotSupported(
                f"fused=False: not supported with placement={placement!r}, where each stage chooses "
                "the layers that it fuses"
            )
        quantized = options.quantization if offload is None else None
        if quantized is not None and isinstance(model, nn.Module):
            raise NotSupported(
                f"quantization={quantized.name!r}: not supported for a live module, which is used in place; "
                "save it with save_pretrained and open the folder"
            )
        num_draft_tokens = resolve_draft_tokens(num_draft_tokens, draft)
        draft = resolve_draft(draft)
        max_unread = integer("max_unread", max_unread)
        unused_weights = check_unused_weights(unused_weights)
        if not isinstance(adapters, Mapping | None):
            raise InvalidRequest(f"adapters={adapters!r:.80}: must be a dict of folders by name")
        matrices = {_adapter_name(n): read_adapter(f) for n, f in (adapters or {}).items()}

        source = ModelSource(model, dtype, revision, trust_remote_code, config, unused_weights)
        with on_cpu():
            if placement is not None:
                loaded = open_model(source, tokenizer, in_memory=False)
                loaded.quantization = quantized
            else:
                loaded = open_weights(open_model, source, quantized, tokenizer)
            handle = open_engine(
                loaded,
                options,
                draft=draft,
                num_draft_tokens=num_draft_tokens,
                weak=_weak,
                placement=placement,
                source=None if isinstance(model, nn.Module) else source.plain(loaded),
                max_unread=max_unread,
            )
        self._start(handle)
        try:
            for name, layers in matrices.items():
                handle.call_on_all(partial(handle.adapters.load, name, layers))
        except BaseException:
            self.close()
            raise

    @classmethod
    def _over(cls, engine: EngineHandle) -> LLM:
        """Return an LLM that wraps an open engine."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: EngineHandle) -> None:
        self.engine = engine
        self.name = engine.name
        self.tokenizer = engine.admission.tokenizer
        self.max_length = engine.admission.max_length

    @suggests_names
    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Result]:
        """Complete one prompt or several, and return the results in the order of the prompts.

        Args:
            prompts: a string, a list of ids, or a list of either.
            params: one for all prompts, or one per prompt. None: the defaults.
            progress: show a progress bar on stderr. None: only for several prompts that take more than a
                second, and if stderr is a terminal.

        Raises:
            InvalidRequest: an invalid prompt or parameter; raised before any forward runs.
            RequestFailed: no token can be drawn for a request. An exception in the model's own forward is
                raised unchanged. Either way, the other requests of the call are aborted.
        """
        with ExitStack() as bar:

            def admit() -> list[Request]:
                requests = self._admit_all(prompts, params)
                bar.enter_context(progress_bar(requests, progress))
                return requests

            return self.engine.admit_and_run(admit)

    async def agenerate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[Result]:
        """Run `generate` in asyncio: a thread runs the steps, and cancelling aborts the requests."""
        return await self.engine.arun(self._admit_all(prompts, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Stream the completion of one prompt. Leaving the loop early aborts the request."""
        return self.engine.stream(self._admit(prompt, params))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Run `stream` in asyncio: a thread runs the steps, and cancelling aborts the request."""
        return self.engine.astream([self._admit(prompt, params)])

    def score(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        *,
        adapter: str | None = None,
        progress: bool | None = None,
    ) -> list[Any]:
        """Return the log-prob of each token given the tokens before it, at temperature 1.

        Equals the `logprobs` that `generate` reports for the same ids, bit for bit.

        Args:
            adapter: as `SamplingParams.adapter`.
            progress: as in `generate`.

        Returns:
            A list of P entries for one prompt of P tokens, the first None; a list of such lists for
            several prompts.
        """
        results = self.generate(
            prompts,
            SamplingParams(max_tokens=0, prompt_logprobs=0, adapter=adapter),
            progress=progress,
        )
        scores = [result.prompt_logprobs for result in results]
        is_single = bool(results) and as_prompts(prompts)[1]
        return scores[0] or [] if is_single else scores

    def by_text(
        self, top_logprobs: SequenceOf[TopLogprobs | None]
    ) -> list[dict[str, float] | None]:
        """Return the `top_logprobs` of a completion or a prompt, keyed by the text of each token.

        If two ids have the same text, the likelier one is kept.

        Raises:
            NotSupported: the engine has no tokenizer.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise NotSupported("log-probs by text need a tokenizer, and this engine has none")
        return [
            None
            if entries is None
            else {tokenizer.decode([i], skip_special_tokens=False): p for i, p in entries[::-1]}
            for entries in top_logprobs
        ]

    def chat(
        self, messages: SequenceOf[dict[str, str]], params: SamplingParams | None = None
    ) -> Result:
        """Generate the assistant's answer to `messages`, each {"role": ..., "content": ...}."""
        return self.engine.admit_and_run(
            lambda: self._admit_all([self._chat_ids(messages)], params)
        )[0]

    def chat_stream(
        self, messages: SequenceOf[dict[str, str]], params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Stream the result of `chat`."""
        return self.stream(self._chat_ids(messages), params)

    def session(
        self,
        max_length: int | None = None,
        *,
        seed: int | None = None,
        params: SamplingParams | None = None,
        load: str | os.PathLike[str] | None = None,
        wait_s: float | None = 0.0,
        idle_timeout_s: float | None = None,
    ) -> Session:
        """Open a conversation that keeps its K and V between turns. Close it, or use a `with` block.

        Args:
            max_length: maximum tokens of the whole conversation. KV memory for all of them is reserved: the
                reservations of open sessions never exceed the KV cache. None: the LLM's `max_length`.
            seed: seed of all draws. None: random, reported by `session.seed`.
            params: sampling parameters of turns that pass none.
            load: a file written by `session.save`, to resume; its `max_length`, seed and params apply unless
                they are passed here.
            wait_s: seconds to wait for other sessions to free KV memory, at opening and whenever memory is
                needed again. None: no limit.
            idle_timeout_s: seconds without use after which the session's K, V and reservation are freed; its
                next turn makes a new reservation. None: never.

        Raises:
            OutOfBlocks: no KV memory became free within `wait_s`.
            InvalidRequest: a value out of range; a file that is not a session, or is from another model.
            VerbatimError: the file has K and V, and the engine is paused or asleep.
            EngineClosed: this LLM is closed.
        """
        self.engine.refuse_collective("a session")
        return Session(
            self.engine,
            max_length=max_length,
            seed=seed,
            params=params,
            load=load,
            wait_s=wait_s,
            idle_timeout_s=idle_timeout_s,
        )

    def rebalance(self) -> list[tuple[int, int]]:
        """Reassign a `Cluster`'s layers to its stages by measured speed; requests continue bit-identically.

        Returns:
            The layers of each stage as (first, end), with the end excluded.

        Raises:
            NotSupported: the placement is not a `Cluster`.
            StageFailed: a stage was lost and can't be replaced.
        """
        runner = self.engine.runner
        if not isinstance(runner, Clustered):
            raise NotSupported(
                "rebalance() moves layers between stages: it needs placement=Cluster(...)"
            )
        return self.engine.call(runner.rebalance)

    def pause(self, mode: str = "keep") -> None:
        """Stop the engine's steps until `resume()`, and return once they have stopped. Callers keep waiting.

        A request's `timeout_s` keeps counting. A single-threaded program that pauses and then generates
        waits until Ctrl-C.

        Args:
            mode: "keep": freeze running requests, which continue later bit-identically. "drain": finish
                running and queued requests first; new ones are queued. "abort": end all of them with finish
                reason "abort".

        Raises:
            InvalidRequest: an unknown mode.
            VerbatimError: draining while asleep.
        """
        self.engine.pause(mode)

    def resume(self) -> None:
        """Resume after `pause`; no effect if the engine is not paused.

        Raises:
            VerbatimError: the engine is asleep; `wake()` resumes as well.
        """
        self.engine.resume()

    def sleep(self, weights: bool = False) -> None:
        """Pause, and free the KV memory until `wake()`. Running requests then continue bit-identically.

        Args:
            weights: also free the memory of the weights; `wake()` reloads them from their files. Changes made
                through a parameter's `.data` can't be detected, and are lost.

        Raises:
            NotSupported: `weights` with a live module, or with weights that were changed after loading.
            ModelChanged: `weights`, and the files have changed.
            TierFailed: `weights` with an Offload, and its disk has no room for updated or quantized weights.
        """
        self.engine.sleep(switch("weights", weights))

    def wake(self) -> None:
        """Allocate the memory that `sleep` freed, and resume; no effect if the engine is not asleep.

        Raises:
            ModelChanged: the files of the weights have changed. The engine stays asleep.
            TierFailed: files of an offloaded model have changed or can't be read. The engine stays asleep.
        """
        self.engine.wake()

    def update_weights(
        self,
        weights: Weights,
        *,
        version: int | None = None,
        restart: bool = False,
        check_finite: bool = False,
    ) -> int:
        """Replace the model's weights in place: all of them or, on an error, none.

        Names, shapes and dtypes are checked before the first byte is written. The update happens between two
        steps, and drops the K and V of running requests and all cached prefixes.

        Args:
            weights: a state dict; pairs of name and tensor (an iterator is exhausted first, and its tensors
                are copied, since senders reuse their buffers); a folder of safetensors files, or one such
                file; or another module. Prefixes that wrappers (DDP, torch.compile) add to names are
                ignored. Tensors of another float dtype are rounded to the model's.
            version: version that completions report, such as the trainer's step, 0 or more. None: the
                previous version plus 1; versions start at 0.
            restart: restart running requests with the new weights, except streams that were already read
                from. By default all continue after the tokens they have, and K and V are recomputed.
            check_finite: reject NaN and infinite weights.

        Returns:
            The version. `Completion.weight_versions` has the version that generated each token.

        Raises:
            InvalidRequest: a missing or unknown name, a wrong shape or dtype, NaN; nothing was changed.
            NotSupported: sharded, sparse or quantized tensors.
            ModelError: the folder can't be read.
            VerbatimError: the weights are asleep.
        """
        version, runner = optional_integer("version", version, 0, 2**63 - 1), self.engine.runner
        check_finite = switch("check_finite", check_finite)
        tensors = named_weights(weights, lambda: str(self.engine.info()["dtype"]))
        return self.engine.update_weights(
            lambda: runner.new_weights(tensors, check_finite=check_finite),
            version=version,
            restart=switch("restart", restart),
        )

    def weights_changed(self, *, version: int | None = None, restart: bool = False) -> int:
        """Report that the weights of a live module have changed; not needed after `update_weights`.

        Rarely needed: the engine's next step detects an optimizer's step and counts it as an update, and no K
        and V are kept while no request runs. Only changes through a parameter's `.data` can't be detected.
        """
        return self.engine.update_weights(
            lambda: lambda: None,
            version=optional_integer("version", version, 0, 2**63 - 1),
            restart=switch("restart", restart),
        )

    def load_adapter(
        self, name: str, folder: str | os.PathLike[str], *, replace: bool = False
    ) -> None:
        """Load a LoRA adapter, which requests select by `SamplingParams.adapter`.

        The model itself and requests without the adapter are not affected. Cached prefixes belong to this
        adapter, not to a later one of the same name.

        Args:
            folder: a PEFT folder (adapter_config.json, adapter_model.safetensors) for linear layers, of rank
                256 at most.
            replace: replace the loaded adapter of this name, for later requests.

        Raises:
            InvalidRequest: the name is in use, or the adapter is for another model.
            NotSupported: another kind of adapter; or a layer or the placement does not support adapters.
            ModelError: the folder can't be read.
        """
        layers, replace = read_adapter(folder), switch("replace", replace)
        name, loaded = _adapter_name(name), self.engine.adapters
        self.engine.call_on_all(partial(loaded.load, name, layers, replace=replace))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter: new requests can't select it, and running ones finish with it.

        Raises:
            InvalidRequest: no adapter has this name.
        """
        self.engine.call_on_all(partial(self.engine.adapters.unload, _adapter_name(name)))

    @property
    def adapters(self) -> list[str]:
        """The names of the loaded adapters."""
        return self.engine.adapters.names

    def default_params(self) -> SamplingParams:
        """Return the sampling defaults of the model's generation_config.json.

        Raises:
            InvalidRequest: one of its values is out of range.
        """
        config = self.engine.generation_config
        fields = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
        defaults = {name: getattr(config, name, None) for name in fields}
        if not getattr(config, "do_sample", False):  # greedy, but with the penalty
            defaults = {"temperature": 0.0, "repetition_penalty": defaults["repetition_penalty"]}
        return SamplingParams(**{name: x for name, x in defaults.items() if x is not None})

    def stats(self) -> dict[str, Any]:
        """Return counts of forwards, tokens and preemptions, and the current load and state."""
        return self.engine.stats()

    def info(self) -> dict[str, Any]:
        """Return the properties of the model and of its placement, as plain values."""
        default_params: dict[str, Any] | str
        try:
            default_params = self.default_params().changed()
        except VerbatimError as error:
            default_params = f"unusable: {error}"
        return {"model": self.name, **self.engine.info(), "default_params": default_params}

    def close(self) -> None:
        """Free the KV cache and release the model; running requests end as "abort". May be called again."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admit(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        params = SamplingParams() if params is None else params
        return self.engine.admission.admit(prompt, params)

    def _admit_all(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
    ) -> list[Request]:
        if self.engine.may_be_empty and isinstance(prompts, list) and not prompts:
            return []
        items, _ = as_prompts(prompts)
        params_list = as_params(params, len(items))
        return [self.engine.admission.admit(p, q) for p, q in zip(items, params_list, strict=True)]

    def _admit_rows(self, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
        """Return a request for each prompt, all with one seed; row b draws with sample index b."""
        return [
            self.engine.admission.admit(prompt, params, first_sample=row)
            for row, prompt in enumerate(prompts)
        ]

    @property
    def pad_token_id(self) -> int:
        """Id that pads rows: the model's pad id, else an end-of-sequence id, else 0."""
        configs = self.engine.generation_config, self.engine.config
        return pad_id_of(configs, self.engine.admission.eos_ids)

    def _chat_ids(self, messages: SequenceOf[dict[str, str]]) -> list[int]:
        if self.tokenizer is None:
            raise NotSupported("chat needs a tokenizer, and this engine has none")
        return render_chat(self.tokenizer, list(messages))


def _adapter_name(name: Any) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise InvalidRequest(
            f"adapter={name!r:.80}: a name must be a string of printable characters"
        )
    return name
