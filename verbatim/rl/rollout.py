"""Rollouts: completions of prompts as tensors, with the inputs of a policy-gradient loss."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.api.llm import LLM
from verbatim.api.padded import PaddedRows, fill
from verbatim.api.tensors import draw_seed, run_admitted
from verbatim.common.checks import check_kind, integer, optional_integer, switch
from verbatim.core import FinishReason, Request, Result
from verbatim.engine.admission import as_prompts
from verbatim.errors import InvalidRequest
from verbatim.options import on_cpu, rank_of
from verbatim.params import SamplingParams


@dataclass(slots=True, eq=False)
class Rollout:
    """G completions of each of B prompts, as ordinary tensors on the CPU.

    P is the length of the longest prompt, N of the longest completion. Tensors of shape `[B, G, N]` are
    indexed by completion token: entry j belongs to the j-th token, regardless of padding in `sequences`.

    Attributes:
        sequences: `[B, G, P + N]` int64: prompt and completion. Left-padded: padding before the prompt, the
            completion from column P on, padding after it. Right-padded: prompt, completion, padding.
        attention_mask: `[B, G, P + N]` int64: 1 on prompt and completion, 0 on padding.
        action_mask: `[B, G, N]` bool: True on the completion, including the token that ended it (end of
            sequence, stop, or length limit); False on padding.
        logprobs: `[B, G, N]` float32: log-probs of the raw model at temperature 1; 0.0 on padding. `score`
            returns bit-identical values with the same weights.
        sampled_logprobs: `[B, G, N]` float32: log-probs of the distribution that was sampled.
        prompt_lengths: `[B]` int64.
        response_lengths: `[B, G]` int64.
        finish_reasons: B lists of G.
        truncated: `[B, G]` bool: True unless the finish reason is a stop.
        seeds: `[B, G]` int64. A group has one seed, and completion g is its sample g: `SamplingParams` with
            this seed and `n=G` reproduce the group.
        weight_versions: `[B, G, N]` int64: version of the weights that generated each token; -1 on padding.
        routing: `[B, G, P + N, layers, k]` int16: experts of each token; -1 on padding and for a completion's
            last token, which was not computed. None if not recorded.
        indices: `[B, G, P + N, layers, k]` int32: keys that the indexers of sparse attention selected; -1 as
            for `routing`, and after the last key if there are fewer than k. None if not recorded.
        log_masses: `[B, G, N]` float32: log of the probability mass, after the temperature, of the ids that
            the filters kept; 0.0 on padding. None without `SamplingParams(support=True)`; the ids are in the
            outputs of `results`.
        pad_token_id: id that pads `sequences` and `responses`.
        results: B results with G outputs each: texts, stop reasons, times.
        columns: `[B, G, N]` int64: column of each completion token in `sequences`; an arbitrary valid column
            on padding.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    logprobs: Tensor
    sampled_logprobs: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    finish_reasons: list[list[FinishReason]]
    truncated: Tensor
    seeds: Tensor
    weight_versions: Tensor
    routing: Tensor | None
    indices: Tensor | None
    log_masses: Tensor | None
    pad_token_id: int
    results: list[Result]
    columns: Tensor

    @property
    def responses(self) -> Tensor:
        """Completions without prompts: `[B, G, N]` int64, padded at the end."""
        return self.of_responses(self.sequences).masked_fill(~self.action_mask, self.pad_token_id)

    def __getitem__(self, groups: slice | list[int] | Tensor) -> Rollout:
        """Return some of the groups, for mini-batches of an update; widths do not change.

        Args:
            groups: a slice, indices, or a tensor of indices or bools `[B]`.
        """
        indices = torch.arange(len(self.results), device="cpu")[groups]
        if indices.ndim != 1:
            raise InvalidRequest(
                f"groups={groups!r}: must be a slice or a list; use [b:b+1] for a single group"
            )
        selected = copy.copy(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                setattr(selected, field.name, value[indices])
            elif isinstance(value, list):
                setattr(selected, field.name, [value[b] for b in indices.tolist()])
        return selected

    def of_responses(self, values: Tensor) -> Tensor:
        """Select the entries of `values` `[B, G, P + N]`, such as log-probs, for the completion tokens.

        Returns:
            `[B, G, N]`, 0 on padding.

        Raises:
            InvalidRequest: a wrong shape.
        """
        if values.shape != self.sequences.shape:
            raise InvalidRequest(
                f"values has shape {list(values.shape)}; must be that of sequences, "
                f"{list(self.sequences.shape)}"
            )
        return values.gather(-1, self.columns).masked_fill(~self.action_mask, 0)


def rollout(
    model: LLM | nn.Module,
    prompts: Any,
    params: SamplingParams | None = None,
    *,
    attention_mask: Tensor | None = None,
    group_size: int = 1,
    seed: int | None = None,
    padding_side: str = "left",
    pad_token_id: int | None = None,
    record_routing: bool | None = None,
    record_indices: bool = False,
    process_group: Any = None,
) -> Rollout:
    """Sample `group_size` completions of each prompt; a prompt is computed once for its whole group.

    Args:
        model: an open LLM, or a live module, which is used in place, with one engine for all calls.
        prompts: a string, a list of ids, a list of either, or an integer tensor `[B, P]`.
        params: sampling parameters of all prompts. `n`, `seed` and `num_beams` must be at their defaults.
        attention_mask: `[B, P]` for prompts in a tensor; 0 marks padding. None: no padding.
        group_size: G, the completions per prompt.
        seed: makes the rollout repeatable. Noise differs between prompts, even equal ones, and between
            ranks of the `process_group`. None: drawn from torch's default generator, so `torch.manual_seed`
            makes a whole run repeatable, with different rollouts. Without a `process_group`, pass a different
            seed on each rank.
        padding_side: padding of `sequences`: "left" or "right".
        pad_token_id: id for padding. None: the model's, else its EOS id, else 0. Masks do not depend on it.
        record_routing: record the experts of each token. None: only if the model has experts.
        record_indices: record the keys that indexers select, often thousands per token and layer.
        process_group: a torch.distributed group, needed if the model's forward has collectives: the ranks run
            the same number of forwards, even if their numbers of prompts differ or one has none.

    Raises:
        InvalidRequest, NotSupported: before any forward runs, on every rank.
        RequestFailed: no token can be drawn for a request, or another rank failed.
    """

    def admit(llm: LLM) -> tuple[list[Request], tuple[LLM, SamplingParams, int]]:
        checked = _check_params(params, group_size, padding_side)
        choices = llm.engine.runner.choices
        pad = optional_integer("pad_token_id", pad_token_id, -(2**63), 2**63 - 1)
        record = record_routing
        if record is None:
            record = checked.record_routing or choices["routing"].layers > 0
        checked = checked.replace(
            record_routing=switch("record_routing", record),
            record_indices=switch("record_indices", record_indices) or checked.record_indices,
        )
        may_be_empty = process_group is not None or llm.engine.may_be_empty
        rows = _prompt_rows(prompts, attention_mask, may_be_empty=may_be_empty)
        first = draw_seed() if seed is None else integer("seed", seed, 0, 2**64 - 1, optional=True)
        rank, admission = rank_of(process_group), llm.engine.admission
        requests = [
            admission.admit(row, checked.replace(seed=_mix_seed(first, rank, b)))
            for b, row in enumerate(rows)
        ]
        return requests, (llm, checked, llm.pad_token_id if pad is None else pad)

    with on_cpu():
        results, begun = run_admitted(model, admit, process_group)
        return _lay_out(results, *begun, left=padding_side == "left")


def _check_params(
    params: SamplingParams | None, group_size: Any, padding_side: Any
) -> SamplingParams:
    params = SamplingParams() if params is None else params
    check_kind("params", params, SamplingParams, "a SamplingParams")
    for name, off, instead in (
        ("n", 1, "use group_size for the number of completions per prompt"),
        ("seed", None, "use the rollout's seed argument, which gives each prompt its own noise"),
        ("num_beams", 1, "beams are not sampled, so they have no log-probs to train on"),
    ):
        if getattr(params, name) != off:
            raise InvalidRequest(f"params.{name}={getattr(params, name)}: {instead}")
    group_size = integer("group_size", group_size)
    if padding_side not in ("left", "right"):
        raise InvalidRequest(f"padding_side={padding_side!r}: must be 'left' or 'right'")
    return params.replace(n=group_size)


def _prompt_rows(prompts: Any, attention_mask: Tensor | None, *, may_be_empty: bool) -> list[Any]:
    if isinstance(prompts, Tensor) and prompts.ndim == 2:
        rows: list[Any] = PaddedRows.of(prompts, attention_mask, name="prompts").rows()
    elif attention_mask is not None:
        raise InvalidRequest("attention_mask requires prompts as a tensor of shape [B, P]")
    elif isinstance(prompts, list | tuple) and not prompts:
        rows = []
    else:
        rows, _ = as_prompts(prompts)
    if not rows and not may_be_empty:
        raise InvalidRequest("no prompts: only a rank of a process_group may have none")
    return rows


def _mix_seed(seed: int, rank: int, prompt: int) -> int:
    """Hash the arguments to a 53-bit seed, with SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    state = 0
    for value in (seed, rank, prompt):
        state = (state + value + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 11


def _lay_out(
    results: list[Result], llm: LLM, params: SamplingParams, pad: int, *, left: bool
) -> Rollout:
    """Lay out the results as tensors, outside the caller's inference mode, so that a loss can use them."""
    completions = [completion for result in results for completion in result.outputs]
    with torch.inference_mode(False), torch.no_grad():

        def per_row(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).reshape(len(results), params.n)

        prompts = torch.tensor([len(r.prompt_token_ids) for r in results], dtype=torch.int64)
        lengths = per_row([len(c.token_ids) for c in completions], torch.int64)
        longest_prompt, longest = (int(x.max()) if x.numel() else 0 for x in (prompts, lengths))
        width = longest_prompt + longest
        # The first columns of prompts and of completions.
        starts = (longest_prompt - prompts if left else torch.zeros_like(prompts))[:, None, None]
        completion_starts = starts + prompts[:, None, None]
        at, at_response = torch.arange(width), torch.arange(longest)
        attention_mask = (at >= starts) & (at < completion_starts + lengths[..., None])
        action_mask = at_response < lengths[..., None]
        columns = (
            (completion_starts + at_response).clamp(max=max(width - 1, 0)).expand_as(action_mask)
        )

        def of_tokens(name: str, padding: float, dtype: torch.dtype) -> Tensor:
            values = [value for c in completions for value in getattr(c, name)]
            return fill(action_mask, torch.tensor(values, dtype=dtype), padding)

        def recorded(name: str, dtype: torch.dtype) -> Tensor | None:
            if name not in params.records:
                return None
            choice = llm.engine.runner.choices[name]
            empty = torch.empty(0, choice.layers, choice.k, dtype=dtype)
            rows = [empty if (row := getattr(c, name)) is None else row for c in completions]
            sizes = per_row([len(row) for row in rows], torch.int64)
            values = torch.cat([empty, *rows]).to(dtype)
            return fill((at >= starts) & (at < starts + sizes[..., None]), values, -1)

        ids = [i for r in results for c in r.outputs for i in r.prompt_token_ids + c.token_ids]
        ended = [c.finish_reason is FinishReason.STOP for c in completions]
        return Rollout(
            sequences=fill(attention_mask, torch.tensor(ids, dtype=torch.int64), pad),
            attention_mask=attention_mask.long(),
            action_mask=action_mask,
            logprobs=of_tokens("logprobs", 0.0, torch.float32),
            sampled_logprobs=of_tokens("sampled_logprobs", 0.0, torch.float32),
            prompt_lengths=prompts,
            response_lengths=lengths,
            finish_reasons=[[c.finish_reason for c in result.outputs] for result in results],
            truncated=~per_row(ended, torch.bool),
            seeds=per_row([c.seed for c in completions], torch.int64),
            weight_versions=of_tokens("weight_versions", -1, torch.int64),
            routing=recorded("routing", torch.int16),
            indices=recorded("indices", torch.int32),
            log_masses=of_tokens("log_masses", 0.0, torch.float32) if params.support else None,
            pad_token_id=pad,
            results=results,
            columns=columns.contiguous(),
        )
