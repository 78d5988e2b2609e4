"""The device of a model, or of its share in a process."""

from __future__ import annotations

import importlib.util
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.options import available_memory, total_memory

TorchDevice = torch.device


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a model, or of its share in one of several processes.

    Attributes:
        torch: the torch device; a GPU with its index.
        batch_invariant: whether computation is batch-invariant: always on a CPU, on a GPU if requested.
        is_separate: whether the CPU is treated as a device with separate memory, to test `Offload`.
    """

    torch: torch.device
    batch_invariant: bool
    is_separate: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def separate_device(self) -> TorchDevice | None:
        """The device if its memory is separate from RAM, else None."""
        return self.torch if self.is_gpu or self.is_separate else None

    @property
    def stores_latent(self) -> bool:
        """True if latent vectors are stored; the GPU kernels don't support heads this wide."""
        return not self.is_gpu

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager that launches kernels on this device."""
        return torch.cuda.device(self.torch) if self.is_gpu else nullcontext()

    def nth(self, number: int) -> Device:
        """Return the device of process `number` (from 0) on a machine: GPUs round-robin, from this one.

        Raises:
            NotSupported: this machine has no GPU.
        """
        if not self.is_gpu:
            return self
        count = torch.cuda.device_count()
        if not count:
            raise NotSupported(f"device={self.torch}: {platform.node()} has no GPU")
        return replace(self, torch=torch.device("cuda", ((self.torch.index or 0) + number) % count))

    def info(self) -> dict[str, Any] | None:
        """Return the GPU's name and whether it is `deterministic`, for `LLM.info`; None for the CPU."""
        if not self.is_gpu:
            return None
        name = torch.cuda.get_device_name(self.torch)
        return {"name": name, "deterministic": self.batch_invariant}

    def synchronize(self) -> None:
        """Wait until a GPU has completed all its work; no effect on the CPU."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)

    @property
    def total_memory(self) -> int:
        """Bytes of memory."""
        if self.is_gpu:
            return int(torch.cuda.mem_get_info(self.torch)[1])
        return total_memory()

    @property
    def available_memory(self) -> int:
        """Bytes of free memory."""
        if self.is_gpu:
            return int(torch.cuda.mem_get_info(self.torch)[0])
        return available_memory()


CPU = Device(torch.device("cpu"), batch_invariant=True)


def resolve_device(device: Any, deterministic: Any, model: Any = None) -> Device:
    """Return the device for `LLM`'s options `device` and `deterministic`.

    Args:
        model: the model; "auto" is a live module's current device, and the CPU for other models.

    Raises:
        InvalidRequest: an option is invalid, or `device` is not the one that a live module is on.
        NotSupported: the GPU does not exist, Triton is missing, or `deterministic=False` on the CPU.
    """
    if deterministic != "auto" and not isinstance(deterministic, bool):
        raise InvalidRequest(f"deterministic={deterministic!r}: must be 'auto', True or False")
    resolved = _resolve(device, model)
    if resolved.type == "cpu":
        if deterministic is False:
            raise NotSupported(
                "deterministic=False: the CPU is always deterministic; must be 'auto' or True"
            )
        return CPU
    if importlib.util.find_spec("triton") is None:
        raise NotSupported(
            f"device={device!r}: its kernels need Triton, which is not installed (torch for CUDA brings it)"
        )
    return Device(resolved, batch_invariant=deterministic is True)


def _resolve(device: Any, model: Any) -> torch.device:
    current = None
    if isinstance(model, nn.Module):
        current = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device == "auto":
        resolved = torch.device("cpu") if current is None else current
    else:
        try:
            resolved = torch.device(device)
        except (RuntimeError, TypeError):
            resolved = torch.device("meta")
    if resolved.type not in ("cpu", "cuda"):
        raise NotSupported(
            f"device={device!r}: must be 'auto', 'cpu', 'cuda' or 'cuda:0' and so on"
        )
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            reason = "sees none" if torch.version.cuda else "was built without CUDA"
            raise NotSupported(f"device={device!r}: no GPU: torch {torch.__version__} {reason}")
        index = torch.cuda.current_device() if resolved.index is None else resolved.index
        if index >= torch.cuda.device_count():
            raise NotSupported(
                f"device={device!r}: there are {torch.cuda.device_count()} GPUs, numbered from 0"
            )
        resolved = torch.device("cuda", index)
    if current is not None and current != resolved:
        raise InvalidRequest(
            f"device={device!r}: the live module is on {current}, and is used in place; leave it at 'auto'"
        )
    return resolved
