"""DeepSeek V4's attention to recent tokens and to records, each of which compresses a window of tokens.

A record is the mean of the values of 4 or 128 tokens, weighted per channel by the exponentials of gates. It
is computed at the window's last token (`weighted_mean`, with a state of constant size) and stored at that
token's slot, in place of its values: in these models the keys are also the values. Windows of 4 tokens
overlap with their predecessors, and an indexer chooses the records to which each row attends.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import AttentionOptions, IndexOptions
from verbatim.kv.recurrence import weighted_mean
from verbatim.kv.states import StateShape
from verbatim.model import products
from verbatim.model.context import attend, replaces
from verbatim.model.masks import attends
from verbatim.model.recurrent_ops import update_state


def _rotate(module: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last dimensions of heads `[B, T, H, D]`."""
    rotate: Any = vars(sys.modules[type(module).__module__])["apply_rotary_pos_emb"]
    rotated: Tensor = rotate(x, cos, sin, unsqueeze_dim=2)
    return rotated


def _records(layer: Any, hidden: Tensor, position_ids: Tensor) -> Tensor:
    """Return a record of each row's window up to the row, `[T, 1, D]`; complete at the window's end."""
    rate, dim = layer.compress_rate, layer.head_dim
    position_ids = position_ids.expand(hidden.shape[:2])
    starts = position_ids // rate * rate
    positions = position_ids.flatten()
    value, gate = (x(hidden).flatten(0, 1).float() for x in (layer.kv_proj, layer.gate_proj))
    key = gate + layer.position_bias.float()[positions % rate]
    forgets = (positions % rate == 0)[:, None].expand(key.shape)
    overlaps, odd = key.shape[1] > dim, (positions // rate % 2 == 1)[:, None]
    if overlaps:
        # The first half of a token's channels belongs to the next window, the second half to its own. Two
        # means alternate: in each window, one reads the first half and the other the second half.
        key, value = (torch.where(odd, x.roll(dim, 1), x) for x in (key, value))
        forgets = forgets & ((torch.arange(2 * dim, device=odd.device) >= dim) == odd)
    mean = window_mean(key, value, forgets)
    if overlaps:
        mean = torch.where(odd, mean[:, :dim], mean[:, dim:])
    rows = layer.kv_norm(mean.to(hidden.dtype)).view(*hidden.shape[:2], 1, dim)
    angles = layer.rotary_emb(hidden, position_ids=starts, layer_type=layer.rope_layer_type)
    return _rotate(layer, rows, *angles).flatten(0, 1)


def window_mean(gate: Tensor, value: Tensor, first: Tensor) -> Tensor:
    """Return the mean of each row's window up to the row, weighted by exp(gate); any value for first rows.

    Args:
        gate, value: `[T, C]` float32.
        first: `[T, C]`; whether a window begins with the row.
    """
    decay = torch.where(first, torch.inf, 0.0)
    update = partial(weighted_mean, gate, value, gate.new_zeros(gate.shape[1]), decay)
    return update_state(StateShape((3, gate.shape[1]), torch.float32), update)


@replaces("DeepseekV4CSACompressor", "DeepseekV4HCACompressor", recurrent=True)
def _compressor(
    layer: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor | int]:
    """Return the records, and those to attend to: the positions of some, or the window size for all."""
    records, chooser = _records(layer, hidden_states, position_ids), layer._modules.get("indexer")
    if chooser is None:  # heavily compressed attention
        return records, layer.compress_rate
    return records, chooser(hidden_states, q_residual, position_ids)[:, 0]


@attends("DeepseekV4Indexer")
def _indexer(
    module: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor
) -> Tensor:
    """Return the positions of the records chosen by DeepSeek V4's indexer, which has its own, `[T, 1, k]`."""
    scorer = module.scorer
    k = _records(module, hidden_states, position_ids)
    angles = module.rotary_emb(
        hidden_states, position_ids=position_ids, layer_type=module.rope_layer_type
    )
    q = module.q_b_proj(q_residual).unflatten(-1, (module.num_heads, module.head_dim))
    q = _rotate(module, q, *angles).flatten(0, 1)
    scale = float(scorer.weights_scaling * scorer.softmax_scale)
    weights = scorer.weights_proj(hidden_states).float().flatten(0, 1) * scale
    options = IndexOptions(
        module.index_topk, weights, module.compress_rate, pooled=True, records=True
    )
    return attend(module, q, k, k[..., :0], options)


@attends("DeepseekV4Attention")
def _attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    """DeepSeek V4's attention."""
    cos, sin = position_embeddings[module.rope_layer_type]
    heads = (-1, module.head_dim)
    residual = module.q_a_norm(module.q_a_proj(hidden_states))
    q = module.q_b_norm(module.q_b_proj(residual).unflatten(-1, heads))
    k = module.kv_norm(module.kv_proj(hidden_states)).unflatten(-1, heads)
    q, k = (_rotate(module, x, cos, sin) for x in (q, k))
    v, records, compressor = k.flatten(0, 1), None, module.compressor
    if compressor is not None:
        if compressor.compress_rate < 2:
            raise UnsupportedModel("its compress_rate is below 2, which is not supported")
        v, records = compressor(hidden_states, residual, position_ids)
    options = AttentionOptions(
        scale=module.scaling,
        window=module.sliding_window,
        sinks=module.sinks.detach().float(),
        records=records,
    )
    out = attend(module, q.flatten(0, 1), k.flatten(0, 1), v, options).view(q.shape)
    # The values are rotated, as they are the keys. Rotating back by the row's position makes this relative.
    grouped = _rotate(module, out, cos, -sin).flatten(2)
    grouped = grouped.unflatten(-1, (module.config.o_groups, -1))
    return module.o_b_proj(module.o_a_proj(grouped).flatten(2)), None


@replaces("DeepseekV4GroupedLinear")
def _grouped_linear(module: Any, x: Tensor) -> Tensor:
    """Apply a linear layer per group of columns, `[..., G, D]` to `[..., G, R]`."""
    weight = module.weight.unflatten(0, (module.n_groups, -1)).transpose(1, 2)
    out = products.matmul(x.flatten(0, -3).transpose(0, 1), weight)
    return out.transpose(0, 1).reshape(*x.shape[:-1], -1)
