"""`ExecutionEnv`, `Policy` and `CompressionConfig`, translated to options of `Offload` and `LLM`."""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.checks import check_fields, integer, number
from verbatim.errors import InvalidRequest, NotSupported, TierFailed
from verbatim.model.quantization import GROUP_SIZES, Quantization
from verbatim.placement.offload.choice import Offload, percents

# Dimensions of groups and, by bits, their sizes; and why there are no other dimensions.
_BUILT: dict[str, tuple[tuple[int, ...], dict[int, tuple[int, ...]], str]] = {
    "comp_weight_config": (
        (0, 1),
        dict.fromkeys((4, 8), GROUP_SIZES),
        "a weight is [out, in]; must be 0 or 1",
    ),
    "comp_cache_config": (
        (2,),
        {8: (64, 128), 4: (32, 64)},  # the second is run in two halves
        "a group lies within one token's vector of one head; must be 2",
    ),
}
_ROWS = 512  # prompt tokens of each sequence of a block that share one reading of the weights


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier of memory.

    Attributes:
        path: the folder of the disk tier; None is the system's folder for temporary files.
    """

    name: str
    path: Path | None = None


def TorchDevice(name: str, *_: object, **__: object) -> Tier:  # noqa: N802
    """Return the tier of a device: "cpu", or "cuda" and "cuda:0" for the gpu tier; its sizes are measured."""
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
    """Return the name of tensors over several tiers; the policy splits them."""
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

        Files there are unnamed, and nothing is left behind; weights are read from the
        checkpoint itself, not copied.
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
        group_dim: the dimension of the groups: 1 of a weight `[out, in]`, 2 of K and V
            `[tokens, heads, width]`. 0 of a weight is read as 1, with a warning.
        symmetric: True is refused if used: a group stores its lowest and its highest element.
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

    Percents are 0 to 100; the rest goes to the disk. Tokens depend on none of it except
    compression.

    Attributes:
        gpu_batch_size: sequences computed at once.
        num_gpu_batches: batches per block, which share each reading of a layer.
        w_gpu_percent, w_cpu_percent: of the weights.
        cache_gpu_percent, cache_cpu_percent: of K and V.
        act_gpu_percent, act_cpu_percent: of the activations of waiting batches.
        overlap: read and write while computing.
        sep_layer: attention and MLP as two layers. Accepted, without effect: a layer is read in
            pieces anyway, and freed as soon as all batches have passed it.
        pin_weight: accepted, without effect: weights in RAM are pinned for a GPU, and used in place on a
            CPU.
        cpu_cache_compute: attention over K and V in RAM runs there. Without effect on a CPU, refused on a
            GPU.
        attn_sparsity: 1.0; less is refused.
        compress_weight, comp_weight_config: weights in 8 or 4 bits.
        compress_cache, comp_cache_config: K and V in 8 or 4 bits. Groups of twice the kept size, 64 at
            4 bits, are run in two halves, with a warning.
        w_disk_percent, cache_disk_percent, act_disk_percent: the rest, on the disk.

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
                given = " and ".join(f"{n}={v!r}" for n, v in zip(names, values, strict=True))
                raise InvalidRequest(
                    f"{given}: must be percentages, 0 to 100, together at most 100"
                ) from None
            for name, share in zip(names, shares, strict=False):
                object.__setattr__(self, name, share)
        for name in _BUILT:
            if not isinstance(value := getattr(self, name), CompressionConfig):
                raise InvalidRequest(f"{name}={value!r}: must be a CompressionConfig")
        if number("attn_sparsity", self.attn_sparsity, 0, 1, above=True) < 1:
            raise NotSupported(
                f"attn_sparsity={self.attn_sparsity!r}: there a prompt attends to all keys and a completion "
                "to a share of the padded batch's, so tokens would depend on the rest of the batch. A fixed "
                "number of keys is done, with OptLM(LLM(model, placement=Offload(attention_top_k=...))). "
                "Leave it at 1.0"
            )
        for name, config in self.compressions().items():
            _check_compression(name, config)

    def compressions(self) -> dict[str, CompressionConfig]:
        """Return the configs that are used, by their names."""
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
        """Return the shares of "w", "cache" or "act" on the three tiers."""
        gpu, cpu = getattr(self, f"{kind}_gpu_percent"), getattr(self, f"{kind}_cpu_percent")
        return gpu, cpu, max(0.0, 100 - gpu - cpu)


def options_of(policy: Policy | None, disk: Path | None) -> dict[str, Any]:
    """Return the options of `LLM` for a policy; without one, Verbatim plans the placement.

    Args:
        disk: the folder for offloaded K and V and activations.
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
            policy=None,  # everything is set, so nothing has to be measured
        ),
        "max_sequences": block,
        # Prompts of a block share one reading of each layer.
        "max_batch_tokens": max(2048, block * _ROWS),
    }
    used = policy.compressions()
    if (config := used.get("comp_weight_config")) is not None:
        options["quantization"] = Quantization(bits=config.num_bits, group_size=config.group_size)
    if (config := used.get("comp_cache_config")) is not None:
        options["kv_dtype"] = f"int{config.num_bits}"
    return options


def _check_compression(name: str, config: CompressionConfig) -> None:
    """Refuse a compression that is used and not built; warn of one that is run in another way."""
    dims, sizes, why = _BUILT[name]
    if config.group_dim not in dims:
        raise NotSupported(f"{name}.group_dim={config.group_dim}: {why}")
    if config.num_bits not in sizes:
        raise NotSupported(f"{name}.num_bits={config.num_bits}: must be 4 or 8")
    if config.symmetric:
        raise NotSupported(
            f"{name}.symmetric=True: a group keeps its lowest and its highest element; must be False"
        )
    if config.group_size not in (allowed := sizes[config.num_bits]):
        raise NotSupported(
            f"{name}.group_size={config.group_size}: must be {' or '.join(map(str, allowed))} for "
            f"{config.num_bits} bits"
        )
    warning = None
    if config.group_dim == 0:
        warning = "group_dim=0 is read as 1: groups run along the inputs of a weight [out, in]"
    elif config.group_dim == 2 and config.group_size != allowed[0]:
        warning = (
            f"group_size={config.group_size} is run in groups of {allowed[0]}: no element errs more, and a "
            "group's two ends are kept twice as often"
        )
    if warning is not None:
        warnings.warn(f"{name}.{warning}", stacklevel=4)
