"""`FusedLayer`: runs a decoder layer in one or two kernel calls.

One call suffices if the kernels can read the KV cache in place; otherwise one call runs before and one after
the attention of the active forward context. The kernels read the module's parameters in place, so in-place
updates take effect. They use the functions of the single-module kernels, so results are bit-identical.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.kernels.functions import addresses, kernel
from verbatim.model.angles import cos_and_sin
from verbatim.model.context import active_context
from verbatim.model.fingerprint import Fingerprint, has_hooks, numbers_of, tensors_of
from verbatim.model.layer_parts import LayerParts, Residual, Rotation, Shape
from verbatim.model.mixers import MixtureStruct
from verbatim.model.products import Matrix
from verbatim.model.quantized import is_linear
from verbatim.model.structs import (
    ROLES,
    LayerStruct,
    NotFusable,
    Slice,
    address_and_f32,
    address_of,
    matrix_of,
    norm_of,
)


class FusedLayer:
    """The forward of one layer, or of its attention or its MLP alone.

    Attributes:
        struct: the layer's struct for the kernels; its `index` is set by `Adapters.attach`.
        rotates: whether the layer takes rotary cos and sin.
        chooses: whether the layer attends to keys chosen by an indexer.
        is_whole: whether the kernels run the complete layer, independently of other layers.

    Args:
        parts: the layer's parts.
        shape: the shape of its attention, observed in its own forward.
        arguments: names of the layer's arguments besides hidden states.
        returns: the layer's return values besides hidden states.
        dtype: dtype of the hidden states.
    """

    def __init__(
        self,
        parts: LayerParts,
        shape: Shape,
        arguments: frozenset[str],
        returns: Returns,
        dtype: torch.dtype,
    ) -> None:
        self.parts, self._shape, self._arguments = parts, shape, arguments
        self._returns, self.dtype = returns, dtype
        self.rotates = shape.rotation is not Rotation.UNTURNED
        self.chooses = parts.indexer is not None or shape.chosen_keys_argument is not None
        self.is_whole = parts.has_mlp and shape.shared is None and not self.chooses
        modules = parts.modules()
        self._fields = [m.__dict__ for m in modules]
        every = [*dict.fromkeys(m for m in (parts.layer, parts.mlp, *modules) if m is not None)]
        owners = [m for m in every if not is_linear(m)]  # linear layers read no numbers
        tensors = tensors_of([parts.layer, *modules])
        self.fingerprint = Fingerprint(tensors, numbers_of(owners), map(type, every))
        self.struct, self._mixture = LayerStruct(), MixtureStruct()
        self._mixer: Any = None if parts.mixer is None else parts.mixer.kind()
        self._sizes: tuple[int, int] | None = None  # input and output width

    def prepare(self) -> None:
        """Fill in the struct; raise NotFusable if the kernels can't read a weight in place."""
        self._prepare()
        self.fingerprint.record_layouts()

    @property
    def experts(self) -> Any:
        """The experts module that the kernels run, or None."""
        mixture = self.parts.mixture
        return None if mixture is None else mixture.experts.module

    @property
    def matrices(self) -> dict[int, nn.Module]:
        """The linear layers that a LoRA adapter may apply to, by `Place` of kernels/layer.cpp."""
        parts = self.parts
        matrices = dict(enumerate(parts.inputs))
        matrices |= {7 + i: module for i, module in enumerate(parts.gates)}
        others = {6: parts.output, 9: parts.down}
        return matrices | {place: module for place, module in others.items() if module is not None}

    def angles_in(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the rotary cos and sin among the layer's arguments."""
        return cos_and_sin(arguments["position_embeddings"], sin_first=self._shape.sin_first)

    def fits(self) -> bool:
        """Return whether the kernels can run the layer in its current state; False if it has hooks."""
        return not has_hooks(self._fields) and self.fingerprint.fits(self._prepare)

    def _prepare(self) -> None:
        parts, shape, struct, dtype = self.parts, self._shape, self.struct, self.dtype
        struct.heads, struct.kv_heads = shape.heads, shape.kv_heads
        struct.head_dim, struct.value_dim = shape.head_dim, shape.value_dim
        struct.rotation, struct.activation = shape.rotation, parts.activation
        struct.residual_scale, struct.is_bf16 = parts.residual_scale, dtype is torch.bfloat16
        options = shape.options
        struct.scale, struct.softcap = options.scale, options.softcap
        struct.window, struct.chunk = options.window, options.chunk
        struct.num_inputs, struct.num_gates = len(parts.inputs), len(parts.gates)
        for array, modules in ((struct.inputs, parts.inputs), (struct.gates, parts.gates)):
            for i, module in enumerate(modules):
                array[i] = matrix_of(module, dtype)
        fits = True
        if parts.output is not None:
            struct.output = matrix_of(parts.output, dtype)
            is_attention = parts.residual is Residual.PART and parts.inputs
            struct.hidden = struct.inputs[0].depth if is_attention else struct.output.cols
        elif parts.mixture is not None:
            struct.hidden = parts.mixture.experts.hidden
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        widths = [queries, keys, shape.kv_heads * shape.value_dim]
        gates = [shape.gates] * bool(shape.gates)
        struct.absorbed, own_value = shape.absorbed, shape.own_value or shape.value_dim
        struct.chunks = 0
        if len(parts.inputs) == 4:
            widths += gates
        elif gates and not parts.latent:
            widths[0] += shape.gates
            struct.chunks, first = shape.heads, widths[0]
            struct.q, struct.gate = (
                Slice(i * shape.head_dim, 2 * shape.head_dim) for i in range(2)
            )
            struct.k = Slice(first, shape.head_dim)
            struct.v = Slice(first + keys, shape.value_dim)
        elif shape.grouped:
            struct.chunks = shape.kv_heads
            sizes = [width // shape.kv_heads for width in widths]
            struct.q, struct.k, struct.v = (Slice(sum(sizes[:i]), sum(sizes)) for i in range(3))
        if len(parts.inputs) == 1:
            widths = [sum(widths)]
        elif len(parts.inputs) == 2 and not (parts.latent or parts.mixer):
            # Keys and values come from the same projection.
            struct.chunks, struct.q = 1, Slice(0, queries)
            struct.k = struct.v = Slice(queries, shape.head_dim)
            fits, widths = widths[1] == widths[2], widths[:2]
        of_norms: dict[str, tuple[int, int | None]] = {
            "of_queries": (queries, shape.head_dim),
            "of_keys": (keys, shape.head_dim),
            "of_values": (shape.kv_heads * shape.value_dim, shape.value_dim),
        }
        latent = [matrix_of(module, dtype) for module in parts.latent]
        struct.latent[:] = [Matrix(), Matrix(), *latent][-2:]
        if parts.mixer is not None:
            firsts = len(parts.inputs) - len(latent)
            widths = parts.mixer.widths[:firsts] + [m.depth for m in latent]
            fits &= [m.cols for m in latent] == parts.mixer.widths[firsts:]
        elif latent:
            rank, rotary_width = latent[-1].depth, struct.inputs[1].cols - latent[-1].depth
            plain = shape.absorbed or shape.head_dim - rotary_width
            queries = shape.heads * (plain + rotary_width)
            widths = [queries, rank + rotary_width, *gates]
            of_norms = {"of_keys": (rank, None), "of_values": (rotary_width, None)}
            if len(latent) == 2:
                widths[0] = latent[0].depth
                of_norms["of_queries"] = latent[0].depth, None
            struct.latent_scale[:] = [1.0, *parts.latent_scales][-2:]
        if parts.inputs:
            fits &= [m.cols for m in struct.inputs][: len(widths)] == widths
            fits &= all(struct.inputs[i].depth == struct.hidden for i in range(len(widths)))
            fits &= struct.output.depth == shape.heads * own_value
        if latent and parts.mixer is None:
            columns = [queries, shape.heads * (plain + own_value)]
            fits &= [m.cols for m in latent] == columns[-len(latent) :]
            fits &= 0 <= rotary_width <= shape.head_dim
            if shape.absorbed:
                fits &= type(parts.latent[-1]) is nn.Linear and not latent[-1].bias
                fits &= shape.head_dim == shape.value_dim == rank + rotary_width
            fits &= shape.kv_heads == (1 if shape.absorbed else shape.heads)
        struct.residual = parts.residual
        fits &= parts.has_mlp or parts.residual not in (Residual.JOINED, Residual.POST)
        if parts.down is not None:
            struct.down = matrix_of(parts.down, dtype)
            gates = struct.gates[: len(parts.gates)]
            fits &= sum(m.cols for m in gates) in (struct.down.depth, 2 * struct.down.depth)
            fits &= all(m.depth == struct.hidden for m in gates)
            fits &= struct.down.cols == struct.hidden
        for role in ROLES:
            norm_sizes = of_norms.get(role, (struct.hidden, None))
            setattr(struct, role, norm_of(parts.norms.get(role), dtype, *norm_sizes))
        struct.sinks = struct.mixture = struct.factor = None
        if parts.factor is not None:
            struct.factor = address_of(parts.layer._buffers[parts.factor], dtype)
        struct.alibi = None if options.alibi is None else options.alibi.data_ptr()
        struct.gate_width, struct.turned_first = shape.gates, shape.rotated_first
        struct.clip, struct.q_scale = shape.clip, shape.q_scale
        if shape.sinks:
            sinks = parts.attention._parameters.get("sinks")
            if sinks is None or sinks.shape != (shape.heads,):
                raise NotFusable("its attention adds a bias other than one sink per head")
            struct.sinks, struct.sinks_f32 = address_and_f32(sinks, dtype)
        if parts.mixture is not None:
            fits &= parts.mixture.experts.hidden == struct.hidden
            parts.mixture.fill(self._mixture, dtype)
            struct.mixture = ctypes.addressof(self._mixture)
        if parts.mixer is not None and self._mixer is not None:
            self._mixer.fill(parts.mixer, dtype)
            setattr(struct, self._mixer.field, ctypes.addressof(self._mixer))
        row_sizes = struct.hidden, struct.output.cols
        self._sizes = self._sizes or row_sizes  # the output buffers have these widths
        if not fits or row_sizes != self._sizes:
            raise NotFusable("its matrices have inconsistent shapes")

    def _chosen_keys(self, x: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        """Return the keys chosen by an indexer for hidden states `[1, T, H]`; None without an indexer.

        If another layer's indexer chose them, they are among the layer's arguments.
        """
        parts = self.parts
        if parts.indexer is None:
            return (
                None
                if self._shape.chosen_keys_argument is None
                else arguments[self._shape.chosen_keys_argument]
            )
        norm = {role: norm.module for role, norm in parts.norms.items()}.get
        x = (norm("before_attention") or nn.Identity())(x)
        operands = [x]
        if parts.latent:
            latent = (norm("of_queries") or nn.Identity())(parts.inputs[0](x))
            scale = parts.latent_scales[0]
            operands.append(latent if scale == 1.0 else latent * scale)
        keys: Tensor = parts.indexer(*operands, arguments["position_embeddings"])
        return keys

    def forward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement for the layer's forward; unsupported calls fall back to `plain`."""
        parts, shape, dtype, experts = self.parts, self._shape, self.dtype, self.experts
        attention, num_states, returns = parts.attention, parts.num_states, self._returns
        before, after, whole = (kernel(f"vb_{n}") for n in ("layer_before", "layer_after", "layer"))
        assert before is not None and after is not None and whole is not None
        fits, arguments, address = self.fits, self._arguments, ctypes.addressof(self.struct)
        shared, sizes = shape.shared, [(shape.heads, shape.head_dim)]
        if shape.kv_heads:
            sizes += [(shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)]
        widths = [count * width for count, width in sizes]
        widths.append(shape.gates)
        width_of_all, struct = sum(widths), self.struct
        rotates, angles_in = self.rotates, self.angles_in
        mlp = None if parts.has_mlp else parts.mlp
        after_mlp, scale = parts.norms.get("after_mlp"), parts.residual_scale
        names, chooses = argument_names(parts.layer), self.chooses
        attends = bool(parts.inputs) and not num_states

        def forward(*args: Any, **kwargs: Any) -> Any:
            context: Any = active_context()
            named = dict(zip(names, args, strict=False)) | kwargs
            x = named.pop(names[0], None)
            if (
                context is None
                or len(args) > len(names)
                or named.keys() != arguments
                or getattr(x, "dtype", None) is not dtype
                or not (context.trusted or fits())
                or x.shape[-1:] != (struct.hidden,)
            ):
                return plain(*args, **kwargs)
            x = x.contiguous()
            rows, direct = x.numel() // struct.hidden, context.direct
            usable = direct is not None and direct.count == rows
            if attends and direct is not None:
                usable &= direct.dtype is dtype
            if chooses or shared is not None or not usable:
                direct = None
            if direct is None and (num_states or context.adapted):
                return plain(*args, **kwargs)
            angles: tuple[Any, ...] = (None, None, 0, False)
            if rotates:
                cos, sin = angles_in(named)
                width, wide = cos.shape[-1], cos.dtype is torch.float32
                if len(cos) != rows or not (wide or cos.dtype is dtype):
                    return plain(*args, **kwargs)
                angles = cos.data_ptr(), sin.data_ptr(), width, wide
            out = x.new_empty(*x.shape[:-1], struct.output.cols or struct.hidden)
            normed = None if mlp is None else torch.empty_like(x)
            x_at, *outputs = addresses(x, out, normed)
            record: tuple[Any, ...] = (None, None, 0)
            keys: Tensor | None = None
            if experts is not None and context.routing is not None:
                assert rows == len(context.routing.chosen)
                record = context.routing.addresses(experts)
            if direct is not None:
                stores: tuple[Any, ...] = (None, None)
                if num_states:
                    stores = direct.states(context.next_states(num_states), num_states)
                elif parts.inputs:
                    stores = direct.stores(context.layer_of(attention))
                whole(address, direct.address, *stores, x_at, *angles, *record, *outputs)
            elif not parts.inputs:
                after(address, x_at, None, None, rows, *record, *outputs)
            else:
                qkv = torch.empty((rows, width_of_all), dtype=dtype)
                before(address, x_at, rows, *angles, qkv.data_ptr())
                heads = zip(qkv.split(widths, dim=1), sizes, strict=False)
                options = shape.options
                if shape.sinks:
                    sinks: Any = attention.sinks
                    options = replace(options, sinks=sinks.detach().float())
                keys = self._chosen_keys(x, named) if chooses else None
                if keys is not None:
                    options = replace(options, chosen=keys.reshape(rows, -1, keys.shape[-1]))
                q, *kv = (part.unflatten(1, size) for part, size in heads)
                if shared is not None and kv:
                    named[shared[0]][shared[1]] = tuple(x.transpose(0, 1)[None] for x in kv)
                elif shared is not None:
                    kv = [x[0].transpose(0, 1) for x in named[shared[0]][shared[1]]]
                attended = context.attend(attention, q, *kv, options).contiguous()
                after(address, x_at, *addresses(attended, qkv), rows, *record, *outputs)
            if mlp is not None:
                mlp_out = mlp(normed)
                mlp_out = mlp_out[0] if isinstance(mlp_out, tuple) else mlp_out
                mlp_out = mlp_out if after_mlp is None else after_mlp.module(mlp_out)
                out = out + (mlp_out if scale == 1.0 else mlp_out * scale)
                if parts.factor is not None:
                    out *= parts.layer._buffers[parts.factor]
            return as_returned(out, returns, keys)

        return forward


# The return values of a layer after hidden states: keys chosen by an indexer (True) or None (False). None if
# the layer returns a tensor instead of a tuple.
Returns = tuple[bool, ...] | None


def as_returned(
    hidden: Tensor, returns: Returns, keys: Tensor | None = None
) -> Tensor | tuple[Tensor | None, ...]:
    """Return hidden states in a layer's return format."""
    return hidden if returns is None else (hidden, *(keys if has else None for has in returns))


def argument_names(layer: nn.Module) -> list[str]:
    """Return the names of a layer's positional arguments; `[""]` if it has none."""
    try:
        parameters = [*inspect.signature(type(layer).forward).parameters.values()][1:]
    except (TypeError, ValueError):  # a forward in C
        parameters = []
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] or [""]
