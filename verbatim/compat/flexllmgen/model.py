"""`OptLM`: a model larger than its memory, and its `generate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verbatim.api.llm import LLM
from verbatim.api.padded import PaddedRows, pad_rows
from verbatim.api.tensors import draw_seed
from verbatim.common.checks import check_kind, integer, optional_integer, switch
from verbatim.compat.flexllmgen.config import OptConfig, check_config, config_by_name, find_model
from verbatim.compat.flexllmgen.policy import ExecutionEnv, Policy, options_of
from verbatim.compat.shared import HasEngine, declared_pad_id, new_rows
from verbatim.core import Request
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.params import SamplingParams

Spent = Callable[[], Sequence[float]]  # returns load, compute and store so far, in seconds
_PARTS = ("load_s", "compute_s", "store_s")


@dataclass(slots=True)
class Phase:
    """Timings of the prefill steps, or of the decoding steps.

    Attributes:
        num_steps: forwards that generated a token.
        wall_s: elapsed seconds.
        load_s: seconds the computing thread waited for weights, K and V and activations; with
            `overlap=False`, all time spent reading. Like the next two, None without `debug_mode="breakdown"`.
        compute_s: seconds spent in the model's layers.
        store_s: seconds the computing thread waited for writes of K and V and activations.
    """

    num_steps: int = 0
    wall_s: float = 0.0
    load_s: float | None = None
    compute_s: float | None = None
    store_s: float | None = None

    @property
    def other_s(self) -> float | None:
        """The rest of `wall_s`: scheduling, sampling and output."""
        parts = [getattr(self, name) for name in _PARTS]
        return None if None in parts else self.wall_s - sum(parts)


@dataclass(slots=True)
class Timings:
    """Timings of one `generate`.

    Attributes:
        num_rows: number of rows run.
        costs: seconds of each step; all steps of a prompt count towards its first token's.
        prefill: the steps that computed part of any row's prompt.
        decode: the other steps.
        projected_s: if `debug_mode="fewer_batch"` or `cut_gen_len` left work out, an estimate of
            the whole without stops. None if everything was run.
    """

    num_rows: int = 0
    costs: list[float] = field(default_factory=list)
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    projected_s: float | None = None

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return self.prefill.wall_s + self.decode.wall_s

    def project(self, rows: int, new_tokens: int, ran: int) -> None:
        """Estimate the time of `rows` rows and `new_tokens` tokens from `num_rows` rows and `ran` tokens.

        Decode time is assumed proportional to the tokens (slightly too low, because the context grows), and
        the total proportional to the rows.
        """
        if not self.num_rows or (rows == self.num_rows and new_tokens <= ran):
            return
        decode = self.decode.wall_s * (new_tokens - 1) / (ran - 1) if ran > 1 else 0.0
        self.projected_s = (self.prefill.wall_s + decode) * rows / self.num_rows

    def lines(self) -> list[str]:
        """Return a readable summary."""
        lines = []
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            line = f"{name}: {phase.wall_s:.3f} s in {phase.num_steps} steps"
            if phase.other_s is not None:
                line += f" (load {phase.load_s:.3f}, compute {phase.compute_s:.3f}"
                line += f", store {phase.store_s:.3f}, other {phase.other_s:.3f})"
            lines.append(line)
        if self.projected_s is not None:
            lines.append(f"projected for the whole: {self.projected_s:.3f} s (an estimate)")
        return lines


class Clock:
    """Attributes the time of each step to prefill or decoding; `spent` is None if it is not measured."""

    def __init__(self, requests: list[Request], spent: Spent | None) -> None:
        self._requests = requests
        self._read_spent: Spent = spent or tuple
        self._last = self._read()
        zeros = [0.0 for _ in self._last[0]]
        self.timings = Timings(len(requests), [], Phase(0, *zeros), Phase(0, *zeros))

    def lap(self) -> int:
        """Record a step; return the number of tokens that it generated."""
        (before, tokens, progress), self._last = self._last, self._read()
        now, tokens_now, progress_now = self._last
        seconds = [new - old for new, old in zip(now, before, strict=True)]
        phase = self.timings.decode if progress == progress_now else self.timings.prefill
        for name, spent in zip(("wall_s", *_PARTS), seconds, strict=False):
            setattr(phase, name, getattr(phase, name) + spent)
        if tokens_now > tokens:
            phase.num_steps += 1
            self.timings.costs.append(seconds[0])
        elif self.timings.costs:
            self.timings.costs[-1] += seconds[0]
        return tokens_now - tokens

    def _read(self) -> tuple[list[float], int, tuple[int, int]]:
        """Return the time and `spent`, the number of generated tokens, and the progress of prefill.

        The progress is the number of rows with new tokens, and the computed prompt tokens of the other rows.
        """
        rows = [request.sequences[0] for request in self._requests]
        begun = sum(bool(row.output_ids) for row in rows)
        computed = sum(row.num_computed for row in rows if not row.output_ids)
        tokens = sum(len(row.output_ids) for row in rows)
        return [perf_counter(), *self._read_spent()], tokens, (begun, computed)


_FEW_TOKENS = 5  # limit of "fewer_batch": one token from prefill and four from decode
_LARGEST_ID = 2**31 - 1  # of int32


class OptLM(HasEngine):
    """An offloaded model with FlexLLMGen's interface, of any architecture that Verbatim runs.

    Args:
        config: a folder in Hugging Face's format, a hub id, the name of an OPT ("facebook/opt-30b"), or an
            `OptConfig`, which the model must match. Or an open `LLM`, or a live transformers
            module, for which one engine is kept; then leave the other arguments at None.
        env: the tiers; the disk tier holds offloaded K and V and activations.
        path: the folder of the model, or its parent. None: `config` names the model.
        policy: placement and batch sizes; None lets Verbatim choose.

    Attributes:
        config: the given `OptConfig`; else the model's transformers config.
        env, path, policy: the arguments.
        timings: timings of the latest `generate`.

    Raises:
        InvalidRequest, NotSupported: an argument that is out of range, unsupported, or without effect.
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
        for name, value, kind in (("env", env, ExecutionEnv), ("policy", policy, Policy)):
            check_kind(name, value, kind | None, f"{kind.__name__} or None")
        self.env, self.path, self.policy = env, path, policy
        self.timings = Timings()
        if isinstance(config, LLM | nn.Module):
            for name in ("env", "path", "policy"):
                if (argument := getattr(self, name)) is not None:
                    raise InvalidRequest(
                        f"{name}={argument!r}: the config is an {type(config).__name__}, "
                        "which is open already; leave it at None"
                    )
            self._source = config
            self.config: Any = self.llm.engine.config
            return
        expected_kinds = "an OptConfig, a folder, a hub id or name, an LLM or a module"
        check_kind("config", config, OptConfig | str | os.PathLike, expected_kinds)
        by_name = not isinstance(config, OptConfig)
        expected = config if isinstance(config, OptConfig) else config_by_name(os.fspath(config))
        disk = None if env is None else env.disk.path
        on_cpu = policy is not None and policy.cpu_cache_compute
        device = "cuda" if torch.cuda.is_available() and not on_cpu else "auto"
        options = options_of(policy, disk)
        llm = self._source = LLM(
            find_model(config, path), device=device, deterministic=True, **options
        )
        self._close_with(llm)
        try:
            if expected is not None:
                check_config(expected, llm.engine.config, by_name=by_name)
        except BaseException:
            self.close()
            raise
        self.config = llm.engine.config if by_name else config
        if env is not None:
            env._models.add(self)

    @property
    def num_gpu_batches(self) -> int | None:
        """Batches per block, from the policy or Verbatim's plan; None if the model is not offloaded."""
        plan = self.llm.info().get("plan")
        return None if plan is None else int(plan["micro_batches"])

    @property
    def pad_token_id(self) -> int:
        """The pad id of the `OptConfig`, the model or the tokenizer; else an EOS id, else 0."""
        if isinstance(self.config, OptConfig):
            return self.config.pad_token_id
        llm = self.llm
        configs = llm.engine.generation_config, llm.engine.config
        pad_id = declared_pad_id(*configs, getattr(llm.tokenizer, "hf", None))
        return llm.pad_token_id if pad_id is None else pad_id

    def generate(
        self,
        inputs: np.ndarray[Any, Any] | Sequence[Sequence[int]],
        max_new_tokens: int = 32,
        do_sample: bool = False,
        temperature: float = 1.0,
        stop: int | str | None = None,
        debug_mode: str | None = None,
        cut_gen_len: int | None = None,
        verbose: int = 0,
        *,
        attention_mask: Any = None,
        seed: int | None = None,
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Continue each row of `inputs`; rows beyond one block are queued.

        Args:
            inputs: ids `[B, P]`, or lists of ids, which are padded on the left. Leading pads
                are not part of a prompt; later ones are. The prompt of a row with only pads is one pad.
            max_new_tokens: number of columns after the prompt.
            do_sample: False always takes the likeliest token.
            temperature: sampling temperature; 0 takes the likeliest token.
            stop: the id that ends a row, or the text of one token. It stays in the row, and pads follow. The
                model's EOS ids do not end a row.
            debug_mode: "fewer_batch" runs only the first block of rows, for at most 5 tokens;
                "breakdown" measures load, compute and store separately, and writes the timings to
                stderr. Results are in `timings`.
            cut_gen_len: generate at most this many tokens; the other columns are pads.
            verbose: 1 writes a summary and timings to stderr, 2 each step as well.
            attention_mask: `[B, P]`, an extension: 0 marks left padding, regardless of its ids.
            seed: an extension: row b draws with this seed and sample index b. By default, when sampling, it
                is drawn from torch's default generator.

        Returns:
            `[B, P + max_new_tokens]` int32: the rows of `inputs` with their pads, the new ids, and pads.

        Raises:
            InvalidRequest, PromptTooLong: before any token is generated.
            NotSupported: "breakdown" of a model that is not offloaded.
            RequestFailed: no token can be drawn for a row. TierFailed: a tier failed; the
                engine is then closed.
        """
        llm, pad_id = self.llm, self.pad_token_id
        largest_id = llm.engine.admission.vocab_size - 1
        switch("do_sample", do_sample)
        if debug_mode not in (None, "fewer_batch", "breakdown"):
            raise InvalidRequest(
                f"debug_mode={debug_mode!r}: must be None, 'fewer_batch' or 'breakdown'"
            )
        num_new = num_run = integer("max_new_tokens", max_new_tokens, 0)
        if cut_gen_len is not None:
            num_run = min(num_run, integer("cut_gen_len", cut_gen_len, 1))
        if isinstance(stop, str):
            if llm.tokenizer is None:
                raise InvalidRequest(f"stop={stop!r}: the model has no tokenizer; give an id")
            stop_ids = llm.tokenizer.encode_rest(stop)
            if len(stop_ids) != 1:
                raise InvalidRequest(f"stop={stop!r}: must be one token, not {len(stop_ids)}")
            stop = stop_ids[0]
        stop = optional_integer("stop", stop, 0, largest_id)
        verbose = integer("verbose", verbose, 0)
        SamplingParams(temperature=temperature, seed=seed)  # validates them
        ids = pad_rows(_rows(inputs), pad_id, left=True)
        columns = _columns(ids, attention_mask, pad_id)
        prompts = columns.rows()
        for row, prompt in enumerate(prompts):
            if max(prompt) > largest_id:
                raise InvalidRequest(
                    f"inputs[{row}] holds id {max(prompt)}, which is outside 0 to {largest_id}"
                )
        if debug_mode == "fewer_batch":
            prompts = prompts[: llm.engine.scheduler.max_sequences]
            num_run = min(num_run, _FEW_TOKENS)
        greedy = not do_sample or temperature == 0
        params = SamplingParams(
            max_tokens=num_run,
            temperature=0.0 if greedy else temperature,
            stop_token_ids=() if stop is None else (stop,),
            ignore_eos=True,  # `stop` alone ends a row
            seed=draw_seed() if seed is None and not greedy else seed or 0,
        )
        offload_seconds = _offload_seconds_of(llm) if debug_mode == "breakdown" else None
        requests = llm._admit_rows(prompts, params) if num_run else []
        if verbose:
            _log(_description(llm, len(prompts), ids, num_run))
        self.timings = _run_timed(llm, requests, offload_seconds, verbose)
        self.timings.project(len(ids), num_new, num_run)
        if verbose or offload_seconds is not None:
            _log(*self.timings.lines())
        return (
            columns.joined(new_rows(dict(enumerate(requests)))[0], pad_id, num_new)
            .numpy()
            .astype(np.int32)
        )

    def delete_all_weights(self) -> None:
        """Close the model; the same as `close`."""
        self.close()


def _run_timed(llm: LLM, requests: list[Request], spent: Spent | None, verbose: int) -> Timings:
    """Run `requests` to completion, timing each step."""
    clock = Clock(requests, spent)
    if not requests:
        return clock.timings
    with closing(llm.engine.steps(requests)) as steps:
        for _ in steps:
            tokens = clock.lap()
            if verbose > 1 and tokens:
                costs = clock.timings.costs
                _log(f"step {len(costs)}: {costs[-1]:.3f} s, {tokens} tokens")
    return clock.timings


def _offload_seconds_of(llm: LLM) -> Spent:
    if "offload_seconds" not in llm.stats():
        raise NotSupported(
            "debug_mode='breakdown': nothing is loaded or stored by a model that is not offloaded; open it "
            "with a policy, or as LLM(folder, placement=Offload())"
        )
    return lambda: tuple(llm.stats()["offload_seconds"].values())


def _description(llm: LLM, num_run: int, ids: Tensor, num_new: int) -> str:
    num_rows, width = ids.shape
    rows = f"{num_run} rows" if num_run == num_rows else f"{num_run} of {num_rows} rows"
    text = f"{llm.name}: {rows} of up to {width} tokens, {num_new} new ones each"
    plan = llm.info().get("plan")
    if plan is None:
        return text
    tiers = {"weights": plan["weights"], "cache": plan["kv"], "activations": plan["activations"]}
    places = (f"{name} {'/'.join(f'{p:g}' for p in percents)}" for name, percents in tiers.items())
    blocks = f"blocks of {plan['batch_size']} x {plan['micro_batches']}"
    return f"{text}; {blocks}; {', '.join(places)}"


def _log(*lines: str) -> None:
    for line in lines:
        sys.stderr.write(f"flexllmgen: {line}\n")
    sys.stderr.flush()


# ---- the prompts


def _rows(inputs: Any) -> list[list[int]]:
    """Return rows of ids from a 2-D array or tensor, or from a list of rows."""
    if isinstance(inputs, np.ndarray | Tensor):
        has_data = isinstance(inputs, np.ndarray) or inputs.device.type != "meta"
        if inputs.ndim != 2 or "int" not in str(inputs.dtype) or not has_data:
            raise InvalidRequest(
                f"inputs is {inputs.dtype} {list(inputs.shape)}; it must be integers [batch, prompt_len]"
            )
    elif not isinstance(inputs, Sequence) or isinstance(inputs, str | bytes):
        raise InvalidRequest(
            f"inputs is {type(inputs).__name__}; it must be an array [batch, prompt_len] or a list of "
            "lists of ids"
        )
    if not len(inputs):
        raise InvalidRequest("inputs has no rows; at least one is needed")
    rows = []
    for number, row in enumerate(inputs):
        name, values = f"inputs[{number}]", row.tolist() if hasattr(row, "tolist") else row
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise InvalidRequest(f"{name}={row!r}: must be a list of ids")
        if not values:
            raise InvalidRequest(f"{name} is empty: at least one id is needed")
        rows.append([integer(name, value, 0, _LARGEST_ID) for value in values])
    return rows


def _columns(ids: Tensor, attention_mask: Any, pad_id: int) -> PaddedRows:
    """Return the rows with their left padding masked; a row of only pads keeps its last pad."""
    if attention_mask is None:
        mask = (ids != pad_id).cummax(dim=1).values
        mask[:, -1] = True
    elif isinstance(attention_mask, Tensor):
        mask = attention_mask
    else:
        try:
            mask = torch.from_numpy(np.array(attention_mask))
        except (TypeError, ValueError):
            raise InvalidRequest(
                f"attention_mask={attention_mask!r}: must be 0 and 1, in the shape of inputs"
            ) from None
    return PaddedRows.of(ids, mask, name="inputs", left=True)
