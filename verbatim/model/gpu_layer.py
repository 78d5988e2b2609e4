"""A decoder layer on a GPU with fewer launches: norms that add the residual, and one kernel that rotates
queries and keys and writes K and V.

Its linear layers, its MLP and their hooks run as they are, so every sum is the one that the layer's own
forward makes; what lies between is rounded where that rounds. A layer is held to that when it is opened:
with random rows its bits must be those of its own forward, else it runs by that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from verbatim.kernels.options import AttentionOptions, NormKind
from verbatim.model.context import active_context
from verbatim.model.differential import differential_check
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

    layer, attention, mlp = parts.layer, parts.attention, parts.mlp
    assert mlp is not None
    plain = type(layer).forward
    skipped = [attention, *(norm.module for norm in parts.norms.values())]
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
        out = mlp(x)
        out = out[0] if isinstance(out, tuple) else out
        if role("after_mlp") is not None:
            out, _ = normed(role("after_mlp"), out)
        return residual + out

    return forward


def fuse_on_gpu(probe: LayerProbe) -> Build:
    """Return how layers like the tried one run with fewer launches, with the bits of their own forward.

    Raises:
        NotFusable: there is none.
    """
    parts = probe.parts
    layer, norms = parts.layer, [*parts.norms.values()]
    if parts.mlp is None:
        raise NotFusable("it has no module of an MLP")
    known = [*parts.inputs, parts.output, parts.mlp, *(norm.module for norm in norms)]
    counted = {id(p) for module in known for p in module.parameters()}
    if parts.mixer is not None:
        raise NotFusable("it is recurrent")
    if any(id(p) not in counted for p in layer.parameters()):
        raise NotFusable("it has a weight beside those of its norms and linear layers")
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
    for turns in (True, False):
        if turns and not isinstance(probe.kwargs.get("position_embeddings"), tuple):
            continue
        ours = probe.run(forward_of(parts, options, turns))
        if not differential_check(lambda made: made, lambda _: probe.expected, [ours]):
            return partial(forward_of, options=options, turns=turns)
    raise NotFusable("what it makes is not what fewer launches make")
