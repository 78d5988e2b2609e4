"""`ExecutionEnv`, `Policy` and `CompressionConfig`, translated to options of `Offload` and `LLM`."""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.common.checks import check_fields, check_kind, integer, number
from verbatim.errors import InvalidRequest, NotSupported, TierFailed
from verbatim.placement.offload.choice import Offload, percents
from verbatim.quantization.formats import GROUP_SIZES, Quantization

# Supported group dimensions, group sizes by bits, and the reason why other dimensions are rejected.
_SUPPORTED_GROUPS: dict[str, tuple[tuple[int, ...], dict[int, tuple[int, ...]], str]] = {
    "comp_weight_config": (
        (0, 1),
        dict.fromkeys((4, 8), GROUP_SIZES),
        "a weight is [out, in]; must be 0 or 1",
    ),
    "comp_cache_config": (
        (2,),
        {8: (64, 128), 4: (32, 64)},  # a group of the second size is split in two
        "a group lies within one token's vector of one head; must be 2",
    ),
}
_PROMPT_TOKENS = 512  # prompt tokens per sequence and step: they share one read of the weights


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory tier."""

    name: str
    path: Path | None = None  # of the disk tier; None: the system's folder for temporary files


def TorchDevice(name: str, *_: object, **__: object) -> Tier:  # noqa: N802
    """Return the cpu tier for "cpu", the gpu tier for "cuda" or "cuda:0"; other arguments are ignored."""
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InvalidRequest(f"name={name!r}: must be 'cpu' or 'cuda'")
    return Tier("gpu" if kind == "cuda" else kind)


def TorchDisk(path: str | os.PathLike[str], *_: object, **__: object) -> Tier:  # noqa: N802
    """Return the disk tier in a folder, which is created if missing.

    Raises:
        InvalidRequest: not a path, or the path of a file. TierFailed: the folder can't be created.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidRequest(f"offload_dir={path!r}: must be the path of a folder")
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    if folder.exists() and not folder.is_dir():
        raise InvalidRequest(f"offload_dir={path!r} is a file; it must be a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TierFailed(f"disk tier: can't make the folder {folder}: {error.strerror}") from error
    return Tier("disk", folder)


def TorchMixedDevice(base_devices: object = ()) -> Tier:  # noqa: N802
    """Return the mixed tier, of tensors that the policy splits over several tiers."""
    return Tier("mixed")


@dataclass(frozen=True, eq=False)
class ExecutionEnv:
    """The tiers of a machine; `ExecutionEnv.create(folder)` returns one.

    The gpu tier is the first GPU; on a machine without one it is RAM, like the cpu tier. Tensors of several
    tiers (`mixed`) are split by the policy.
    """

    gpu: Tier = Tier("gpu")
    cpu: Tier = Tier("cpu")
    disk: Tier = Tier("disk")
    mixed: Tier = Tier("mixed")
    _models: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, repr=False)

    @classmethod
    def create(cls, offload_dir: str | os.PathLike[str]) -> ExecutionEnv:
        """Return an environment with `offload_dir` as its disk tier; see `TorchDisk`.

        Files there are unnamed and temporary; weights are read from the checkpoint itself, not copied.
        """
        return cls(disk=TorchDisk(offload_dir))

    def close_copy_threads(self) -> None:
        """Close every `OptLM` of this environment, with its threads; a second call does nothing."""
        for model in list(self._models):
            model.close()


@dataclass(frozen=True, slots=True)
class CompressionConfig:
    """Group-wise quantization.

    Attributes:
        num_bits: bits per element.
        group_size: elements per scale.
        group_dim: the dimension that is grouped: 1 of a weight `[out, in]`, 2 of K and V
            `[tokens, heads, width]`. 0 of a weight is read as 1, with a warning.
        symmetric: True is rejected when a `Policy` uses it: a group stores its minimum and maximum.
        enabled: False compresses nothing.

    Raises:
        InvalidRequest: a value of the wrong type.
    """

    num_bits: int
    group_size: int
    group_dim: int
    symmetric: bool
    enabled: bool = True

    def __post_init__(self) -> None:
        numbers = {"num_bits": 1, "group_size": 1, "group_dim": 0}
        check_fields(self, {name: (integer, low) for name, low in numbers.items()})


_WEIGHTS = CompressionConfig(num_bits=4, group_size=64, group_dim=1, symmetric=False)
_CACHE = CompressionConfig(num_bits=4, group_size=32, group_dim=2, symmetric=False)


