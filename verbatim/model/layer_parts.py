"""The parts of a decoder layer: its modules by role, and the shape of its attention."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import nn

from verbatim.kernels.options import Activation, AttentionOptions
from verbatim.model.elementwise import activation_of
from verbatim.model.mixers import Mixer, mixer_of, recurs
from verbatim.model.mixture import MixtureParts, mixtures_of
from verbatim.model.norms import Norm, find_norm
from verbatim.model.structs import NotFusable

MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward", "moe", "shared_mlp")
_GATE_NAMES = ("gate_proj", "up_proj"), ("gate_up_proj",), ("w1", "w3"), ("input_linear",)
_DOWN_NAMES = ("down_proj", "w2", "output_linear")
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")
_HEAD_NORMS = {"of_queries": ("q_norm", "q_layernorm"), "of_keys": ("k_norm", "k_layernorm")}
# What norms stand where, by the names that tell: the first line that fits whole is taken.
_NORM_NAMES: tuple[dict[str, str], ...] = (
    dict(  # Gemma
        before_attention="input_layernorm",
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    dict(  # GLM 4
        before_attention="input_layernorm",
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    ),
    dict(  # Olmo 2
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    dict(before_attention="input_layernorm", before_mlp="post_attention_layernorm"),
    dict(before_attention="input_layernorm", before_mlp="pre_mlp_layernorm"),
    dict(before_attention="operator_norm", before_mlp="ffn_norm"),
    dict(before_attention="input_layernorm", before_mlp="pre_ff_layernorm"),
)


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
        mixtures: the possible structures of a mixture of experts, the likeliest first.
        mixture: the one of them that the kernels run; None without one, or if it runs unchanged.
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
    mixtures: tuple[MixtureParts, ...] = ()
    mixture: MixtureParts | None = None
    mixer: Mixer | None = None

    @property
    def has_mlp(self) -> bool:
        """True if the kernels run its MLP."""
        return bool(self.gates) or self.mixture is not None

    @property
    def num_states(self) -> int:
        """Number of states that it keeps; 0: it keeps K and V."""
        return 0 if self.mixer is None else self.mixer.kind.num_states

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


def take_apart(layer: nn.Module, attention: nn.Module) -> LayerParts:
    """Return the parts of a layer, found by their names.

    Raises:
        NotFusable: it is of another shape.
    """
    for part in (layer, *layer.modules()):
        if "forward" in part.__dict__:
            raise NotFusable("the forward of a part of it was replaced by its owner")
    inputs = _named(attention, ("q_proj", "k_proj", "v_proj")) or _named(attention, ("qkv_proj",))
    output = _named(attention, ("o_proj",)) or _named(attention, ("out_proj",))
    mixer = mixer_of(attention) if recurs(attention) else None
    if mixer is not None:
        inputs = _named(attention, tuple(mixer.inputs))
    if not inputs or not output:
        raise NotFusable(f"{type(attention).__name__} has no q_proj, k_proj, v_proj and o_proj")
    norms = _norms_of(layer, attention)
    mlp = next(m for n in MLP_NAMES if (m := layer._modules.get(n)) is not None)
    gates = next((found for names in _GATE_NAMES if (found := _named(mlp, names))), [])
    down = _named(mlp, _DOWN_NAMES, any_of=True)
    functions = _named(mlp, _ACTIVATION_NAMES, any_of=True)
    # Without a module for it, it is silu, or the trial finds out.
    activation = activation_of(functions[0]) if functions else Activation.SILU
    others = len(gates) + len(functions[:1]) + 1
    if not gates or len(mlp._modules) != others or not down or activation is None:
        gates, down = [], []  # experts, or a gate more: it runs as it is
    scale = layer.__dict__.get("residual_multiplier", 1.0)
    return LayerParts(
        layer=layer,
        attention=attention,
        mlp=mlp,
        inputs=inputs,
        output=output[0],
        gates=gates,
        down=down[0] if down else None,
        activation=activation or Activation.SILU,
        norms=norms,
        residual_scale=float(scale) if isinstance(scale, int | float) else 1.0,
        mixtures=() if gates else tuple(mixtures_of(mlp)),
        mixer=mixer,
    )


def _named(module: nn.Module, names: tuple[str, ...], *, any_of: bool = False) -> list[nn.Module]:
    """The children of these names if all are there, or those that are."""
    found = [child for name in names if (child := module._modules.get(name)) is not None]
    return found if any_of or len(found) == len(names) else []


def _norms_of(layer: nn.Module, attention: nn.Module) -> dict[str, Norm]:
    for names in _NORM_NAMES:
        modules = {role: m for role, n in names.items() if (m := layer._modules.get(n)) is not None}
        if len(modules) == len(names):
            break
    else:
        raise NotFusable("its norms have other names")
    for role, own in _HEAD_NORMS.items():
        for module in _named(attention, own, any_of=True):
            modules[role] = module
    norms = {}
    for role, module in modules.items():
        norm = find_norm(module)
        if norm is not None:
            norms[role] = norm
        elif not isinstance(module, nn.Identity):
            raise NotFusable(f"{type(module).__name__} is no RMS norm of a known family")
    return norms
