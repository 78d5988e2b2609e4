"""`OptLM`: a model larger than its memory, and its `generate`."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, cast

import numpy as np
from torch import nn

from verbatim.compat.flexllmgen.arguments import Ask
from verbatim.compat.flexllmgen.config import OptConfig, check_config, find_model, get_opt_config
from verbatim.compat.flexllmgen.environment import ExecutionEnv
from verbatim.compat.flexllmgen.policy import Policy, offload_of, options_of
from verbatim.compat.flexllmgen.timings import Clock, Timings
from verbatim.core import FinishReason, Request
from verbatim.errors import EngineClosed, InvalidRequest, NotSupported, RequestFailed
from verbatim.llm import LLM
from verbatim.placement.offload.runner import Offloaded
from verbatim.placement.offload.runner import Timings as Spent
from verbatim.tensors import engine_of


class OptLM:
    """A model over three tiers, as FlexLLMGen opens it; any architecture that Verbatim runs.

    Args:
        config: a folder in Hugging Face's format, a hub id, the name of an OPT ("facebook/opt-30b"), or an
            `OptConfig`, which the model must agree with. Or what is open: an `LLM`, or a live transformers
            module, for which one engine is kept; then the others stay None.
        env: its disk is where K and V and activations go that leave memory.
        path: the folder of the model, or the one that holds it under its name. None: `config` tells.
        policy: where what lies, and how much computes at once. None lets Verbatim choose.

    Attributes:
        config: an `OptConfig` as it was given; else the model's own, transformers'.
        env, path, policy: as they were given.
        timings: of the latest `generate`.

    Raises:
        InvalidRequest, NotSupported: an argument out of range or not done, or one that nothing would use.
        ModelError, UnsupportedModel: the model can't be opened or run.
        TierFailed: a file or folder can't be read or written.
    """

    def __init__(
        self,
        config: OptConfig | str | os.PathLike[str] | LLM | nn.Module,
        env: ExecutionEnv | None = None,
        path: str | os.PathLike[str] | None = None,
        policy: Policy | None = None,
    ) -> None:
        _check_kind("env", env, ExecutionEnv)
        _check_kind("policy", policy, Policy)
        self.env, self.path, self.policy = env, path, policy
        self.timings = Timings()
        self._model: LLM | nn.Module
        self._closed = False
        self._end: Callable[[], object] | None = None  # of an engine of our own
        if isinstance(config, LLM | nn.Module):
            self._refuse_settings(type(config).__name__)
            self._model = config
            self.config: Any = self.llm.engine.config
            return
        if not isinstance(config, OptConfig | str | os.PathLike):
            raise InvalidRequest(
                f"config={config!r}: must be an OptConfig, a folder, a hub id or name, an LLM or a module"
            )
        llm = self._model = self._open(config)
        self.config = config if isinstance(config, OptConfig) else llm.engine.config
        self._end = weakref.finalize(self, llm.close)
        if env is not None:
            env._models.add(self)

    def _refuse_settings(self, kind: str) -> None:
        for name in ("env", "path", "policy"):
            if getattr(self, name) is not None:
                raise InvalidRequest(
                    f"{name}={getattr(self, name)!r}: the config is an {kind}, which is open already; "
                    "leave it at None"
                )

    def _open(self, config: OptConfig | str | os.PathLike[str]) -> LLM:
        settled = config if isinstance(config, OptConfig) else _known(config)
        source = find_model(config, self.path)
        disk = None if self.env is None else self.env.disk.path
        llm = LLM(source, placement=offload_of(self.policy, disk), **options_of(self.policy))
        try:
            if settled is not None:
                by_name = not isinstance(config, OptConfig)
                check_config(settled, llm.engine.config, by_name=by_name)
        except BaseException:
            llm.close()
            raise
        return llm

    @property
    def llm(self) -> LLM:
        """The engine: every sampling option, streams, scores.

        Raises:
            EngineClosed: after `close`.
        """
        if self._closed:
            raise EngineClosed("this OptLM was closed")
        return engine_of(self._model)

    @property
    def num_gpu_batches(self) -> int | None:
        """Of the policy, or of Verbatim's own plan; None for a model that is not offloaded."""
        runner = self.llm.engine.runner
        return runner.plan.micro_batches if isinstance(runner, Offloaded) else None

    @property
    def pad_token_id(self) -> int:
        """The `OptConfig`'s if one was given, the model's, its tokenizer's, an end of sequence, or else 0."""
        if isinstance(self.config, OptConfig):
            return self.config.pad_token_id
        llm = self.llm
        tokenizer = None if llm.tokenizer is None else llm.tokenizer.hf
        for source in (llm.engine.generation_config, llm.engine.config, tokenizer):
            found = getattr(source, "pad_token_id", None)
            if isinstance(found, int) and found >= 0:
                return found
        return llm.pad_token_id

    def generate(
        self,
        inputs: np.ndarray[Any, Any] | Sequence[Sequence[int]],
        max_new_tokens: int = 32,
        do_sample: bool = False,
        temperature: float = 1.0,
        stop: int | None = None,
        debug_mode: str | None = None,
        cut_gen_len: int | None = None,
        verbose: int = 0,
        *,
        attention_mask: Any = None,
        seed: int | None = None,
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Continue each row of `inputs`. How many there are is free: more than a block wait for a seat.

        Args:
            inputs: ids `[B, P]`, or lists of ids, of which short ones get pads in front. The pads in front
                of a row are no part of its prompt; those behind its first other id are.
            max_new_tokens: columns behind the prompt.
            do_sample: False takes the likeliest token.
            temperature: of sampling; 0 takes the likeliest token.
            stop: the id that ends a row; it stays, and pads follow. Nothing else ends a row, the model's
                end of sequence neither.
            debug_mode: "fewer_batch" runs the first block of rows alone, and 5 tokens at most of each;
                "breakdown" tells load, compute and store apart. Both leave their numbers in `timings`.
            cut_gen_len: makes this many tokens at most; the rest of the columns are pads.
            verbose: 1 writes what is run and what it took to stderr, 2 each step as well.
            attention_mask: `[B, P]`, ours: 0 marks pads, all in front, in place of their id.
            seed: ours: row b draws with it and with sample index b. Without, a number is drawn from torch's
                default generator when something is sampled.

        Returns:
            `[B, P + max_new_tokens]` int32: the rows as given (with their pads), the new ids, and pads.

        Raises:
            InvalidRequest, PromptTooLong: before any token is made.
            NotSupported: "breakdown" of a model that is not offloaded.
            RequestFailed: a row from which nothing can be drawn. TierFailed: a tier failed on the way; the
                engine is closed then.
        """
        llm, pad_id = self.llm, self.pad_token_id
        ask = Ask.of(
            inputs,
            attention_mask,
            max_new_tokens,
            do_sample,
            temperature,
            stop,
            debug_mode,
            cut_gen_len,
            verbose,
            seed,
            pad_id=pad_id,
            vocab_size=llm.engine.admission.vocab_size,
            block=llm.engine.scheduler.max_sequences,
        )
        spent = _spent(llm) if ask.breakdown else None
        requests = llm._admit_rows(ask.prompts, ask.params) if ask.run_tokens else []
        if ask.verbose:
            _say(_description(llm, ask))
        self.timings = _timed(llm, requests, spent, ask.verbose)
        self.timings.project(len(ask.ids), ask.new_tokens, ask.run_tokens)
        if ask.verbose:
            _say(*self.timings.lines())
        return ask.joined([request.sequences[0].output_ids for request in requests], pad_id)

    def delete_all_weights(self) -> None:
        """Free everything, as `close` does. Again does nothing."""
        self.close()

    def close(self) -> None:
        """Close the engine that was opened here; an `LLM` or a module that was given stays as it is."""
        self._closed = True
        if self._end is not None:
            self._end()

    def __enter__(self) -> OptLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _timed(
    llm: LLM, requests: list[Request], spent: Callable[[], Spent] | None, verbose: int
) -> Timings:
    """Run `requests` to their end, looking at the clock after each step."""
    clock = Clock(requests, spent)
    if not requests:
        return clock.timings
    with closing(cast("Generator[None]", llm.engine.steps(requests))) as steps:
        for _ in steps:
            tokens = clock.lap()
            if verbose > 1 and tokens:
                costs = clock.timings.costs
                _say(f"step {len(costs)}: {costs[-1]:.3f} s, {tokens} tokens")
    for row, request in enumerate(requests):
        if request.sequences[0].finish_reason is FinishReason.ABORT:
            raise RequestFailed(f"row {row} was ended from outside, by close() or pause('abort')")
    return clock.timings


def _spent(llm: LLM) -> Callable[[], Spent]:
    runner = llm.engine.runner
    if not isinstance(runner, Offloaded):
        raise NotSupported(
            "debug_mode='breakdown': nothing is loaded or stored by a model that is not offloaded; open it "
            "with a policy, or as LLM(folder, placement=Offload())"
        )
    return runner.timings


def _description(llm: LLM, ask: Ask) -> str:
    run, given = len(ask.prompts), len(ask.ids)
    rows = f"{run} rows" if run == given else f"{run} of {given} rows"
    found = f"{llm.name}: {rows} of up to {ask.ids.shape[1]} tokens, {ask.run_tokens} new ones each"
    runner = llm.engine.runner
    if not isinstance(runner, Offloaded):
        return found
    plan = runner.plan
    tiers = {"weights": plan.weights, "cache": plan.kv, "activations": plan.activations}
    places = (f"{name} {'/'.join(f'{p:g}' for p in percents)}" for name, percents in tiers.items())
    return f"{found}; blocks of {plan.batch_size} x {plan.micro_batches}; {', '.join(places)}"


def _say(*lines: str) -> None:
    for line in lines:
        sys.stderr.write(f"flexllmgen: {line}\n")
    sys.stderr.flush()


def _known(name: str | os.PathLike[str]) -> OptConfig | None:
    """The config that a name stands for; None for other models."""
    try:
        return get_opt_config(os.fspath(name))
    except InvalidRequest:
        return None


def _check_kind(name: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{name}={value!r}: must be {kind.__name__} or None")
