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
from verbatim.placement.distributed.ranks import gather, gather_text
from verbatim.placement.distributed.served import check_keys, key_of
from verbatim.placement.options import OpenRequest, Placed
from verbatim.placement.resident import open_resident


class ExpertGroup:
    """The user's process group, used only to exchange rows between experts."""

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

        Rows on a GPU are copied through CPU memory.
        """
        device, rows = rows.device, rows.cpu().contiguous()
        received = rows.new_empty(sum(coming), rows.shape[1])
        width = rows.shape[1] * rows.itemsize
        into, out = (x.view(torch.uint8).view(-1, width) for x in (received, rows))
        dist.all_to_all_single(into, out, coming, counts, group=self.group)
        return received.to(device)


class ExchangedExperts(ExpertShare):
    """Whole experts, distributed over the ranks; each rank has its own tokens.

    Args:
        bounds: rank r has the experts from `bounds[r]` to `bounds[r + 1]`.
    """

    def __init__(self, group: ExpertGroup, bounds: Sequence[int]) -> None:
        self.bounds = list(bounds)
        self._group = group

    def run(self, experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the result of `run_experts` with the experts of all ranks, which must all call this."""
        group, bounds = self._group, self.bounds
        sent_counts = [sum(counts[a:b]) for a, b in pairwise(bounds)]
        all_counts = gather(torch.tensor(counts, dtype=torch.int64), group.group)
        local_counts = all_counts[:, bounds[group.rank] : bounds[group.rank + 1]]
        received_counts = local_counts.sum(1).tolist()
        received = group.send_rows(rows[: sum(counts)], sent_counts, received_counts)
        # Received rows are sorted by rank, then by expert; a stable sort groups them by expert.
        numbers = torch.arange(local_counts.shape[1]).repeat(group.size)
        by_expert = torch.argsort(numbers.repeat_interleave(local_counts.flatten()), stable=True)
        by_expert = by_expert.to(received.device)
        output = torch.empty_like(received)
        output[by_expert] = run_experts(experts, received[by_expert], local_counts.sum(0).tolist())
        return group.send_rows(output, received_counts, sent_counts)


def open_expert_parallel(model: OpenRequest, choice: ExpertParallel) -> Placed:
    """Open a model without the experts of other ranks; raises the errors of `open_tensor_parallel`."""
    group: Any = ExpertGroup(choice.process_group)  # implements what `take_share` uses of `Ranks`
    loaded, source, options, limit, draft = model
    module = loaded.module
    if not any(map(is_stacked, module.modules())):
        raise InvalidRequest(
            f"placement=ExpertParallel: {type(inner_model(module)).__name__} passes no tokens to "
            "experts through transformers' experts interface; use TensorParallel"
        )
    keys = gather_text(key_of(loaded, options), group.group)
    check_keys((f"rank {rank}", key) for rank, key in enumerate(keys))
    device = options.device
    devices = gather_text(f"{device.torch} of {platform.node()}", group.group)
    info = take_share(
        loaded, source, group, device, head=None, linears=False, share=ExchangedExperts
    )
    loaded.move(device.torch)
    with device.current():
        decoder = Decoder(
            module,
            fused=options.fused,
            latent=device.stores_latent,
            batch_invariant=device.batch_invariant,
        )
        if options.kv_bytes is None:
            kv_bytes = options.kv_budget // devices.count(devices[group.rank])
            options = replace(options, kv_bytes=kv_bytes)
        layers = open_draft_layers(draft, decoder, loaded)
        runner = open_resident(decoder, loaded, options, limit, layers)
    decoder.record_steps(lambda _: None)  # layers wait for other ranks
    runner.placement = {
        "placement": "expert parallel",
        "ranks": group.size,
        "rank": group.rank,
        **{name: info[name] for name in ("parameters", "split_experts")},
    }
    return Placed(runner, options, group)
