"""The parts of a decoder layer: its modules by role, and the shape of its attention."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import nn

from verbatim.kernels.options import Activation, AttentionOptions
from verbatim.model.mixers import Mixer
from verbatim.model.mixture import MixtureParts
from verbatim.model.norms import Norm


class Rotation(enum.IntEnum):
    """The pairs of dimensions in rotary embeddings; as in `kernels/elementwise.h`."""

    UNTURNED = 0
    HALVES = 1  # i with i + half
    NEIGHBOURS = 2  # 2i with 2i + 1
    ONCE = 3  # as HALVES, with one angle for both halves instead of two


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer of the common structure.

    Attributes:
        attention: the module that attends; or `mixer`'s.
        inputs: projections of attention: q, k and v, or one for all three; or those of `mixer`.
        gates: gate and up, or one for both; empty if `mlp` runs unchanged, or is a mixture of experts.
        mixture: the parts of a mixture of experts; None without one, or if it runs unchanged.
        norms: by role: before_attention, of_queries, of_keys, after_attention, before_mlp, after_mlp.
        residual_scale: factor of the terms added to the residual.
        mixer: what stands in place of attention, and keeps states.
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
    mixer: Mixer | None = None

    @property
    def has_mlp(self) -> bool:
        """True if the kernels run its MLP."""
        return bool(self.gates) or self.mixture is not None

    def modules(self) -> list[nn.Module]:
        """Return the modules replaced by the kernels, without the layer itself."""
        mlp = [*self.mlp.modules()] if self.has_mlp else []
        return [*self.attention.modules(), *mlp, *(n.module for n in self.norms.values())]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a layer's attention: numbers of heads, widths, options and rotary type."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rotation: Rotation
    options: AttentionOptions  # without sinks, which are read each time
    sinks: bool
    gated: bool = False  # q_proj also makes a gate of what each head attends to
