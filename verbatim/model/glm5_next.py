"""GLM-5.3 Flash: residual streams around Kimi delta attention, and sparse attention to pools of keys.

A pool is a block of consecutive tokens. Its key is a mean of their keys, weighted per channel by the
exponentials of gates. An indexer chooses pools by their keys, and a row also attends to its unfinished pool.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import IndexOptions
from verbatim.kv.recurrence import tree_sum
from verbatim.model import products
from verbatim.model.context import active_context, attend, flat_attention, replaces
from verbatim.model.deepseek_v4 import window_mean
from verbatim.model.masks import attends
from verbatim.model.quantized import in_dtype
from verbatim.model.streams import run_layer


@attends("Glm5NextTextIndexer")
def _indexer(module: Any, hidden_states: Tensor, q_resid: Tensor, **_: Any) -> Tensor:
    """Return the positions of the keys in the chosen pools and in the row's own, `[T, 1, k]`."""
    size, context = module.index_kpool, active_context()
    if not module.index_kpool_always_select_tail:
        raise UnsupportedModel(
            "its index_kpool_always_select_tail is False, which is not supported"
        )
    assert context is not None
    rows = hidden_states.flatten(0, 1)
    offsets = context.positions.flatten().to(rows.device) % size
    gate = products.linear(rows, module.index_kpool_compress_gate).float()
    gate = gate + module.index_kpool_compress_ape.float()[offsets]
    keys = module.k_norm(module.wk(rows))
    first = (offsets == 0)[:, None].expand(gate.shape)
    means = keys if size == 1 else window_mean(gate, keys.float(), first).to(keys.dtype)
    k = means.unsqueeze(1)
    q = module.wq_b(q_resid).flatten(0, 1).unflatten(-1, (-1, module.head_dim))
    weights = module.weights_proj(in_dtype(rows, module.weights_proj)).float()
    weights = weights * float(module.n_heads**-0.5 * module.softmax_scale)
    options = IndexOptions(module.index_topk // size, weights, size, pooled=True)
    return attend(module, q, k, k[..., :0], options)


@attends("Glm5NextTextAttention")
def _attention(
    module: Any, hidden_states: Tensor, prev_topk_indices: Tensor | None = None, **_: Any
) -> tuple[Tensor, None, Tensor | None]:
    """Attention to the keys that the indexer of this layer, or of an earlier one, chooses."""
    residual = module.q_a_layernorm(module.q_a_proj(hidden_states))
    q = module.q_b_proj(residual).unflatten(-1, (-1, module.qk_head_dim)).transpose(1, 2)
    latent = module.kv_a_layernorm(module.kv_a_proj_with_mqa(hidden_states))
    k, v = module.expand_kv(latent[:, None], latent[:, None, :, :0])
    indexer, chosen = module._modules.get("indexer"), prev_topk_indices
    if indexer is not None:
        chosen = indexer(hidden_states, residual)
    blocks = None if chosen is None else chosen[None]
    out = flat_attention(module, q, k, v, None, scaling=module.scaling, block_indices=blocks)[0]
    out = module.o_proj(out.flatten(2))
    return out, None, chosen if module.next_skip_topk else None


@replaces("Glm5NextTextDecoderLayer")
def _layer(module: Any, hidden_states: Tensor, input_ids: Any = None, **kwargs: Any) -> Any:
    """Run a layer on residual streams `[B, T, N, D]`; its MoE block, unlike DeepSeek V4's, takes no ids."""
    return run_layer(module, hidden_states, **kwargs)


@replaces("Glm5NextTextHyperHead")
def _hyper_head(module: Any, streams: Tensor) -> Tensor:
    """Return the mean of the residual streams `[B, T, N, D]` after the last layer."""
    return (tree_sum(streams.float(), 2) / streams.shape[2]).to(streams.dtype)
