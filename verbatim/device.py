"""Which device a model runs on, and what is not done there."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.kv.quantized import Packing
from verbatim.options import available_memory, total_memory
from verbatim.protocols import Proposer


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model in one piece lies.

    Attributes:
        torch: the device, with its index if it is a GPU.
        same_bits: a row's bits depend on that row alone; always on the CPU, and on a GPU where it was
            asked for.
    """

    torch: torch.device
    same_bits: bool

    @property
    def is_gpu(self) -> bool:
        return self.torch.type == "cuda"

    def current(self) -> AbstractContextManager[object]:
        """Make it the one that kernels are launched on, for the length of a block."""
        return torch.cuda.device(self.torch) if self.is_gpu else nullcontext()

    @property
    def total_memory(self) -> int:
        """Bytes of its memory."""
        if self.is_gpu:
            return int(torch.cuda.mem_get_info(self.torch)[1])
        return total_memory()

    @property
    def available_memory(self) -> int:
        """Bytes of it that are free now."""
        if self.is_gpu:
            return int(torch.cuda.mem_get_info(self.torch)[0])
        return available_memory()


CPU = Device(torch.device("cpu"), same_bits=True)


def settle_device(device: Any, deterministic: Any, model: Any = None) -> Device:
    """`LLM`'s options of these names, checked.

    Args:
        model: a live module stays where it is, and "auto" is there; of anything else it is the CPU.

    Raises:
        InvalidRequest: an option that is none, or another device than that of a live module.
        NotSupported: there is no such GPU, or nothing to compile its kernels with; something else than
            always the same bits on the CPU.
    """
    if deterministic != "auto" and not isinstance(deterministic, bool):
        raise InvalidRequest(f"deterministic={deterministic!r}: must be 'auto', True or False")
    found = _settle(device, model)
    if found.type == "cpu":
        if deterministic is False:
            raise NotSupported(
                "deterministic=False: the CPU is always deterministic; must be 'auto' or True"
            )
        return CPU
    if importlib.util.find_spec("triton") is None:
        raise NotSupported(
            f"device={device!r}: its kernels need Triton, which is not installed (torch for CUDA brings it)"
        )
    return Device(found, same_bits=deterministic is True)


def _settle(device: Any, model: Any) -> torch.device:
    lies = None
    if isinstance(model, nn.Module):
        lies = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device == "auto":
        wanted = torch.device("cpu") if lies is None else lies
    else:
        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError):
            wanted = torch.device("meta")
    if wanted.type not in ("cpu", "cuda"):
        raise NotSupported(
            f"device={device!r}: must be 'auto', 'cpu', 'cuda' or 'cuda:0' and so on"
        )
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            reason = "sees none" if torch.version.cuda else "was built without CUDA"
            raise NotSupported(f"device={device!r}: no GPU: torch {torch.__version__} {reason}")
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= torch.cuda.device_count():
            raise NotSupported(
                f"device={device!r}: there are {torch.cuda.device_count()} GPUs, numbered from 0"
            )
        wanted = torch.device("cuda", index)
    if lies is not None and lies != wanted:
        raise InvalidRequest(
            f"device={device!r}: the live module is on {lies}, and is used in place; leave it at 'auto'"
        )
    return wanted


def refuse_on_gpu(
    device: Device, *, placement: Any, quantization: Any, kv_dtype: Any, draft: Any
) -> None:
    """What is not done on a GPU is refused by name.

    Raises:
        NotSupported: one of these, unless `device` is the CPU.
    """
    if not device.is_gpu:
        return
    if placement is not None:
        raise NotSupported(f"device={device.torch}: placement={placement!r} computes on the CPU")
    if quantization is not None:
        raise NotSupported(
            f"device={device.torch}: quantization={quantization!r} is only supported on the CPU"
        )
    if isinstance(kv_dtype, Packing):
        raise NotSupported(
            f"device={device.torch}: kv_dtype={kv_dtype.name!r} is only supported on the CPU"
        )
    if draft is not None and not isinstance(draft, Proposer):  # a model, or layers of one
        raise NotSupported(
            f"device={device.torch}: draft={draft!r} is only supported on the CPU; 'ngram' is everywhere"
        )
