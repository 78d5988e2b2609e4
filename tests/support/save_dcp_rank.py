"""One rank of a run that saves a checkpoint: a toy of KempnerForge, its parameters sharded in all ways.

Arguments: rank, world size, the file of the store, the folder, and the toy's fields as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from support import kempner_reference

warnings.simplefilter("ignore")
rank, world = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
model = kempner_reference.make(**json.loads(sys.argv[5]))
state = {}
for number, (name, tensor) in enumerate(model.state_dict().items()):
    ways = [Shard(0), Replicate(), Shard(tensor.dim() - 1)]
    state[name] = distribute_tensor(tensor, mesh, [ways[number % 3]])
moments = {name: {"exp_avg": tensor * 0 + 1, "step": 5} for name, tensor in state.items()}
dcp.save({"model": state, "optimizer": {"state": moments, "lr": 0.1}}, checkpoint_id=sys.argv[4])
dist.barrier()  # or one is gone while the other still talks to it
dist.destroy_process_group()
# Sharded tensors and meshes hold groups, whose threads free memory while the interpreter ends, and may abort.
print("{}", flush=True)
os._exit(0)
