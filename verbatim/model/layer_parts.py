"""Finds the parts of a decoder layer: its modules by role, and the shape of its attention.

Roles are inferred from the inputs and outputs of modules in one forward, not from their names: the norm
before attention is the one that maps the layer's input to the input of its projections. The operations
between modules (residuals, rotary embeddings) are guessed; `layer_trial.py` verifies the guess.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from verbatim.kernels.options import Activation, AttentionOptions
from verbatim.model import elementwise
from verbatim.model.adapters import runs_indexer
from verbatim.model.differential import bit_equal
from verbatim.model.mixers import Mixer, MixtureParts, mixer_of, mixtures_of
from verbatim.model.norms import Norm, find_norm
from verbatim.model.quantized import QuantizedLinear, is_linear
from verbatim.model.structs import NotFusable


class Rotation(enum.IntEnum):
    """The pairs of dimensions that a rotary embedding rotates; as in `kernels/elementwise.h`."""

    UNTURNED = 0
    HALVES = 1  # i with i + half
    NEIGHBOURS = 2  # 2i with 2i + 1
    ONCE = 3  # as HALVES, with cos and sin `[T, half]` for both halves
    SPREAD = 4  # 2i with 2i + 1; the results become dimensions i and i + half
    PAIRED = 5  # as NEIGHBOURS, by angles 2i and 2i + 1, rounded once
    NEIGHBOURS_ONCE = 6  # as NEIGHBOURS, with cos and sin `[T, half]`
    BACKWARDS = 7  # as HALVES, by negative angles


class Residual(enum.IntEnum):
    """The input of the MLP, and the order of additions to the residual stream; as in `kernels/layer.cpp`."""

    SEQUENTIAL = 0
    PARALLEL = 1
    JOINED = 2
    POST = 3
    ALONE = 4
    PART = 5


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer, or of its attention or its MLP alone.

    Attributes:
        attention: the module that calls attention, the module of `mixer`, or a lone MLP.
        mlp: the MLP's module; None without an MLP, or if its linear layers are children of the layer.
        output: the last projection of attention, or of a lone MLP; None for lone experts.
        inputs: the projections of the layer's input: q, k, v and a gate, fewer if some are fused; with
            latent attention the down-projections and perhaps a gate; or those of `mixer`. Empty for an MLP.
        latent: the up-projections of latent attention (q if it has one, then k and v), or those of `mixer`.
        latent_scales: factors of the normed inputs of `latent`.
        gates: gate and up projections, one for both, or up alone; empty if `mlp` runs unchanged or is MoE.
        mixtures: possible structures of an MoE block, the most likely first.
        mixture: the element of `mixtures` that the kernels run; None if there is none or it runs unchanged.
        norms: the norms by role, one of `structs.ROLES`.
        residual_scale: factor of the terms added to the residual stream.
        factor: name of a one-element buffer of the layer, by which its output is multiplied.
        mixer: the recurrent module in place of attention.
        indexer: module that chooses the keys to attend to.
    """

    layer: nn.Module
    attention: nn.Module
    inputs: list[nn.Module]
    latent: list[nn.Module]
    output: Any
    norms: dict[str, Norm]
    residual: Residual
    residual_scale: float
    mlp: nn.Module | None = None
    gates: list[nn.Module] = field(default_factory=list)
    down: nn.Module | None = None
    activation: Activation = Activation.SILU
    mixtures: tuple[MixtureParts, ...] = ()
    mixture: MixtureParts | None = None
    mixer: Mixer | None = None
    indexer: nn.Module | None = None
    latent_scales: list[float] = field(default_factory=list)
    factor: str | None = None

    @property
    def has_mlp(self) -> bool:
        """True if the kernels run the MLP, or there is none."""
        return bool(self.gates) or self.mixture is not None or self.residual >= Residual.ALONE

    @property
    def num_states(self) -> int:
        """Number of recurrent states per sequence; 0 for attention, which has K and V."""
        return 0 if self.mixer is None else self.mixer.kind.num_states

    def modules(self) -> list[nn.Module]:
        """Return the modules replaced by the kernels, except the layer itself."""
        excluded = {self.layer}
        for part in (None if self.has_mlp else self.mlp, self.indexer):
            excluded |= set() if part is None else {*part.modules()}
        return [m for m in self.layer.modules() if m not in excluded]

    def unknown_weights(self, *owners: nn.Module | None) -> list[str]:
        """Return the names of parameters of modules that belong to no part.

        A forward may use them later, such as those of a LoRA which is merged at the moment.
        """
        parts: list[Any] = [*self.inputs, *self.latent, self.output, *self.gates, self.down]
        parts += [None if self.gates else self.mlp, self.indexer]
        parts += [norm.module for norm in self.norms.values()]
        known = {id(p) for part in parts if part is not None for p in part.parameters()}
        known.add(id(self.attention._parameters.get("sinks")))
        named = [pair for owner in owners if owner is not None for pair in owner.named_parameters()]
        return [name for name, parameter in named if id(parameter) not in known]

    def of(self, originals: dict[int, nn.Module]) -> LayerParts:
        """Return the corresponding parts of another layer; `originals`: its modules by id of this layer's."""
        bare = replace(self, mixtures=(), mixture=None, mixer=None)
        parts = copy.deepcopy(bare, dict[int, Any](originals))
        mlp = parts.mlp
        mixtures = () if mlp is None or not self.mixtures else tuple(mixtures_of(mlp))
        pairs = zip(self.mixtures, mixtures, strict=True)
        mixture = next((theirs for ours, theirs in pairs if ours is self.mixture), None)
        mixer = None if self.mixer is None else mixer_of(parts.attention)
        return replace(parts, mixtures=mixtures, mixture=mixture, mixer=mixer)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a layer's attention: numbers of heads, widths, options and rotary type."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rotation: Rotation
    options: AttentionOptions  # without sinks, which are read in each forward
    sinks: bool
    gates: int = 0  # number of output gates: one per head, one per element of a head, or 0
    grouped: bool = False  # the fused projection is ordered by KV head: its queries, key and value
    rotated_first: bool = False  # whether queries and keys are rotated before their norms
    clip: float = 0.0  # limit for the absolute outputs of the projections; 0: none
    q_scale: float = 1.0  # factor of queries, if attention itself does not scale
    sin_first: bool = False  # whether `position_embeddings` is (sin, cos)
    # Name of the argument, and key in it, with keys and values shared between layers. A layer without KV
    # heads reads them; others write them.
    shared: tuple[str, Any] | None = None
    # The argument with the keys chosen by another layer's indexer.
    chosen_keys_argument: str | None = None
    # Number of elements of a query head that are multiplied with the up-projection of keys, if latent vectors
    # are stored; and the width of a head's output.
    absorbed: int = 0
    own_value: int = 0


