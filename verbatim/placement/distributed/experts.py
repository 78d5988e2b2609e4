"""Expert parallelism: rows are sent to the ranks of their experts, and back."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.model.decoder import Decoder
from verbatim.model.early_exit import open_draft_layers
from verbatim.model.experts import ExpertShare, is_stacked, run_experts
from verbatim.model.spec import inner_model
from verbatim.options import rank_of
from verbatim.placement.distributed.choice import ExpertParallel
from verbatim.placement.distributed.columns import take_share
from verbatim.placement.distributed.served import check_keys, key_of
from verbatim.placement.distributed.torchrun import gather, gather_text
from verbatim.placement.options import Placed, ToOpen
from verbatim.placement.resident import open_resident


class ExpertGroup:
    """The user's process group, which only exchanges rows of experts."""

    def __init__(self, group: Any) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidRequest(
                "placement=ExpertParallel: torch.distributed is not initialised; start the ranks with "
                "torchrun and call torch.distributed.init_process_group('gloo')"
            )
        self.group = dist.group.WORLD if group is None else group
        self.rank = rank_of(self.group)
        self.size = dist.get_world_size(self.group)
        backend = str(dist.get_backend(self.group))
        if "gloo" not in backend:
            raise NotSupported(
                f"placement=ExpertParallel: the process group's backend is {backend}; rows go through "
                "the memory of machines, which needs gloo"
            )

    def close(self) -> None:
        """Release the process group, so that its owner's `destroy_process_group` ends its threads."""
        self.group = None

    def send_rows(self, rows: Tensor, counts: list[int], coming: list[int]) -> Tensor:
        """Send `counts[r]` of the rows `[n, H]` to rank r; return `coming[r]` rows from each, `[sum, H]`.

        Those of GPUs go through the memory of the machine.
        """
        device, rows = rows.device, rows.cpu().contiguous()
        found = rows.new_empty(sum(coming), rows.shape[1])
        width = rows.shape[1] * rows.itemsize
        into, out = (x.view(torch.uint8).view(-1, width) for x in (found, rows))
        dist.all_to_all_single(into, out, coming, counts, group=self.group)
        return found.to(device)


class ExchangedExperts(ExpertShare):
    """Whole experts, some on each rank; each rank has tokens of its own.

    Args:
        bounds: rank r has the experts from `bounds[r]` to `bounds[r + 1]`.
    """

    def __init__(self, group: ExpertGroup, bounds: Sequence[int]) -> None:
        self.bounds = list(bounds)
        self._group = group

    def run(self, experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the result of `run_experts` with all experts in one place; all ranks call it together."""
        group, bounds = self._group, self.bounds
        sent = [sum(counts[a:b]) for a, b in pairwise(bounds)]
        everybodys = gather(torch.tensor(counts, dtype=torch.int64), group.group)
        here = everybodys[:, bounds[group.rank] : bounds[group.rank + 1]]
        coming = here.sum(1).tolist()
        got = group.send_rows(rows[: sum(counts)], sent, coming)
        # They come rank by rank, each rank's by expert; stably sorted, expert by expert.
        numbers = torch.arange(here.shape[1]).repeat(group.size)
        by_expert = torch.argsort(numbers.repeat_interleave(here.flatten()), stable=True)
        by_expert = by_expert.to(got.device)
        made = torch.empty_like(got)
        made[by_expert] = run_experts(experts, got[by_expert], here.sum(0).tolist())
        return group.send_rows(made, coming, sent)


def open_expert_parallel(model: ToOpen, choice: ExpertParallel) -> Placed:
    """Open everything but the experts of other ranks; arguments and errors as of `open_tensor_parallel`."""
    group: Any = ExpertGroup(choice.process_group)  # of `Ranks` it has what `take_share` needs
    loaded, source, options, limit, draft = model
    module = loaded.module
    if not any(map(is_stacked, module.modules())):
        raise InvalidRequest(
            f"placement=ExpertParallel: {type(inner_model(module)).__name__} hands no tokens to experts "
            "through transformers' experts interface; TensorParallel shares its products"
        )
    keys = gather_text(key_of(loaded, options), group.group)
    check_keys((f"rank {rank}", key) for rank, key in enumerate(keys))
    device = options.device
    used = gather_text(f"{device.torch} of {platform.node()}", group.group)
    cut = take_share(
        loaded, source, group, device, head=None, linears=False, share=ExchangedExperts
    )
    loaded.move(device.torch)
    with device.current():
        decoder = Decoder(module, fused=options.fused, batch_invariant=device.batch_invariant)
        if options.kv_bytes is None:
            kv_bytes = options.kv_budget // used.count(used[group.rank])
            options = replace(options, kv_bytes=kv_bytes)
        layers = open_draft_layers(draft, decoder, loaded)
        runner = open_resident(decoder, loaded, options, limit, layers)
    decoder.record_steps(lambda _: None)  # a step waits for the other ranks, in every layer
    runner.cuts = cut.ranges
    runner.placement = {
        "placement": "expert parallel",
        "ranks": group.size,
        "rank": group.rank,
        **{name: cut.info[name] for name in ("parameters", "split_experts")},
    }
    return Placed(runner, options, group)
