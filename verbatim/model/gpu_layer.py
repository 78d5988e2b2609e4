"""Fused decoder layers on a GPU, with fewer kernel launches.

Norms add the residual, one kernel rotates queries and keys and stores K and V, and one applies the MLP's
activation. Linear layers, other MLPs and their hooks run unchanged. Fused operations round like the layer's
own forward; a layer is fused only if a trial on random rows is bit-identical to that.
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
from verbatim.model.differential import all_bit_equal, bit_equal
from verbatim.model.fingerprint import Fingerprint, has_hooks, numbers_of
from verbatim.model.layer_parts import LayerParts, Residual
from verbatim.model.layer_trial import Build, LayerTrial
from verbatim.model.norms import Norm
from verbatim.model.structs import NotFusable


def fused_forward(
    parts: LayerParts, options: AttentionOptions, rotates: bool
) -> Callable[..., Any]:
    """Return the replacement for the forward of a layer without sinks and ALiBi.

    `rotates`: whether it takes rotary cos and sin as `position_embeddings`.
    """
    from verbatim.kernels.triton.norm import rms_norm

    layer, attention = parts.layer, parts.attention
    plain = type(layer).forward
    skipped = [attention, *(norm.module for norm in parts.norms.values())]
    if parts.gates:  # the activation's module is skipped, too
        called = (*parts.inputs, parts.output, *parts.gates, parts.down)
        called_ids = {id(m) for part in called if part is not None for m in part.modules()}
        known = {*called_ids, *map(id, skipped), id(layer)}
        skipped += [m for m in layer.modules() if id(m) not in known]
    fields = [m.__dict__ for m in skipped]
    role = parts.norms.get
    # Covers the numbers that the layer's own forward reads in each call, as the owner may change them.
    owners = [layer, *skipped]
    fingerprint = Fingerprint([], numbers_of(owners), map(type, owners))
    fingerprint.record_layouts()

    def normed(
        norm: Norm | None, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of `x`, or of `x + residual` if given, and the sum."""
        if norm is None:
            x = x if residual is None else residual + x
            return x, x
        return rms_norm(x, norm.weight, norm.eps, norm.kind, residual=residual)

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context: Any = active_context()
        if context is None or args or has_hooks(fields) or not fingerprint.unchanged():
            return plain(layer, hidden_states, *args, **kwargs)
        x, _ = normed(role("before_attention"), hidden_states)
        projected = [module(x) for module in parts.inputs]
        width: int = attention.head_dim  # type: ignore[assignment]
        if len(projected) == 1:
            heads: int = attention.config.num_attention_heads  # type: ignore[union-attr, assignment]
            kv = (projected[0].shape[-1] - heads * width) // 2
            projected = [*projected[0].split([heads * width, kv, kv], -1)]
        q, k, v = (m.flatten(0, -2).unflatten(-1, (-1, width)) for m in projected)
        q, k = normed(role("of_queries"), q)[0], normed(role("of_keys"), k)[0]
        cos = sin = None
        if rotates:
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
        projected = [module(x) for module in parts.gates]
        if len(projected) == 1 and projected[0].shape[-1] == 2 * getattr(body, "in_features", 0):
            projected = [*projected[0].chunk(2, -1)]
        x = elementwise.activate(projected[0], parts.activation, *projected[1:])
    out: Any = body(x)
    return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


def fuse_on_gpu(trial: LayerTrial) -> Build:
    """Return a builder of fused forwards for the trial's structure; raise NotFusable if there are none."""
    parts = trial.parts
    norms = any(n.kind >= NormKind.CENTERED or n.bias is not None for n in parts.norms.values())
    options = trial.attended[0][3] if trial.attended else AttentionOptions(1.0)
    for problem, reason in (
        (parts.mixer is not None, "it is recurrent"),
        (parts.residual_scale != 1.0, "its residual branches are scaled"),
        (
            norms or parts.residual is not Residual.SEQUENTIAL,
            "it has LayerNorms, or its attention and its MLP run in parallel",
        ),
        (
            bool(parts.latent) or parts.indexer is not None,
            "its attention has latent projections or an indexer",
        ),
        (trial.returns is not None, "it returns more than hidden states"),
        (not trial.attended, "it does not attend"),
        (
            any(x is not None for x in (options.alibi, options.bias, options.sinks)),
            "its attention has a bias or sinks",
        ),
    ):
        if problem:
            raise NotFusable(reason)
    bodies = []
    if parts.mlp is not None:
        whole = replace(parts, gates=[], down=None)
        bodies = [parts, whole] if parts.gates else [whole]
    has_angles = isinstance(trial.kwargs.get("position_embeddings"), tuple)
    why = "it has no MLP module"
    for body, rotates in itertools.product(bodies, (True, False) if has_angles else (False,)):
        if body.unknown_weights(parts.layer):
            why = "it has weights other than those of its norms and linear layers"
            continue
        if body.gates:  # a clamp has no effect on small numbers
            large = trial.rows * (16.0 if trial.rows.dtype is torch.float16 else 1024.0)
            with torch.no_grad():
                same = bit_equal(_mlp(body, large), _mlp(whole, large))
            if not same:
                why = "its fused forward differs from its own for large inputs"
                continue
        ours = trial.run(fused_forward(body, options, rotates))
        if all_bit_equal(ours, trial.expected):
            trial.parts = body
            return partial(fused_forward, options=options, rotates=rotates)
        why = "its fused forward is not bit-identical to its own"
    raise NotFusable(why)
