"""`LLM`, the front door: open a model, generate, stream, score, chat, close."""

from __future__ import annotations

import operator
import os
from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from typing import Any

import torch
from torch import nn

from verbatim.core import Delta, Request, Result, TopLogprobs
from verbatim.device import refuse_on_gpu, settle_device
from verbatim.draft.config import DraftOptions, resolve_draft, resolve_draft_tokens
from verbatim.engine.admission import Prompt
from verbatim.engine.handle import EngineHandle
from verbatim.errors import InvalidRequest, NotSupported, VerbatimError
from verbatim.model.loader import LoadedModel, ModelSource, Skeleton
from verbatim.model.quantization import Quantization
from verbatim.model.weights import Weights, named_weights
from verbatim.opening import open_engine, open_runner
from verbatim.options import positive, switch
from verbatim.params import SamplingParams
from verbatim.placement.cluster.choice import Cluster
from verbatim.placement.cluster.runner import Clustered
from verbatim.placement.offload.checkpoint import open_skeleton
from verbatim.placement.offload.choice import Offload
from verbatim.placement.options import EngineOptions, engine_options
from verbatim.placement.packing import open_packed, refuse_unpacked
from verbatim.placement.parallel.choice import PipelineParallel, Ranked
from verbatim.prompts import as_params, as_prompts
from verbatim.protocols import Runner
from verbatim.session import Session
from verbatim.source import open_model
from verbatim.text.chat import render_chat


