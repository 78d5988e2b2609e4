"""A decoder layer in one or two calls of the kernels.

One call where K and V lie in plain blocks; else one for what comes before attention and one for what comes
after, with the active pass's attention between them.

The kernels read the module's own parameters where they are, and compute with the functions that the same
modules are run with one by one. So the bits are the same, and an update in place is seen.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.kernels.functions import kernel
from verbatim.kernels.options import AttentionOptions
from verbatim.model.context import active_context
from verbatim.model.fingerprint import Fingerprint, numbers_of, tensors_of
from verbatim.model.layer_parts import LayerParts, Rotation, Shape
from verbatim.model.mixture import MixtureStruct
from verbatim.model.norms import Norm
from verbatim.model.packed import PackedLinear, is_linear
from verbatim.model.structs import (
    ROLES,
    LayerStruct,
    NotFusable,
    address_of,
    matrix_of,
    norm_of,
)
from verbatim.model.tree import hooked_everywhere

_hooks, _pre_hooks = itemgetter("_forward_hooks"), itemgetter("_forward_pre_hooks")


class FusedLayer:
    """The forward of one layer.

    Args:
        parts: of it.
        shape: what its own forward was seen to hand to attention.
        arguments: names of the keyword arguments it was called with.

    Raises:
        NotFusable: its weights are of a kind that the kernels don't read where they are.
    """

    def __init__(self, parts: LayerParts, shape: Shape, arguments: frozenset[str]) -> None:
        self.parts, self._shape, self._arguments = parts, shape, arguments
        self.dtype = _dtype_of(parts.output)
        modules = parts.modules()
        self._fields = [m.__dict__ for m in modules]
        every = [*dict.fromkeys([parts.layer, parts.mlp, *modules])]
        owners = [m for m in every if not is_linear(m)]  # whose numbers make a difference
        self.fingerprint = Fingerprint(tensors_of(modules), numbers_of(owners), map(type, every))
        self._struct, self._mixture = LayerStruct(), MixtureStruct()
        self._mixer: Any = None if parts.mixer is None else parts.mixer.kind()
        self._prepare()
        self.fingerprint.record_layouts()

    @property
    def turns(self) -> bool:
        """Return whether it takes rotary cos and sin."""
        return self._shape.rotation is not Rotation.UNTURNED

    @property
    def experts(self) -> Any:
        """Its experts module, where it has one that the kernels run."""
        mixture = self.parts.mixture
        return None if mixture is None else mixture.experts.module

    @property
    def matrices(self) -> dict[int, nn.Module]:
        """The linear layers whose matrices adapters may add to, by place (`Place` of kernels/layer.cpp)."""
        parts = self.parts
        found = dict(enumerate(parts.inputs))
        found |= {6: parts.output} | {7 + i: module for i, module in enumerate(parts.gates)}
        return found if parts.down is None else found | {9: parts.down}

    @property
    def index(self) -> int:
        """Its place among the layers that adapters have matrices for."""
        return int(self._struct.index)

    @index.setter
    def index(self, value: int) -> None:
        self._struct.index = value

    @property
    def address(self) -> int:
        """The address of its `Layer` of kernels/layer.cpp, which does not move."""
        return ctypes.addressof(self._struct)

    def fits(self) -> bool:
        """Return whether the kernels can run it as it is now, without hooks."""
        if any(map(_hooks, self._fields)) or any(map(_pre_hooks, self._fields)):
            return False
        return not hooked_everywhere() and self.fingerprint.fits(self._prepare)

    def _prepare(self) -> None:
        """Fill in the struct."""
        parts, shape, struct, dtype = self.parts, self._shape, self._struct, self.dtype
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
        struct.output = matrix_of(parts.output, dtype)
        struct.hidden = struct.output.cols
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        widths = [queries * (1 + shape.gated), keys, shape.kv_heads * shape.value_dim]
        if len(parts.inputs) == 1:
            widths = [sum(widths)]
        if parts.mixer is not None:
            widths = parts.mixer.widths
        fits = [m.cols for m in struct.inputs][: len(widths)] == widths
        fits &= all(struct.inputs[i].depth == struct.hidden for i in range(len(widths)))
        fits &= struct.output.depth == shape.heads * shape.value_dim
        if parts.down is not None:
            struct.down = matrix_of(parts.down, dtype)
            wanted = [(2 * struct.down.depth) // len(parts.gates)] * len(parts.gates)
            fits &= [m.cols for m in struct.gates][: len(wanted)] == wanted
            fits &= all(struct.gates[i].depth == struct.hidden for i in range(len(wanted)))
            fits &= struct.down.cols == struct.hidden
        for role in ROLES:
            norm = parts.norms.get(role)
            width = {"of_queries": queries, "of_keys": keys}.get(role)
            found = norm_of(norm, dtype, width or struct.hidden, shape.head_dim if width else None)
            setattr(struct, role, found)
        struct.sinks = struct.mixture = None
        struct.gated = shape.gated
        if shape.sinks:
            sinks = parts.attention._parameters["sinks"]
            fits &= sinks is not None and sinks.shape == (shape.heads,)
            struct.sinks = address_of(sinks, dtype)
        if parts.mixture is not None:
            fits &= parts.mixture.experts.hidden == struct.hidden
            parts.mixture.fill(self._mixture, dtype)
            struct.mixture = ctypes.addressof(self._mixture)
        if parts.mixer is not None and self._mixer is not None:
            self._mixer.fill(parts.mixer, dtype)
            setattr(struct, self._mixer.field, ctypes.addressof(self._mixer))
        if not fits:
            raise NotFusable("its matrices do not fit together")

    def forward(self, plain: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Return the replacement of the layer's forward while the engine runs.

        Args:
            plain: what serves where the kernels don't: the layer's own forward.
        """
        parts, shape, struct = self.parts, self._shape, self._struct
        layer, attention, options = parts.layer, parts.attention, shape.options
        mlp = None if parts.has_mlp else parts.mlp
        experts = self.experts
        plain = plain or functools.partial(_own_forward, layer)
        before, after, whole = (kernel(f"vb_{n}") for n in ("layer_before", "layer_after", "layer"))
        assert before is not None and after is not None and whole is not None
        fits, dtype, arguments = self.fits, self.dtype, self._arguments
        address = ctypes.addressof(struct)
        heads, kv_heads, head_dim, value_dim = (
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.value_dim,
        )
        widths = [heads * head_dim, kv_heads * head_dim, kv_heads * value_dim]
        widths += [heads * head_dim] * shape.gated
        width, num_states = sum(widths), parts.num_states
        turns, hidden_size = shape.rotation is not Rotation.UNTURNED, struct.hidden
        empty, empty_like = torch.empty, torch.empty_like
        with_sinks = attention if shape.sinks else None
        after_mlp = parts.norms.get("after_mlp")
        finish = None if mlp is None else _finish(after_mlp, parts.residual_scale)

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            context: Any = active_context()
            if (
                context is None
                or args
                or kwargs.keys() != arguments
                or hidden_states.dtype is not dtype
                or not (context.trusted or fits())
            ):
                return plain(hidden_states, *args, **kwargs)
            x = hidden_states if hidden_states.is_contiguous() else hidden_states.contiguous()
            rows = x.numel() // hidden_size
            direct = context.direct
            if direct is not None and (direct.dtype is not dtype or direct.count != rows):
                direct = None
            if direct is None and (num_states or context.adapted):
                return plain(hidden_states, **kwargs)
            cos_at = sin_at = None
            angles = wide = 0
            if turns:
                cos, sin = kwargs["position_embeddings"]
                angles, wide = cos.shape[-1], cos.dtype is torch.float32
                if not (cos.is_contiguous() and sin.is_contiguous()):
                    cos, sin = cos.contiguous(), sin.contiguous()
                if cos.numel() != rows * angles or not (wide or cos.dtype is dtype):
                    return plain(hidden_states, **kwargs)
                cos_at, sin_at = cos.data_ptr(), sin.data_ptr()
            x_at, out = x.data_ptr(), empty_like(x)
            normed = normed_at = None
            if finish is not None:
                normed = empty_like(x)
                normed_at = normed.data_ptr()
            routing = None if experts is None else context.routing
            record: tuple[Any, ...] = (None, None, 0)
            if routing is not None:
                assert rows == len(routing.chosen)
                record = routing.addresses(experts)
            if direct is not None:
                if num_states:
                    first = context.next_states(num_states)
                    k_at, v_at = direct.states(first, num_states)
                else:
                    k_at, v_at = direct.stores(context.layer_of(attention))
                whole(
                    address,
                    direct.address,
                    k_at,
                    v_at,
                    x_at,
                    cos_at,
                    sin_at,
                    angles,
                    wide,
                    *record,
                    out.data_ptr(),
                    normed_at,
                )
            else:
                qkv = empty((rows, width), dtype=dtype)
                qkv_at = qkv.data_ptr()
                before(address, x_at, rows, cos_at, sin_at, angles, wide, qkv_at)
                q, k, v, *_ = qkv.split(widths, dim=1)
                own = options if with_sinks is None else add_sinks(options, with_sinks)
                attended = context.attend(
                    attention,
                    q.unflatten(1, (heads, head_dim)),
                    k.unflatten(1, (kv_heads, head_dim)),
                    v.unflatten(1, (kv_heads, value_dim)),
                    own,
                ).contiguous()
                made = attended.data_ptr(), qkv_at
                after(address, x_at, *made, rows, *record, out.data_ptr(), normed_at)
            if finish is None:
                return out
            assert mlp is not None
            of_mlp = mlp(normed)
            return finish(out, of_mlp[0] if isinstance(of_mlp, tuple) else of_mlp)

        return forward


def _own_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def add_sinks(options: AttentionOptions, attention: Any) -> AttentionOptions:
    """Return `options` with the current sinks of `attention`."""
    return replace(options, sinks=attention.sinks.detach().float())


def _finish(norm: Norm | None, scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that adds the output of an MLP outside of the kernels to the residual."""

    def finish(residual: Tensor, made: Tensor) -> Tensor:
        if norm is not None:
            made = norm.module(made)
        return residual + (made if scale == 1.0 else made * scale)

    return finish


def _dtype_of(linear: Any) -> torch.dtype:
    if type(linear) is PackedLinear:
        return linear.packing.dtype
    return linear.weight.dtype  # type: ignore[no-any-return]
