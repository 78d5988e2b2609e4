"""Reading of PEFT adapter folders for requests, whose matrices stay apart from the base model's."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from verbatim.batch import LowRank
from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.untrusted import refuse_lfs_pointer
from verbatim.weights.lazy import Stored
from verbatim.weights.lora import layer_of, read_config, scaling_of
from verbatim.weights.packed_cache import read_stored
from verbatim.weights.skeleton import stored_in

MOST_RANK = 256
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, LowRank]:
    """Read the LoRA matrices in a folder, by the names of the layers that they are for.

    Raises:
        InvalidRequest: not a path.
        ModelError: no adapter, or a damaged one.
        NotSupported: an adapter of another kind, or one of a higher rank than 256.
    """
    if not isinstance(folder, str | os.PathLike):
        raise InvalidRequest(f"adapter={folder!r:.80}: must be the path of a folder")
    folder = Path(os.path.expanduser(folder))
    path = folder / "adapter_model.safetensors"
    for file in (folder / "adapter_config.json", path):
        if not file.is_file():
            raise ModelError(f"{folder} holds no {file.name}")
        refuse_lfs_pointer(file)
    config, stored = read_config(folder), stored_in(path)
    pairs: dict[str, tuple[Stored, Stored]] = {}
    for key in sorted(key for key in stored if key.endswith(".lora_A.weight")):
        other = key.replace(".lora_A.", ".lora_B.")
        if other not in stored:
            raise ModelError(f"{path} holds {key[:200]!r} without its lora_B")
        if layer_of(key) in pairs:
            raise ModelError(f"{path} holds matrices of {layer_of(key)[:200]} twice")
        pairs[layer_of(key)] = stored.pop(key), stored.pop(other)
    for key in sorted(stored):
        raise NotSupported(
            f"{path}: {key[:200]!r} is not a LoRA matrix of a linear layer, so it can't be used per "
            "request; open the folder as a model, which merges it"
        )
    if not pairs:
        raise ModelError(f"{path} holds no LoRA matrices")
    layers = {}
    for name, (a, b) in pairs.items():
        rank = a.shape[0] if len(a.shape) == len(b.shape) == 2 else 0
        if not rank or b.shape[1] != rank or not {a.dtype, b.dtype} <= _DTYPES:
            raise ModelError(f"{path}: the matrices of {name[:200]} do not fit together")
        if rank > MOST_RANK:
            raise NotSupported(
                f"{path}: {name[:200]} has rank {rank}; at most {MOST_RANK} per request"
            )
        low = LowRank(read_stored(a), read_stored(b), scaling_of(config, name, rank))
        if not (low.a.float().isfinite().all() and low.b.float().isfinite().all()):
            raise ModelError(f"{path}: the matrices of {name[:200]} hold NaN or infinity")
        layers[name] = low
    return layers