class LLM:
    """One model, opened for generation.

    Args:
        model: None for the small model inside the package; a folder in Hugging Face's format or a hub
            id; a DCP folder, or the one whose `latest` leads to it; or a live module, transformers'
            or one with `kv_caches`, which is used in place: never copied, moved or repacked.
        tokenizer: a transformers tokenizer, or a folder or hub id of one; None takes the model's own.
            A live module has none of its own: without one, ids go in and out.
        device: "cpu", or "cuda" (or "cuda:1" and so on) for a GPU, to which a model that we load is moved.
            "auto" is where a live module is, and the CPU for everything else. docs/gpu.md says what is done
            on a GPU and what is not.
        dtype: "auto" (the checkpoint's), "float32" or "bfloat16". A live module keeps its own.
        kv_dtype: of the KV store; "auto" (that of the model's keys), "float32", "bfloat16", or "int8"
            and "int4": groups of 8 or 4 bits, about half and a third of bfloat16's bytes.
        kv_memory: what the KV store may take: bytes, "512MB", or a share of RAM or of the GPU's memory
            ("40%"). None takes up to 40% of what is available now, and no more than `max_sequences` full
            sequences need.
        block_size: token positions in a KV block.
        max_batch_tokens: rows of one forward; longer prompts are prefilled in chunks. None: 2048, or with
            `Offload` what its plan chooses.
        max_sequences: sequences that run at once.
        max_waiting: requests that may wait for a seat; more are refused with QueueFull. None: any number.
        max_unread: pieces of a stream that may wait for a reader who does not read; one more, and the
            request ends with RequestFailed.
        max_length: prompt and completion together; None takes the model's limit.
        deterministic: True gives every answer the same bits in every schedule. On the CPU it always does;
            on a GPU "auto" and False leave products to torch, which is faster.
        num_threads: of torch's pool while this engine computes; None leaves torch's setting.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: let a checkpoint's own Python code run.
        prefix_cache: reuse the K and V of prompts that begin alike. Of a live module, whose weights may
            change at any time, only while something runs.
        config: what a folder of torch.distributed.checkpoint (DCP) is a checkpoint of, which needs one:
            KempnerForge's TOML (a path that ends in .toml), a transformers config, or the folder,
            config.json or hub id of one. None for everything else.
        draft: who guesses tokens ahead, which the model then looks at in one forward; no word depends on
            it. None, "ngram", "mtp", "early-exit", the folder or hub id of a smaller model with the same
            tokenizer, or such a module; or one of `verbatim.draft`'s classes, with their own settings; or
            anything with the method of `verbatim.draft.Proposer`.
        num_draft_tokens: tokens of each draft, 0 to 64; None takes as many, up to 8, as pay.
        placement: where the model lives. None: in this process's memory; or an `Offload`, a
            `Cluster`, a `TensorParallel`, a `PipelineParallel` or an `ExpertParallel`.
        quantization: of the weights of a folder or hub id, in memory or with `placement=Offload(...)`:
            "int8", "int4", or a `Quantization` with another size of its groups. Packed once and kept in the
            user's cache. "w8a8" and "w4a8" (`activation_bits=8`) round what linear layers multiply them with
            to 8 bits, too: faster at many rows, a little further off, and not with a placement. None leaves
            them as they are. Of what is packed and how far off it is, `info` tells.
        fused: run layers of the common shape by a call of the compiled kernels each, which changes no bit of
            what comes out; `info` tells which layers are. False runs them module by module; a `Cluster` and
            a `PipelineParallel` don't take it, and an `Offload` never fuses.

    Attributes:
        engine: the `EngineHandle` that all calls go through.
        name: what the model was opened by.
        tokenizer: None where only ids go in and out.
        max_length: tokens of prompt and completion together.

    Raises:
        ModelError, UnsupportedModel: the model can't be opened or can't be run on flat batches.
        InvalidRequest, NotSupported: an option out of range or not built.
        OutOfBlocks: `kv_memory` is too small for one block.
    """

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
        fused: bool = True,
        deterministic: bool | str = "auto",
        num_threads: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        config: Any = None,
        _weak: bool = False,
    ) -> None:
        placed = settle_device(device, deterministic, model)
        if placement is not None and not isinstance(placement, Offload | Cluster | Ranked):
            raise NotSupported(
                f"placement={placement!r}: must be None, an Offload, a Cluster, a TensorParallel, a "
                "PipelineParallel or an ExpertParallel"
            )
        offload = placement if isinstance(placement, Offload) else None
        ranks = placement if isinstance(placement, Ranked) else None
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
            num_threads=num_threads,
            fused=fused,
            device=placed,
        )
        if not options.fused and isinstance(placement, Cluster | PipelineParallel):
            raise NotSupported(
                f"fused=False: with placement={placement!r} each stage decides itself"
            )
        in_few_bits = options.quantization if offload is None else None
        if in_few_bits is not None:
            refuse_unpacked(model, placement, in_few_bits)
        drafts = DraftOptions(
            resolve_draft(draft),
            num_tokens=resolve_draft_tokens(num_draft_tokens, draft),
        )
        refuse_on_gpu(
            placed,
            placement=placement,
            quantization=quantization,
            kv_dtype=options.kv_dtype,
            draft=drafts.draft,
        )
        max_unread = positive("max_unread", max_unread)

        def open_(skeleton: Skeleton | None) -> LoadedModel:
            return open_model(
                model,
                tokenizer,
                dtype,
                revision,
                trust_remote_code,
                config,
                skeleton=skeleton,
            )

        if in_few_bits is None:
            loaded = open_(None if placement is None else open_skeleton)
        else:
            loaded = open_packed(open_, in_few_bits)
        handle = open_engine(
            loaded,
            options,
            drafts,
            weak=_weak,
            offload=offload,
            ranks=ranks,
            cluster=placement if isinstance(placement, Cluster) else None,
            origin=None
            if isinstance(model, nn.Module)
            else ModelSource.of(model, dtype, revision, trust_remote_code, loaded),
            trust_remote_code=trust_remote_code,
            max_unread=max_unread,
        )
        self._start(handle)

    @classmethod
    def _over(
        cls,
        runner: Runner,
        options: EngineOptions,
        *,
        name: str,
        tokenizer: Any = None,
        max_length: tuple[int | None, str] = (None, ""),
        eos_ids: frozenset[int] = frozenset(),
    ) -> LLM:
        """An LLM over a runner that a door has made, for a model that `LLM(...)` doesn't open.

        Args:
            max_length: in tokens, and where the number comes from; None is what the blocks hold.
        """
        llm = cls.__new__(cls)
        handle = open_runner(
            runner,
            options,
            name=name,
            tokenizer=tokenizer,
            limit=max_length,
            eos_ids=eos_ids,
            live=True,
        )
        llm._start(handle)
        return llm

    def _start(self, engine: EngineHandle) -> None:
        self.engine = engine
        self.name = engine.name
        self.tokenizer = engine.admission.tokenizer
        self.max_length = engine.admission.max_length

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[Result]:
        """Completions of one prompt or many, in the order of the prompts.

        Args:
            prompts: a string, a list of ids, or a list of those.
            params: one for all prompts, or one each.

        Raises:
            InvalidRequest: before any forward runs, for whatever prompt or parameter is at fault.
            RequestFailed: nothing can be drawn for a request. An exception thrown inside the model's
                own forward is raised as it is. The other requests have ended then, too.
        """
        return self.engine.run(self._admit_all(prompts, params))

    async def agenerate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[Result]:
        """`generate` for asyncio: a thread makes the steps, and cancelling aborts the requests."""
        return await self.engine.arun(self._admit_all(prompts, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """One prompt's completion as it grows. Leaving the loop early aborts the request."""
        return self.engine.stream(self.engine.admission.admit(prompt, params or SamplingParams()))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """`stream` for asyncio: a thread makes the steps, and cancelling aborts the request."""
        return self._astream(self.engine.admission.admit(prompt, params or SamplingParams()))

    async def _astream(self, request: Request) -> AsyncIterator[Delta]:
        async with aclosing(self.engine.astream([request])) as deltas:
            async for _, delta in deltas:
                yield delta

    def score(self, prompts: Prompt | SequenceOf[Prompt]) -> list[Any]:
        """The log-prob of each token given those before it, at temperature 1.

        Bit for bit the `logprobs` that generation reports for the same ids.

        Returns:
            For one prompt of P tokens a list of P entries, the first None; for many prompts a list
            of such lists.
        """
        many, single = as_prompts(prompts)
        results = self.generate(many, SamplingParams(max_tokens=0, prompt_logprobs=0))
        scores = [result.prompt_logprobs for result in results]
        return scores[0] or [] if single else scores

    def by_text(
        self, top_logprobs: SequenceOf[TopLogprobs | None]
    ) -> list[dict[str, float] | None]:
        """A completion's `top_logprobs`, or a prompt's, with the text of each id in place of the id.

        Where two ids have the same text, the likelier one is kept.

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
        """The assistant's next turn after `messages`, each {"role": ..., "content": ...}."""
        return self.generate([self._chat_ids(messages)], params)[0]

    def chat_stream(
        self, messages: SequenceOf[dict[str, str]], params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """`chat`, as it grows."""
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
        """Open a conversation whose K and V stay between its turns; close it, or use it in a `with` block.

        Args:
            max_length: tokens that it may come to, given and made. Room for so many is reserved: open
                sessions together never reserve more than the KV memory holds. None takes the LLM's.
            seed: of all its draws; None takes a fresh one, which `session.seed` tells.
            params: for turns that are given none.
            load: a file that `session.save` wrote, to go on with; its `max_length`, seed and params stand
                where none are given here.
            wait_s: how long to wait for room until other sessions end, when it is opened and whenever it
                needs room again; None waits as long as it takes.
            idle_timeout_s: unused for so long, it gives its K, V and room back, and takes them again in its
                next turn. None keeps them.

        Raises:
            OutOfBlocks: no room within `wait_s`.
            InvalidRequest: a value out of range; a file that is no session, or one of another model's.
            EngineClosed: this LLM is closed.
        """
        if self.engine.collective is not None:
            raise NotSupported(
                "a session: where each rank is a process of the user's, they make their calls together, and "
                "generate, score and chat are what they can make"
            )
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
        """Divide the layers of a `Cluster` anew over its stages, by how fast each has shown to be; what runs
        goes on, on the same bits.

        Returns:
            The layers of each stage from now on: the first, and the one behind the last.

        Raises:
            NotSupported: another placement.
            StageFailed: a stage was lost meanwhile, and can't be replaced.
        """
        runner = self.engine.runner
        if not isinstance(runner, Clustered):
            raise NotSupported(
                "rebalance() moves layers between stages: it needs placement=Cluster(...)"
            )
        return self.engine.call(runner.rebalance)

    def pause(self, mode: str = "keep") -> None:
        """Make no more steps until `resume()`; returns when that is so. Callers that wait go on waiting.

        Args:
            mode: "keep": what runs stops where it is and goes on later, on the same bits. "drain": what
                runs or waits is finished first, and newcomers wait. "abort": all of it ends as "abort".

        Raises:
            InvalidRequest: another mode.
        """
        self.engine.pause(mode)

    def resume(self) -> None:
        """Go on after `pause`; harmless where nothing is paused."""
        self.engine.resume()

    def sleep(self, weights: bool = False) -> None:
        """Pause, and give the KV memory back until `wake()`; what runs goes on then, on the same bits.

        Args:
            weights: give back the memory of the weights as well, which `wake()` reads again from their
                files. A live module keeps its own. Changes made through a parameter's `.data` can't be
                seen, and are lost.

        Raises:
            NotSupported: the weights of a live module, or weights that were changed since they were read.
            ModelChanged: their files were.
        """
        self.engine.sleep(weights)

    def wake(self) -> None:
        """Take back what `sleep` gave away, and resume; harmless where nothing sleeps.

        Raises:
            ModelChanged: the files of the weights are others by now. The engine sleeps on.
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
        """New weights for the model, in place: all of them or, where one is wrong, none.

        Names, shapes and dtypes are checked before the first byte is written. It happens between two
        steps: K and V of whatever runs, and all cached prefixes, are of the old weights and are dropped.

        Args:
            weights: a state dict, pairs of a name and a tensor (an iterator is read to its end first, and
                its tensors are copied, since senders use their buffers again), a folder of safetensors
                files or one such file, or another module. What wrappers (DDP, torch.compile) add to names
                makes no difference. Tensors of another float dtype are rounded to the model's.
            version: what completions report the new weights as, such as the trainer's step, 0 or more; None
                counts on from the version before, and from 0.
            restart: what runs begins again with the new weights; only a stream goes on of which something
                was read. By default everything goes on from the tokens it has, recomputing their K and V.
            check_finite: refuse weights that are NaN or infinite.

        Returns:
            The version: `Completion.weight_versions` tells which one made each token.

        Raises:
            InvalidRequest: a missing or unknown name, another shape, a dtype that doesn't fit, NaN;
                nothing has changed then.
            NotSupported: sharded, sparse or quantized tensors. ModelError: a folder that can't be read.
            VerbatimError: the weights sleep.
        """
        version, runner = _as_version(version), self.engine.runner
        check_finite = switch("check_finite", check_finite)
        tensors = named_weights(weights)
        return self.engine.update_weights(
            lambda: runner.new_weights(tensors, check_finite=check_finite),
            version=version,
            restart=switch("restart", restart),
        )

    def weights_changed(self, *, version: int | None = None, restart: bool = False) -> int:
        """Tell that the weights of a live module have changed, as `update_weights` does of its own.

        Seldom needed: an optimizer's step is seen, and counted, at the next step of the engine; and when
        nothing runs no K and V are kept. Only changes through a parameter's `.data` can't be seen.
        """
        return self.engine.update_weights(
            lambda: lambda: None,
            version=_as_version(version),
            restart=switch("restart", restart),
        )

    def default_params(self) -> SamplingParams:
        """The sampling that the model's generation_config.json suggests; used by the chat command alone.

        Raises:
            InvalidRequest: it suggests a value out of range.
        """
        config = self.engine.generation_config
        if config is None or not getattr(config, "do_sample", False):
            return SamplingParams(temperature=0.0)
        fields = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
        found = {name: getattr(config, name, None) for name in fields}
        return SamplingParams(**{name: value for name, value in found.items() if value is not None})

    def stats(self) -> dict[str, Any]:
        """Forwards, tokens and preemptions so far; sequences and blocks now, and whether it is paused."""
        return self.engine.stats()

    def info(self) -> dict[str, Any]:
        """What was opened and how it is run, as plain values."""
        return {
            "model": self.name,
            **self.engine.info(),
            "default_params": self._default_params_or_why_not(),
        }

    def _default_params_or_why_not(self) -> dict[str, Any] | str:
        try:
            return _plain_params(self.default_params())
        except VerbatimError as error:
            return f"unusable: {error}"

    def close(self) -> None:
        """Free the KV store and let go of the model; what is running ends as "abort". Again does nothing."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admit_all(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
    ) -> list[Request]:
        collective = self.engine.collective
        if collective is not None and collective.may_be_empty and prompts == []:
            return []
        many, _ = as_prompts(prompts)
        each = as_params(params, len(many))
        return [self.engine.admission.admit(p, q) for p, q in zip(many, each, strict=True)]

    def _generate_rows(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """New ids for each prompt, all under one seed, row b drawing with sample index b."""
        results = self.engine.run(self._admit_rows(prompts, params))
        return [result.outputs[0].token_ids for result in results]

    def _admit_rows(self, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
        return [
            self.engine.admission.admit(prompt, params, first_sample=row)
            for row, prompt in enumerate(prompts)
        ]

    @property
    def can_record_routing(self) -> bool:
        """Has the model experts, whose choice for each token can be recorded?"""
        return self.engine.runner.routed_layers > 0

    @property
    def routing_shape(self) -> tuple[int, int]:
        """Layers whose routing is recorded, and experts for each token in them."""
        return self.engine.runner.routed_layers, self.engine.runner.experts_per_token

    @property
    def pad_token_id(self) -> int:
        """What fills a row after its end: the model's pad id, else an end-of-sequence id, else 0."""
        for config in (self.engine.generation_config, self.engine.config):
            pad = getattr(config, "pad_token_id", None)
            if isinstance(pad, int) and pad >= 0:
                return pad
        return min(self.engine.admission.eos_ids, default=0)

    def _chat_ids(self, messages: SequenceOf[dict[str, str]]) -> list[int]:
        if self.tokenizer is None:
            raise NotSupported("chat needs a tokenizer, and this engine has none")
        return render_chat(self.tokenizer, list(messages))


def _as_version(version: Any) -> int | None:
    if version is None:
        return None
    if isinstance(version, bool) or not hasattr(version, "__index__"):
        raise InvalidRequest(f"version={version!r}: must be an integer or None")
    if not 0 <= (number := operator.index(version)) < 2**63:
        raise InvalidRequest(f"version={version}: must be from 0 to {2**63 - 1}")
    return number


def _plain_params(params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    names = [name for name in SamplingParams.__slots__ if name != "logits_processors"]
    return {
        name: getattr(params, name)
        for name in names
        if getattr(params, name) != getattr(default, name)
    }
