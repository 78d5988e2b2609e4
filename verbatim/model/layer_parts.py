"""A decoder layer taken apart: its modules by the part they play, and what it hands to its attention."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import nn

from verbatim.kernels.options import Activation, AttentionOptions
from verbatim.model.mixture import MixtureParts
from verbatim.model.norms import Norm


class Rotation(enum.IntEnum):
    """Which dimensions of a head are turned together; as in `kernels/elementwise.h`."""

    UNTURNED = 0
    HALVES = 1  # i with i + half
    NEIGHBOURS = 2  # 2i with 2i + 1
    ONCE = 3  # as HALVES, with one angle for both halves and not two


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of the common shape, taken apart.

    Attributes:
        inputs: of attention: q, k and v, or one for all three.
        gates: gate and up, or one for both; empty where `mlp` runs as it is, or is a mixture of experts.
        mixture: what `mlp` is then; None: it has no experts, or they run as they are.
        norms: by role: before_attention, of_queries, of_keys, after_attention, before_mlp, after_mlp.
        residual_scale: factor of what is added to the residual.
    """

    layer: nn.Module
    attention: nn.Module
    mlp: nn.Module
    inputs: list[nn.Module]
    output: nn.Module
    gates: list[nn.Module]
    down: nn.Module | None
    activation: Activation
    norms: dict[str, Norm]
    residual_scale: float
    mixture: MixtureParts | None = None

    @property
    def has_mlp(self) -> bool:
        """Is its MLP one that the kernels run?"""
        return bool(self.gates) or self.mixture is not None

    def modules(self) -> list[nn.Module]:
        """Everything that does not run by its own forward any more, the layer itself not included."""
        mlp = [*self.mlp.modules()] if self.has_mlp else []
        return [*self.attention.modules(), *mlp, *(n.module for n in self.norms.values())]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer hands to its attention: numbers of heads, widths, options, and how heads are turned."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rotation: Rotation
    options: AttentionOptions  # without sinks: those are read anew each time
    sinks: bool