@dataclass(frozen=True, slots=True)
class Policy:
    """The placement of weights, K and V and activations, and the batch sizes.

    Percents are 0 to 100; the rest goes to the disk. Only compression changes tokens.

    Attributes:
        gpu_batch_size: sequences computed at once.
        num_gpu_batches: batches per block; they share each read of a layer.
        w_gpu_percent, w_cpu_percent: shares of the weights.
        cache_gpu_percent, cache_cpu_percent: shares of K and V.
        act_gpu_percent, act_cpu_percent: shares of the activations of waiting batches.
        overlap: read and write while computing.
        sep_layer: treat attention and MLP as two layers. No effect: a layer is always read in pieces, and
            freed as soon as all batches have passed it.
        pin_weight: no effect: weights in RAM are pinned for a GPU, and used in place on a CPU.
        cpu_cache_compute: attention over K and V in RAM runs on the CPU. Refused on a GPU, no effect without.
        attn_sparsity: must be 1.0; lower values are rejected.
        compress_weight, comp_weight_config: quantize weights to 8 or 4 bits.
        compress_cache, comp_cache_config: quantize K and V to 8 or 4 bits. A group of twice the native
            size (64 at 4 bits) is split in two, with a warning.
        w_disk_percent, cache_disk_percent, act_disk_percent: the remaining shares, on the disk.

    Raises:
        InvalidRequest: a value out of its range; the message names it.
        NotSupported: a sparsity below 1, or an unsupported compression.
    """

    gpu_batch_size: int
    num_gpu_batches: int
    w_gpu_percent: float
    w_cpu_percent: float
    cache_gpu_percent: float
    cache_cpu_percent: float
    act_gpu_percent: float
    act_cpu_percent: float
    overlap: bool = True
    sep_layer: bool = True
    pin_weight: bool = True
    cpu_cache_compute: bool = False
    attn_sparsity: float = 1.0
    compress_weight: bool = False
    comp_weight_config: CompressionConfig = _WEIGHTS
    compress_cache: bool = False
    comp_cache_config: CompressionConfig = _CACHE

    def __post_init__(self) -> None:
        check_fields(self, dict.fromkeys(("gpu_batch_size", "num_gpu_batches"), (integer, 1)))
        for kind in ("w", "cache", "act"):
            names = f"{kind}_gpu_percent", f"{kind}_cpu_percent"
            values = tuple(getattr(self, name) for name in names)
            try:
                shares = percents(kind, values)
            except InvalidRequest:
                shown = " and ".join(f"{n}={v!r}" for n, v in zip(names, values, strict=True))
                raise InvalidRequest(
                    f"{shown}: must be percentages, 0 to 100, together at most 100"
                ) from None
            for name, share in zip(names, shares, strict=False):
                object.__setattr__(self, name, share)
        for name in _SUPPORTED_GROUPS:
            check_kind(name, getattr(self, name), CompressionConfig, "a CompressionConfig")
        if number("attn_sparsity", self.attn_sparsity, 0, 1, above=True) < 1:
            raise NotSupported(
                f"attn_sparsity={self.attn_sparsity!r}: FlexLLMGen lets a completion attend to a "
                "share of the padded batch's keys, so tokens would depend on the rest of the "
                "batch. A fixed number of keys is supported: OptLM(LLM(model, "
                "placement=Offload(attention_top_k=...))). Leave it at 1.0"
            )
        for name, config in self.compressions().items():
            _check_compression(name, config)

    def compressions(self) -> dict[str, CompressionConfig]:
        """Return the enabled compression configs, by field name."""
        kinds = {"weight": self.comp_weight_config, "cache": self.comp_cache_config}
        return {
            f"comp_{kind}_config": config
            for kind, config in kinds.items()
            if config.enabled and getattr(self, f"compress_{kind}")
        }

    w_disk_percent = property(lambda self: self.percents("w")[2])
    cache_disk_percent = property(lambda self: self.percents("cache")[2])
    act_disk_percent = property(lambda self: self.percents("act")[2])

    def percents(self, kind: str) -> tuple[float, float, float]:
        """Return the percents of "w", "cache" or "act" on gpu, cpu and disk."""
        gpu, cpu = getattr(self, f"{kind}_gpu_percent"), getattr(self, f"{kind}_cpu_percent")
        return gpu, cpu, max(0.0, 100 - gpu - cpu)


def options_of(policy: Policy | None, disk: Path | None) -> dict[str, Any]:
    """Return the options of `LLM` for a policy; without a policy, Verbatim plans the placement.

    `disk` is the folder for offloaded K and V and activations.
    """
    if policy is None:
        return {"placement": Offload(disk=disk)}
    block = policy.gpu_batch_size * policy.num_gpu_batches
    options: dict[str, Any] = {
        "placement": Offload(
            disk=disk,
            weights=policy.percents("w"),
            kv=policy.percents("cache"),
            activations=policy.percents("act"),
            batch_size=policy.gpu_batch_size,
            micro_batches=policy.num_gpu_batches,
            overlap=policy.overlap,
            cpu_cache_compute=policy.cpu_cache_compute,
            policy=None,  # everything is set, so there is nothing to measure
        ),
        "max_sequences": block,
        # All prompts of a block share one read of each layer.
        "max_batch_tokens": max(2048, block * _PROMPT_TOKENS),
    }
    used = policy.compressions()
    if (config := used.get("comp_weight_config")) is not None:
        options["quantization"] = Quantization(bits=config.num_bits, group_size=config.group_size)
    if (config := used.get("comp_cache_config")) is not None:
        options["kv_dtype"] = f"int{config.num_bits}"
    return options


def _check_compression(name: str, config: CompressionConfig) -> None:
    """Reject an unsupported compression; warn if it is implemented with other groups."""
    dims, sizes, why = _SUPPORTED_GROUPS[name]
    if config.group_dim not in dims:
        raise NotSupported(f"{name}.group_dim={config.group_dim}: {why}")
    if config.num_bits not in sizes:
        raise NotSupported(f"{name}.num_bits={config.num_bits}: must be 4 or 8")
    if config.symmetric:
        raise NotSupported(
            f"{name}.symmetric=True: a group stores its minimum and its maximum; must be False"
        )
    if config.group_size not in (allowed := sizes[config.num_bits]):
        raise NotSupported(
            f"{name}.group_size={config.group_size}: must be {' or '.join(map(str, allowed))} for "
            f"{config.num_bits} bits"
        )
    warning = None
    if config.group_dim == 0:
        warning = "group_dim=0 is treated as 1: groups run along the inputs of a weight [out, in]"
    elif config.group_dim == 2 and config.group_size != allowed[0]:
        warning = (
            f"group_size={config.group_size} is split into groups of {allowed[0]}: no element's "
            "error grows, and minimum and maximum are stored twice as often"
        )
    if warning is not None:
        warnings.warn(f"{name}.{warning}", stacklevel=4)
