"""`OptLM`: a model larger than its memory, and its `generate`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verbatim.checks import integer, optional_integer, switch
from verbatim.compat.batches import Opened, PaddedRows, new_rows, pad_id_of
from verbatim.compat.flexllmgen.config import OptConfig, check_config, config_by_name, find_model
from verbatim.compat.flexllmgen.policy import ExecutionEnv, Policy, options_of
from verbatim.compat.flexllmgen.timings import Clock, Spent, Timings
from verbatim.core import Request
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.tensors import draw_seed, pad_rows

_FEW_TOKENS = 5  # of "fewer_batch": the prefill's, and four of decoding
_LARGEST_ID = 2**31 - 1  # of int32


class OptLM(Opened):
    """An offloaded model with FlexLLMGen's interface, of any architecture that Verbatim runs.

    Args:
        config: a folder in Hugging Face's format, a hub id, the name of an OPT ("facebook/opt-30b"), or an
            `OptConfig`, which the model must match. Or an open `LLM`, or a live transformers
            module, for which one engine is kept; then leave the other arguments at None.
        env: its disk tier holds offloaded K and V and activations.
        path: the folder of the model, or its parent. None: `config` names the model.
        policy: placement and batch sizes. None lets Verbatim choose.

    Attributes:
        config: the given `OptConfig`; else the model's transformers config.
        env, path, policy: the arguments.
        timings: of the latest `generate`.

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
            if value is not None and not isinstance(value, kind):
                raise InvalidRequest(f"{name}={value!r}: must be {kind.__name__} or None")
        self.env, self.path, self.policy = env, path, policy
        self.timings = Timings()
        if isinstance(config, LLM | nn.Module):
            for name in ("env", "path", "policy"):
                if (given := getattr(self, name)) is not None:
                    raise InvalidRequest(
                        f"{name}={given!r}: the config is an {type(config).__name__}, "
                        "which is open already; leave it at None"
                    )
            self._source = config
            self.config: Any = self.llm.engine.config
            return
        if not isinstance(config, OptConfig | str | os.PathLike):
            raise InvalidRequest(
                f"config={config!r}: must be an OptConfig, a folder, a hub id or name, an LLM or a module"
            )
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
        """The pad id: of the `OptConfig`, the model, the tokenizer, an end of sequence, or else 0."""
        if isinstance(self.config, OptConfig):
            return self.config.pad_token_id
        llm = self.llm
        configs = llm.engine.generation_config, llm.engine.config
        pad_id = pad_id_of(*configs, getattr(llm.tokenizer, "hf", None))
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
                are not part of a prompt; later ones are. A row of pads alone starts from one of them.
            max_new_tokens: columns after the prompt.
            do_sample: False takes the likeliest token.
            temperature: of sampling; 0 takes the likeliest token.
            stop: the id that ends a row, or a text of one token; it is kept, and pads follow. Nothing else
                ends a row, not even the model's end of sequence.
            debug_mode: "fewer_batch" runs only the first block of rows, for at most 5 tokens;
                "breakdown" measures load, compute and store separately, and writes the timings to
                stderr. Results are in `timings`.
            cut_gen_len: generate at most this many tokens; the other columns are pads.
            verbose: 1 writes a summary and timings to stderr, 2 each step as well.
            attention_mask: `[B, P]`, an extension: 0 marks left padding, whatever its ids.
            seed: an extension: row b draws with it and sample index b. By default a number from torch's
                default generator, if tokens are sampled.

        Returns:
            `[B, P + max_new_tokens]` int32: the rows as given (with their pads), the new ids, and pads.

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
            stop_ids = llm.tokenizer.encode(stop, special_tokens=False)
            if len(stop_ids) != 1:
                raise InvalidRequest(f"stop={stop!r}: must be one token, and has {len(stop_ids)}")
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
        spent = _timings_of(llm) if debug_mode == "breakdown" else None
        requests = llm._admit_rows(prompts, params) if num_run else []
        if verbose:
            _log(_description(llm, len(prompts), ids, num_run))
        self.timings = _run_timed(llm, requests, spent, verbose)
        self.timings.project(len(ids), num_new, num_run)
        if verbose or spent is not None:
            _log(*self.timings.lines())
        return columns.joined(new_rows(requests)[0], pad_id, num_new).numpy().astype(np.int32)

    def delete_all_weights(self) -> None:
        """Free everything, as `close` does."""
        self.close()


def _run_timed(llm: LLM, requests: list[Request], spent: Spent | None, verbose: int) -> Timings:
    """Run `requests` to their end, and time each step."""
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


def _timings_of(llm: LLM) -> Spent:
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
        raise InvalidRequest("inputs holds no row; at least one is needed")
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
    """Return the rows, of which left padding is masked; a row of pads alone keeps its last one."""
    if attention_mask is None:
        mask = (ids != pad_id).cummax(dim=1).values
        mask[:, -1] = True
        return PaddedRows.of(ids, mask, None)
    mask = attention_mask
    try:
        mask = mask if isinstance(mask, Tensor) else torch.from_numpy(np.array(mask))
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"attention_mask={attention_mask!r}: must be 0 and 1, in the shape of inputs"
        ) from None
    return PaddedRows.of(ids, mask, None, "inputs")
