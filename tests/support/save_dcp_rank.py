"""One rank of a run that saves a sharded checkpoint of a KempnerForge toy, with all kinds of placements."""

from __future__ import annotations

import json

import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from support import kempner_reference


def main(rank: int, world: int, folder: str, fields: str) -> bool:
    """Save the checkpoint.

    Args:
        fields: the toy's config fields, as JSON.
    """
    mesh = init_device_mesh("cpu", (world,))
    model = kempner_reference.make(**json.loads(fields))
    state = {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        ways = [Shard(0), Replicate(), Shard(tensor.dim() - 1)]
        state[name] = distribute_tensor(tensor, mesh, [ways[number % 3]])
    moments = {name: {"exp_avg": tensor * 0 + 1, "step": 5} for name, tensor in state.items()}
    everything = {"model": state, "optimizer": {"state": moments, "lr": 0.1}}
    dcp.save(everything, checkpoint_id=folder)
    return True