@dataclass(slots=True, eq=False)
class ModuleCall:
    """A call of a module: its input and output."""

    module: nn.Module
    input: Tensor
    output: Tensor

    @property
    def norm(self) -> Norm | None:
        """The module as a norm of a known family, or None."""
        return find_norm(self.module)

    @property
    def is_product(self) -> bool:
        """True if the module is a linear layer."""
        return is_linear(self.module) or type(self.module) is QuantizedLinear

    def maps(self, start: Tensor | None, end: Tensor | None) -> bool:
        """Return whether the call maps `start` to `end`; None matches any tensor."""
        begins = start is None or same_numbers(self.input, start)
        return begins and (end is None or same_numbers(self.output, end))


def record(layer: nn.Module) -> list[ModuleCall]:
    """Patch a layer's submodules to append their calls to the returned list, in order of their starts."""
    calls: list[ModuleCall] = []

    def recorded(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not tensors:
            return forward(*args, **kwargs)
        calls.append(call := ModuleCall(module, tensors[0].clone(), tensors[0]))
        out = forward(*args, **kwargs)
        first = out[0] if isinstance(out, tuple | list) else out
        call.output = first.clone() if isinstance(first, Tensor) else call.input
        return out

    for module in [*layer.modules()][1:]:
        original = module.__dict__.get("forward") or partial(type(module).forward, module)
        module.__dict__["forward"] = partial(recorded, module, original)
    return calls


def find_parts(
    layer: nn.Module,
    attention: nn.Module | None,
    calls: list[ModuleCall],
    x: Tensor,
    out: Tensor,
    latent_keys: Tensor | None = None,
) -> LayerParts:
    """Return the parts of a layer, or of its attention or its MLP alone.

    Args:
        attention: the attention module in the layer; None: the layer is an MLP.
        calls: the submodules' calls in a forward with input `x` and output `out`.
        latent_keys: the latent vectors that are stored in place of keys and values, `[T, 1, rank + R]`.

    Raises:
        NotFusable: the layer has a different structure.
    """
    # Modules that return their input unchanged (dropout, identity) are ignored.
    calls = [call for call in calls if not same_numbers(call.input, call.output)]
    if attention is None:
        _, parts = _mlp_of([ModuleCall(layer, x, out), *calls], x)  # without a residual
        if not (parts.get("gates") or parts.get("mixtures")):
            raise NotFusable("its MLP has a structure that the kernels don't support")
        return LayerParts(layer, layer, [], [], parts.get("down"), {}, Residual.PART, 1.0, **parts)
    indexer = next((part for part in attention.modules() if runs_indexer(part)), None)
    aside = set() if indexer is None else {id(part) for part in indexer.modules()}
    calls = [call for call in calls if id(call.module) not in aside]
    inside = {id(module) for module in attention.modules()}
    inner = [call for call in calls if id(call.module) in inside]
    outer = [call for call in calls if call not in inner]

    def norm(start: Tensor | None, end: Tensor | None = None) -> Norm | None:
        """Return the norm that maps `start` to `end`; None matches any tensor."""
        return next((n for c in outer if (n := c.norm) is not None and c.maps(start, end)), None)

    def scale_of(operand: Tensor) -> float:
        """Return the attention module's attribute by which a norm's output is scaled to `operand`, or 1."""
        makes = (
            n for n in numbers if any(same_numbers(c.output * n, operand) for c in inner_norms)
        )
        return next(makes, 1.0)

    mixer = mixer_of(attention)
    products = [call for call in inner if call.is_product] or [ModuleCall(layer, x, x)]
    # The output projection may be outside the module that attends, as in BERT.
    if inner and mixer is None and same_numbers(products[-1].input, products[0].input):
        products += [c for c in calls[calls.index(inner[-1]) :] if c in outer and c.is_product][:1]
    *products, last_product = products
    inputs = [call for call in products if same_numbers(call.input, products[0].input)]
    second = [call for call in products if call not in inputs]
    if latent_keys is not None:  # the up-projection is not called
        vectors = latent_keys[..., : attention.kv_lora_rank]
        second.append(ModuleCall(attention.get_submodule("kv_b_proj"), vectors, vectors))
    latent, inner_norms = [call.module for call in second], [c for c in inner if c.norm is not None]
    max_latent = 2 if len(inputs) in (2, 3) else 0
    if len(inputs) == 3 and len(latent) == 2:  # the gate goes last: no norm follows it
        normed = [call.input for call in inner_norms]
        inputs.sort(
            key=lambda c: not any(same_numbers(c.output[..., : x.shape[-1]], x) for x in normed)
        )
    supported = mixer is not None or (len(inputs) <= 4 and len(latent) <= max_latent)
    if not (inputs and supported) or last_product.maps(inputs[0].input, None):
        raise NotFusable(
            f"{type(attention).__name__} has {len(inputs)} linear layers on its input and "
            f"{len(latent)} on their output; supported are one to four for queries, keys, values "
            "and a gate, or latent ones"
        )
    modules = [call.module for call in inputs]
    if mixer is not None:
        modules = [attention.get_submodule(name) for name in mixer.inputs]
        latent = [attention.get_submodule(name) for name in mixer.latent]
    roles = {
        "before_attention": norm(x, inputs[0].input),
        "after_attention": norm(last_product.output),
    }
    if roles["before_attention"] is None and not same_numbers(x, inputs[0].input):
        names = [type(c.module).__name__ for c in outer if c.maps(x, inputs[0].input)]
        name = (*names, "the input of its attention")[0]
        raise NotFusable(f"{name} is not a known kind of norm")
    if mixer is None:
        of_heads = [n for call in inner_norms if (n := call.norm) is not None]
        if len(of_heads) > 3:
            raise NotFusable("its attention has more norms than those of queries, keys and values")
        norm_roles = ("of_queries", "of_keys", "of_values")[len(latent) == 1 :]
        roles |= zip(norm_roles, of_heads, strict=False)
    after = calls[calls.index(last_product) + 1 :]
    after = [call for call in after if call in outer and call.norm is None]
    residual = Residual.PART if layer is attention else Residual.ALONE
    parts = dict[str, Any]()
    if after:
        term, parts = _mlp_of(after, out)
        operand, residual = after[0].input, Residual.SEQUENTIAL
        if term.numel() == operand.numel() and (last := norm(term.flatten() + operand.flatten())):
            residual = Residual.POST
            roles |= {"after_attention": norm(None, operand), "after_mlp": last}
        else:
            roles |= {"before_mlp": norm(None, operand), "after_mlp": norm(term)}
        if norm(x, operand) is not None:
            total = last_product.output.reshape(x.shape) + term.reshape(x.shape) + x
            residual = Residual.JOINED if same_numbers(total, out) else Residual.PARALLEL
    numbers = [1.0, *(n for n in attention.__dict__.values() if type(n) is float)]
    scale = layer.__dict__.get("residual_multiplier", 1.0)
    factors = [n for n, x in layer._buffers.items() if x is not None and x.numel() == 1]
    return LayerParts(
        layer=layer,
        attention=attention,
        inputs=modules,
        latent=latent,
        output=last_product.module,
        norms={role: norm for role, norm in roles.items() if norm is not None},
        residual=residual,
        residual_scale=float(scale) if isinstance(scale, int | float) else 1.0,
        mixer=mixer,
        indexer=indexer,
        latent_scales=[scale_of(call.input) for call in second],
        factor=factors[0] if factors and after else None,
        **parts,
    )


def _mlp_of(calls: list[ModuleCall], out: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the output of the first MLP in `calls`, without residual, and its fields of `LayerParts`.

    Args:
        out: the layer's output; an MLP module that returns it has added the residual.
    """
    first = calls[0]
    module = None if first.is_product else first.module
    within = None if module is None else {id(part) for part in module.modules()}
    products = [c for c in calls if c.is_product and (within is None or id(c.module) in within)]
    gates = [call for call in products if same_numbers(call.input, first.input)]
    result = products[-1].output if module is None else first.output
    if len(gates) in (1, 2) and products[len(gates) :] == products[-1:] != gates:
        down = products[-1]
        for order in itertools.permutations(gates):
            halves = [call.output for call in order]
            if len(halves) == 1 and halves[0].shape[-1] == 2 * down.input.shape[-1]:
                halves = [*halves[0].chunk(2, dim=-1)]
            for kind in elementwise.MLP_ACTIVATIONS:
                if not elementwise.supports(halves[0], kind):
                    continue
                inner = elementwise.activate(halves[0], kind, *halves[1:])
                matches = any(same_numbers(result, x) for x in (down.output, out))
                if matches and same_numbers(inner, down.input):
                    parts = dict(gates=[call.module for call in order], down=down.module)
                    return down.output, dict(mlp=module, activation=kind, **parts)
    if module is None:
        raise NotFusable("its MLP has a structure that the kernels don't support")
    mixtures, all_products = tuple(mixtures_of(module)), [call for call in calls if call.is_product]
    if not mixtures and len(all_products) > len(products):  # this module is only a part of the MLP
        return _mlp_of(all_products, out)
    return result, dict(mlp=module, mixtures=mixtures)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of any shapes have the same numbers in the same order."""
    return a.numel() == b.numel() and bit_equal(a.reshape(-1), b.reshape(-1))
