"""A decoder layer on a GPU with fewer launches: norms that add the residual, one kernel that rotates
queries and keys and writes K and V, and one between the linear layers of an MLP.

Its linear layers, any other MLP and their hooks run as they are, so every sum is the one that the layer's own
forward makes; what lies between is rounded where that rounds. A layer is held to that when it is opened:
with random rows its bits must be those of its own forward, else it runs by that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.kernels.options import AttentionOptions, NormKind
from verbatim.model import elementwise
from verbatim.model.context import active_context
from verbatim.model.differential import bit_equal, differential_check
from verbatim.model.fingerprint import Fingerprint, numbers_of
from verbatim.model.layer_parts import LayerParts, Residual
from verbatim.model.layer_trial import Build, LayerProbe
from verbatim.model.norms import Norm
from verbatim.model.structs import NotFusable

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def forward_of(parts: LayerParts, options: AttentionOptions, turns: bool) -> Callable[..., Any]:
    """Return the replacement of a layer's forward.

    Args:
        options: of its attention; without sinks and ALiBi.
        turns: it is handed angles as `position_embeddings`.
    """
    from verbatim.kernels.triton.norm import rms_norm

    layer, attention = parts.layer, parts.attention
    plain = type(layer).forward
    skipped = [attention, *(norm.module for norm in parts.norms.values())]
    if parts.gates:  # also the activation's module
        called = (*parts.inputs, parts.output, *parts.gates, parts.down)
        run = {id(m) for part in called if part is not None for m in part.modules()}
        known = {*run, *map(id, skipped), id(layer)}
        skipped += [m for m in layer.modules() if id(m) not in known]
    fields = [m.__dict__ for m in skipped]
    role = parts.norms.get
    # What the layer's own forward would read each time: an owner may change it.
    owners = [layer, *skipped]
    fingerprint = Fingerprint([], numbers_of(owners), map(type, owners))
    fingerprint.record_layouts()

    def normed(
        norm: Norm | None, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of `x`, or of its sum with the residual, and that sum."""
        if norm is None:
            x = x if residual is None else residual + x
            return x, x
        return rms_norm(x, norm.weight, norm.eps, norm.kind, residual=residual)

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context: Any = active_context()
        hooked = any(values[name] for values in fields for name in _HOOKS)
        if context is None or args or hooked or not fingerprint.unchanged():
            return plain(layer, hidden_states, *args, **kwargs)
        x, _ = normed(role("before_attention"), hidden_states)
        made = [module(x) for module in parts.inputs]
        width: int = attention.head_dim  # type: ignore[assignment]
        if len(made) == 1:
            heads: int = attention.config.num_attention_heads  # type: ignore[union-attr, assignment]
            kv = (made[0].shape[-1] - heads * width) // 2
            made = [*made[0].split([heads * width, kv, kv], -1)]
        q, k, v = (m.flatten(0, -2).unflatten(-1, (-1, width)) for m in made)
        q, k = normed(role("of_queries"), q)[0], normed(role("of_keys"), k)[0]
        cos = sin = None
        if turns:
            cos, sin = (angles.flatten(0, -2) for angles in kwargs["position_embeddings"])
        attended = context.attend_rotated(attention, q, k, v, cos, sin, options)
        out = parts.output(attended.reshape(*hidden_states.shape[:-1], -1))
        if role("after_attention") is not None:
            out, _ = normed(role("after_attention"), out)
        x, residual = normed(role("before_mlp"), out, hidden_states)
        out = _mlp(parts, x)
        if role("after_mlp") is not None:
            out, _ = normed(role("after_mlp"), out)
        return residual + out

    return forward


def _mlp(parts: LayerParts, x: Tensor) -> Tensor:
    body: Any = parts.down if parts.gates else parts.mlp
    if parts.gates:
        made = [module(x) for module in parts.gates]
        if len(made) == 1 and made[0].shape[-1] == 2 * getattr(body, "in_features", 0):
            made = [*made[0].chunk(2, -1)]
        x = elementwise.activate(made[0], parts.activation, *made[1:])
    out: Any = body(x)
    return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


def fuse_on_gpu(probe: LayerProbe) -> Build:
    """Return how layers like the tried one run with fewer launches, with the bits of their own forward.

    Raises:
        NotFusable: there is none.
    """
    parts = probe.parts
    norms = [*parts.norms.values()]
    if parts.mixer is not None:
        raise NotFusable("it is recurrent")
    if parts.residual_scale != 1.0:
        raise NotFusable("it scales what it adds")
    if (
        any(n.kind >= NormKind.CENTERED or n.bias is not None for n in norms)
        or parts.residual is not Residual.SEQUENTIAL
    ):
        raise NotFusable("it has LayerNorms, or its attention and its MLP are side by side")
    if probe.returns is not None:
        raise NotFusable("it returns more than hidden states")
    if not probe.attended:
        raise NotFusable("it does not attend")
    options = probe.attended[0][3]
    if options.alibi is not None or options.sinks is not None:
        raise NotFusable("its attention has a bias or sinks of its own")
    bodies = []
    if parts.mlp is not None:
        whole = replace(parts, gates=[], down=None)
        bodies = [parts, whole] if parts.gates else [whole]
    has_angles = isinstance(probe.kwargs.get("position_embeddings"), tuple)
    why = "it has no module of an MLP"
    for body, turns in itertools.product(bodies, (True, False) if has_angles else (False,)):
        mlp = [*body.gates, body.down] if body.gates else [body.mlp]
        known = [*parts.inputs, parts.output, *mlp, *(norm.module for norm in norms)]
        counted = {id(p) for module in known for p in module.parameters()}
        if any(id(p) not in counted for p in parts.layer.parameters()):
            why = "it has a weight beside those of its norms and linear layers"
            continue
        if body.gates:  # small numbers do not show that it clamps
            large = probe.rows * (16.0 if probe.rows.dtype is torch.float16 else 1024.0)
            with torch.no_grad():
                same = bit_equal(_mlp(body, large), _mlp(whole, large))
            if not same:
                why = "what it makes of large numbers is not what fewer launches make"
                continue
        ours = probe.run(forward_of(body, options, turns))
        if not differential_check(lambda made: made, lambda _: probe.expected, [ours]):
            probe.parts = body
            return partial(forward_of, options=options, turns=turns)
        why = "what it makes is not what fewer launches make"
    raise NotFusable(why)
