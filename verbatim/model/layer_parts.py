"""The parts of a decoder layer: its modules by role, and the shape of its attention.

Roles follow from what modules were given and what they made of it in one forward, and not from their names:
the norm before attention is the one between the layer's input and the input of its projections. What lies
between the modules (residuals, rotary embeddings) is a guess, which a trial verifies (`layer_trial.py`).
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
from verbatim.model.mixers import Mixer, mixer_of, recurs
from verbatim.model.mixture import MixtureParts, mixtures_of
from verbatim.model.norms import Norm, find_norm
from verbatim.model.packed import PackedLinear, is_linear
from verbatim.model.structs import NotFusable


class Rotation(enum.IntEnum):
    """The pairs of dimensions in rotary embeddings; as in `kernels/elementwise.h`."""

    UNTURNED = 0
    HALVES = 1  # i with i + half
    NEIGHBOURS = 2  # 2i with 2i + 1
    ONCE = 3  # as HALVES, with one angle for both halves instead of two
    SPREAD = 4  # 2i with 2i + 1, which become i and i + half
    PAIRED = 5  # as NEIGHBOURS, by angles 2i and 2i + 1, rounded once
    NEIGHBOURS_ONCE = 6  # as NEIGHBOURS, with as many angles as pairs
    BACKWARDS = 7  # as HALVES, by negative angles


class Residual(enum.IntEnum):
    """The input of the MLP, and the order in which the residual is added up; as in `kernels/layer.cpp`."""

    SEQUENTIAL = 0
    PARALLEL = 1
    JOINED = 2
    POST = 3
    ALONE = 4
    PART = 5


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer of the common structure; or of its attention or its MLP alone.

    Attributes:
        attention: the module that attends; or `mixer`'s; or the MLP that this is.
        mlp: the module of its MLP; None without one, or if the layer has its linears itself.
        output: the last projection of attention, or of an MLP alone; None for experts alone.
        inputs: projections of attention: q, k, v and a gate, or fewer for the first two or three of these; or
            those of `mixer`; or the first ones of q, and of k and v. Empty for an MLP.
        latent: in the last case, the second ones: of q, if it has one, and of k and v. A gate may be the last
            one of `inputs`. Or those of `mixer`.
        latent_scales: factors of what these are given, behind its norm.
        gates: gate and up, one for both, or up alone; empty if `mlp` runs unchanged, or has experts.
        mixtures: the possible structures of a mixture of experts, the likeliest first.
        mixture: the one of them that the kernels run; None without one, or if it runs unchanged.
        norms: by role, of `structs.ROLES`.
        residual_scale: factor of the terms added to the residual.
        factor: name of a buffer of the layer, of one number, that multiplies what it returns.
        mixer: what stands in place of attention, and keeps states.
        indexer: a module that chooses the keys, also by what latent queries are given.
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
        """True if the kernels run its MLP, or it has none."""
        return bool(self.gates) or self.mixture is not None or self.residual >= Residual.ALONE

    @property
    def num_states(self) -> int:
        """Number of states that it keeps; 0: it keeps K and V."""
        return 0 if self.mixer is None else self.mixer.kind.num_states

    def modules(self) -> list[nn.Module]:
        """Return the modules replaced by the kernels, without the layer itself."""
        kept = {self.layer}
        for part in (None if self.has_mlp else self.mlp, self.indexer):
            kept |= set() if part is None else {*part.modules()}
        return [m for m in self.layer.modules() if m not in kept]

    def of(self, originals: dict[int, nn.Module]) -> LayerParts:
        """Return the parts of another layer, by the ids of these."""
        bare = replace(self, mixtures=(), mixture=None, mixer=None)
        found = copy.deepcopy(bare, dict[int, Any](originals))
        mlp = found.mlp
        mixtures = () if mlp is None or not self.mixtures else tuple(mixtures_of(mlp))
        pairs = zip(self.mixtures, mixtures, strict=True)
        mixture = next((theirs for ours, theirs in pairs if ours is self.mixture), None)
        mixer = None if self.mixer is None else mixer_in(found.attention)
        return replace(found, mixtures=mixtures, mixture=mixture, mixer=mixer)


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
    gates: int = 0  # of what heads attend to, one for each or for each of their elements
    grouped: bool = False  # one projection, by KV head: its queries, key and value
    turned_first: bool = False  # queries and keys are rotated before their norms
    clip: float = 0.0  # largest of what projections make; 0: any
    q_scale: float = 1.0  # of queries, where attention has no scale of its own
    sin_first: bool = False  # in the position embeddings
    # An argument, and a key of it, of the keys and values that layers share; they are those of another
    # layer where this one has no KV heads.
    shared: tuple[str, Any] | None = None
    chosen_in: str | None = None  # an argument: the keys that another layer's indexer chose


def mixer_in(attention: nn.Module) -> Mixer | None:
    """Return what stands in place of attention; None if it attends.

    Raises:
        NotFusable: the kernels don't have it.
    """
    return mixer_of(attention) if recurs(attention) else None


@dataclass(slots=True, eq=False)
class ModuleCall:
    """The input and the output of a module in a forward."""

    module: nn.Module
    given: Tensor
    made: Tensor

    @property
    def norm(self) -> Norm | None:
        """Its module as a norm, if it is one of a known family."""
        return find_norm(self.module)

    @property
    def is_product(self) -> bool:
        """Return whether its module is a linear layer."""
        return is_linear(self.module) or type(self.module) is PackedLinear

    def leads(self, start: Tensor | None, end: Tensor | None) -> bool:
        """Return whether it makes one tensor of another; None: of any, or any."""
        begins = start is None or same_numbers(self.given, start)
        return begins and (end is None or same_numbers(self.made, end))


def record(layer: nn.Module) -> list[ModuleCall]:
    """Let a layer's parts note their calls, in the order in which they begin, by new forwards."""
    calls: list[ModuleCall] = []

    def noted(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not tensors:
            return forward(*args, **kwargs)
        calls.append(call := ModuleCall(module, tensors[0].clone(), tensors[0]))
        out = forward(*args, **kwargs)
        made = out[0] if isinstance(out, tuple | list) else out
        call.made = made.clone() if isinstance(made, Tensor) else call.given
        return out

    for module in [*layer.modules()][1:]:
        own = module.__dict__.get("forward") or partial(type(module).forward, module)
        module.__dict__["forward"] = partial(noted, module, own)
    return calls


def take_apart(
    layer: nn.Module, attention: nn.Module | None, calls: list[ModuleCall], x: Tensor, out: Tensor
) -> LayerParts:
    """Return the parts of a layer, or of a part of one.

    Args:
        attention: in it; None: it is an MLP.
        calls: of its parts, in a forward that made `out` of `x`.

    Raises:
        NotFusable: it is of another shape.
    """
    # Whatever hands on what it is given (dropout, identities) is no part.
    calls = [call for call in calls if not same_numbers(call.given, call.made)]
    if attention is None:
        _, found = _mlp_of([ModuleCall(layer, x, out), *calls], x)  # it adds no residual
        if not (found.get("gates") or found.get("mixtures")):
            raise NotFusable("its MLP is not what the kernels make")
        return LayerParts(layer, layer, [], [], found.get("down"), {}, Residual.PART, 1.0, **found)
    indexer = next((part for part in attention.modules() if runs_indexer(part)), None)
    aside = set() if indexer is None else {id(part) for part in indexer.modules()}
    calls = [call for call in calls if id(call.module) not in aside]
    inside = {id(module) for module in attention.modules()}
    own = [call for call in calls if id(call.module) in inside]
    others = [call for call in calls if call not in own]

    def norm(start: Tensor | None, end: Tensor | None = None) -> Norm | None:
        """Return the norm that makes one tensor of another."""
        return next((n for c in others if (n := c.norm) is not None and c.leads(start, end)), None)

    def scale_of(given: Tensor) -> float:
        """Return which number of attention makes a product's input of a norm's output."""
        makes = (n for n in numbers if any(same_numbers(c.made * n, given) for c in own_norms))
        return next(makes, 1.0)

    mixer = mixer_in(attention)
    products = [call for call in own if call.is_product] or [ModuleCall(layer, x, x)]
    # The output projection may be in another module than the one that attends, as BERT's is.
    if own and mixer is None and same_numbers(products[-1].given, products[0].given):
        products += [c for c in calls[calls.index(own[-1]) :] if c in others and c.is_product][:1]
    *products, output = products
    inputs = [call for call in products if same_numbers(call.given, products[0].given)]
    seconds = [call for call in products if call not in inputs]
    latent, own_norms = [call.module for call in seconds], [c for c in own if c.norm is not None]
    most = 2 if len(inputs) in (2, 3) else 0  # latent ones
    if len(inputs) == 3 and len(latent) == 2:  # no norm is given the first columns of a gate
        normed = [call.given for call in own_norms]
        inputs.sort(
            key=lambda c: not any(same_numbers(c.made[..., : x.shape[-1]], x) for x in normed)
        )
    known = mixer is not None or (len(inputs) <= 4 and len(latent) <= most)
    if not (inputs and known) or output.leads(inputs[0].given, None):
        raise NotFusable(
            f"{type(attention).__name__} has {len(inputs)} linear layers of its input and {len(latent)} of "
            "their output, and not one to four for queries, keys, values and a gate, or latent ones"
        )
    modules = [call.module for call in inputs]
    if mixer is not None:
        modules = [attention.get_submodule(name) for name in mixer.inputs]
        latent = [attention.get_submodule(name) for name in mixer.latent]
    roles = {"before_attention": norm(x, inputs[0].given), "after_attention": norm(output.made)}
    if roles["before_attention"] is None and not same_numbers(x, inputs[0].given):
        names = [type(c.module).__name__ for c in others if c.leads(x, inputs[0].given)]
        name = (*names, "what its attention is given")[0]
        raise NotFusable(f"{name} is no norm of a known family")
    if mixer is None:
        of_heads = [n for call in own_norms if (n := call.norm) is not None]
        if len(of_heads) > 3:
            raise NotFusable("its attention has more norms than of queries, keys and values")
        kinds = ("of_queries", "of_keys", "of_values")[len(latent) == 1 :]
        roles |= zip(kinds, of_heads, strict=False)
    behind = calls[calls.index(output) + 1 :]
    behind = [call for call in behind if call in others and call.norm is None]
    residual = Residual.PART if layer is attention else Residual.ALONE
    found = dict[str, Any]()
    if behind:
        made, found = _mlp_of(behind, out)
        given, residual = behind[0].given, Residual.SEQUENTIAL
        if made.numel() == given.numel() and (last := norm(made.flatten() + given.flatten())):
            residual = Residual.POST
            roles |= {"after_attention": norm(None, given), "after_mlp": last}
        else:
            roles |= {"before_mlp": norm(None, given), "after_mlp": norm(made)}
        if norm(x, given) is not None:
            total = output.made.reshape(x.shape) + made.reshape(x.shape) + x
            residual = Residual.JOINED if same_numbers(total, out) else Residual.PARALLEL
    numbers = [1.0, *(n for n in attention.__dict__.values() if type(n) is float)]
    scale = layer.__dict__.get("residual_multiplier", 1.0)
    factors = [n for n, x in layer._buffers.items() if x is not None and x.numel() == 1]
    return LayerParts(
        layer=layer,
        attention=attention,
        inputs=modules,
        latent=latent,
        output=output.module,
        norms={role: norm for role, norm in roles.items() if norm is not None},
        residual=residual,
        residual_scale=float(scale) if isinstance(scale, int | float) else 1.0,
        mixer=mixer,
        indexer=indexer,
        latent_scales=[scale_of(call.given) for call in seconds],
        factor=factors[0] if factors and behind else None,
        **found,
    )


def _mlp_of(calls: list[ModuleCall], out: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return what the MLP makes that comes first, and its fields of `LayerParts`.

    Args:
        out: of the layer; a module that makes that adds the residual itself.
    """
    first = calls[0]
    module = None if first.is_product else first.module
    within = None if module is None else {id(part) for part in module.modules()}
    products = [c for c in calls if c.is_product and (within is None or id(c.module) in within)]
    gates = [call for call in products if same_numbers(call.given, first.given)]
    made = products[-1].made if module is None else first.made
    if len(gates) in (1, 2) and products[len(gates) :] == products[-1:] != gates:
        down = products[-1]
        for order in itertools.permutations(gates):
            halves = [call.made for call in order]
            if len(halves) == 1 and halves[0].shape[-1] == 2 * down.given.shape[-1]:
                halves = [*halves[0].chunk(2, dim=-1)]
            for kind in elementwise.OF_MLPS:
                if not elementwise.served(halves[0], kind):
                    continue
                inner = elementwise.activate(halves[0], kind, *halves[1:])
                returned = any(same_numbers(made, x) for x in (down.made, out))
                if returned and same_numbers(inner, down.given):
                    parts = dict(gates=[call.module for call in order], down=down.module)
                    return down.made, dict(mlp=module, activation=kind, **parts)
    if module is None:
        raise NotFusable("its MLP is not what the kernels make")
    mixtures, every = tuple(mixtures_of(module)), [call for call in calls if call.is_product]
    if not mixtures and len(every) > len(products):  # it is not all of the MLP
        return _mlp_of(every, out)
    return made, dict(mlp=module, mixtures=mixtures)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of any shapes have the same numbers in the same order."""
    return a.numel() == b.numel() and bit_equal(a.reshape(-1), b.reshape(-1))
