"""Replacements for transformers' forwards and functions, used within the engine's forwards.

A replacement takes the module and the forward's arguments. Most replace attention classes that predate
transformers' attention interface: they call `attend` between the module's own projections. The classes differ
in head layout, rotary embedding and ALiBi scale. `hidden` is `[B, T, H * D]`; B is 1 except in inspection.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import AnyOptions, AttentionOptions, IndexOptions
from verbatim.model import (  # noqa: F401  (some register replacements)
    deepseek_v4,
    glm5_next,
    inkling,
    latent,
    products,
    recurrent_ops,
    streams,
)
from verbatim.model.context import (
    FORWARDS,
    active_context,
    attend,
    replace_function,
    replaces,
    route,
)
from verbatim.model.experts import flat_experts, project_chosen, stack_of, weighted_sum
from verbatim.model.invariant import gelu, sigmoid
from verbatim.model.masks import attends
from verbatim.model.quantized import in_dtype
from verbatim.model.recurrent_ops import FUNCTIONS, causal_conv1d
from verbatim.model.router import AS_IS, SIGMOID, SOFTMAX, RouterForm, choose, forced_experts
from verbatim.quantization.formats import KV_PACKINGS

Forward = Callable[..., Any]


@functools.cache
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Return ALiBi's slope for each head, `[H]` float32 (Press, Smith and Lewis 2022).

    If H is a power of two, the slopes are the powers of 2 ** (-8 / H); otherwise those for the next lower
    power of two, followed by every other slope for the next higher one.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(lower) - 3)))
    slopes = [base**i for i in range(1, lower + 1)]
    if lower < num_heads:
        extra = 2.0 ** (-(2.0 ** -(math.log2(2 * lower) - 3)))
        slopes += [extra**i for i in range(1, 2 * (num_heads - lower), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions) -> Tensor:
    """Attend: q `[B, T, H, Dk]`, k and v `[B, T, Hkv, D]` to `[B, T, H * Dv]`, or to the chosen keys."""
    out = attend(module, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), options)
    return out.reshape(q.shape[0], q.shape[1], -1)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, -1)


def _source(module: nn.Module, name: str) -> Any:
    """Return a global of the file that defines `module`'s class, or None."""
    return getattr(sys.modules[type(module).__module__], name, None)


def _rotated(module: Any, q: Tensor, k: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys `[B, T, H, D]` by cos and sin, with the function of the module's file."""
    rotate = _source(module, "apply_rotary_pos_emb")
    return rotate(q, k, *angles, unsqueeze_dim=2)  # type: ignore[no-any-return]


@attends("BloomAttention")
def _bloom(
    module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    fused = module.query_key_value(hidden_states).unflatten(
        -1, (module.num_heads, 3, module.head_dim)
    )
    slopes = alibi_slopes(module.num_heads, fused.device)
    options = AttentionOptions(scale=float(module.inv_norm_factor), alibi=slopes)
    out = _attend(module, fused[..., 0, :], fused[..., 1, :], fused[..., 2, :], options)
    if module.pretraining_tp > 1 and module.slow_but_exact:  # a sum over slices, without the bias
        return residual + products.linear(out, module.dense.weight), None
    return residual + module.dense(out), None


@attends("FalconAttention")
def _falcon(
    module: Any, hidden_states: Tensor, alibi: Tensor | None = None, *_: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    q, k, v = _falcon_heads(module, module.query_key_value(hidden_states))
    if alibi is None:
        q, k = _rotated(module, q, k, kwargs["position_embeddings"])
    else:
        # Falcon adds a bias to each key's score before the scale, by position and rounded to bfloat16. An
        # additional element of the keys holds it.
        # transformers' eager attention adds the bias twice; scaled_dot_product_attention is the reference.
        positions = _positions(q).view(*q.shape[:2], 1)
        bias = (alibi_slopes(module.num_heads, q.device).bfloat16() * positions)[..., None]
        # Zeros before it fill a group of a quantized KV cache, so that the bias is a group of its own.
        missing = -module.head_dim % max(packing.group for packing in KV_PACKINGS.values())
        k, v = (x.repeat_interleave(module.num_heads // x.shape[2], 2) for x in (k, v))
        q = torch.cat([pad(q, (0, missing)), torch.ones_like(q[..., :1])], -1)
        k = torch.cat([pad(k, (0, missing)), bias.to(k.dtype)], -1)
    options = AttentionOptions(scale=module.inv_norm_factor)
    return module.dense(_attend(module, q, k, v, options)), None


def _falcon_heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q `[B, T, H, D]`, k and v `[B, T, Hkv, D]`, without repeating shared KV heads."""
    batch, length, _ = fused.shape
    heads, width = module.num_heads, module.head_dim
    if module.new_decoder_architecture:
        groups = fused.view(batch, length, module.num_kv_heads, -1, width)
        return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    if module.multi_query:
        rows = fused.view(batch, length, heads + 2, width)
        return rows[..., :-2, :], rows[..., [-2], :], rows[..., [-1], :]
    rows = fused.view(batch, length, heads, 3, width)
    return rows[..., 0, :], rows[..., 1, :], rows[..., 2, :]


@attends("MptAttention")
def _mpt(
    module: Any, hidden_states: Tensor, position_bias: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    # The bias is `[H, 1, positions]`; it increases by the head's slope per position, up to 0.
    slopes = -position_bias[:, 0, -2].float()
    fused, clip = module.Wqkv(hidden_states), module.clip_qkv
    if clip:
        fused = fused.clamp(min=-clip, max=clip)
    q, k, v = (_split(x, module.n_heads) for x in fused.chunk(3, dim=-1))
    options = AttentionOptions(scale=float(module.softmax_scale), alibi=slopes)
    return module.out_proj(_attend(module, q, k, v, options)), None


def _project_qkv(module: Any, heads: int, hidden: Tensor) -> Iterator[Tensor]:
    """Yield the outputs of `q_proj`, `k_proj` and `v_proj`, split into heads."""
    linears = module.q_proj, module.k_proj, module.v_proj
    return (_split(linear(hidden), heads) for linear in linears)


@attends("CodeGenAttention", "GPTJAttention")
def _gptj(module: Any, hidden_states: Tensor, *_: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of GPT-J and CodeGen, with interleaved rotary embedding of `rotary_dim` dimensions."""
    rotate = _source(module, "apply_rotary_pos_emb")
    angles = module.embed_positions[kwargs["position_ids"]].to(hidden_states.dtype)
    sin, cos = angles.chunk(2, dim=-1)
    if type(module).__name__ == "CodeGenAttention":  # laid out for four devices
        fused = module.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1, module.head_dim))
        q, v, k = (x.flatten(-3, -2) for x in fused.unbind(-3))
    else:
        q, k, v = _project_qkv(module, module.num_attention_heads, hidden_states)
    q, k = (_rotate(x, module.rotary_dim, rotate, sin, cos) for x in (q, k))
    options = AttentionOptions(scale=1.0 / float(module.scale_attn))
    return module.out_proj(_attend(module, q, k, v, options)), None


def _rotate(x: Tensor, width: int | None, rotate: Any, sin: Tensor, cos: Tensor) -> Tensor:
    if width is None:
        return rotate(x, sin, cos)  # type: ignore[no-any-return]
    return torch.cat([rotate(x[..., :width], sin, cos), x[..., width:]], dim=-1)


@attends("GPTNeoSelfAttention")
def _gpt_neo(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else 0
    return _projected(module, hidden_states, AttentionOptions(scale=1.0, window=window))


@attends("MvpAttention", "TrOCRAttention", "XGLMAttention")
def _xglm(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attention of BART variants."""
    return _projected(module, hidden_states, AttentionOptions(scale=float(module.scaling)))


def _projected(module: Any, hidden: Tensor, options: AttentionOptions) -> tuple[Tensor, None]:
    """Attend without rotary embedding; queries, keys and values have separate projections."""
    q, k, v = _project_qkv(module, module.num_heads, hidden)
    return module.out_proj(_attend(module, q, k, v, options)), None


@attends("GPTNeoXJapaneseAttention")
def _neox_japanese(
    module: Any, hidden_states: Tensor, *_: Any, **kwargs: Any
) -> tuple[Tensor, None, Any]:
    fused = _split(module.query_key_value(hidden_states), module.num_attention_heads)
    q, k, v = fused.chunk(3, dim=-1)
    width = module.rotary_ndims
    rotated = _rotated(module, q[..., :width], k[..., :width], kwargs["position_embeddings"])
    q, k = (
        torch.cat([turned, x[..., width:]], dim=-1)
        for turned, x in zip(rotated, (q, k), strict=True)
    )
    options = AttentionOptions(scale=1.0 / float(module.norm_factor))
    return module.dense(_attend(module, q, k, v, options)), None, module.dense_bias


@attends("OpenAIGPTAttention")
def _openai_gpt(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    q, k, v = (_split(x, module.n_head) for x in module.c_attn(hidden_states).chunk(3, dim=-1))
    options = AttentionOptions(scale=v.shape[-1] ** -0.5 if module.scale else 1.0)
    return [module.c_proj(_attend(module, q, k, v, options))]


@attends("MegatronBertSelfAttention", "RemBertSelfAttention", "RoFormerSelfAttention")
def _bert(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    sinusoidal_pos: Any = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attention of BERT variants with their own code; their output projection is a separate module.

    RoFormer rotates all dimensions of queries and keys, and of values if its config says so.
    """
    if not module.is_decoder:
        raise UnsupportedModel(f"{type(module).__name__} attends to later tokens")
    linears = module.query, module.key, module.value
    q, k, v = (_split(linear(hidden_states), module.num_attention_heads) for linear in linears)
    if hasattr(module, "rotary_value"):
        angles = sinusoidal_pos.reshape(*q.shape[:2], 1, -1)
        values = [v] if module.rotary_value else []
        q, k, *rotated = module.apply_rotary_position_embeddings(angles, q, k, *values)
        v = rotated[0] if rotated else v
    options = AttentionOptions(scale=module.attention_head_size**-0.5)
    return _attend(module, q, k, v, options), None


@replaces("FalconLinear")
def _falcon_linear(module: Any, x: Tensor) -> Tensor:
    """Falcon's linear layer, which rounds the product before it adds the bias."""
    out = products.linear(x, module.weight)
    return out if module.bias is None else out + module.bias


@replaces("MptModel")
def _with_mask(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run MPT's body or attention with an indexer, which need a 4-d mask but don't read it here."""
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    return type(module).forward(module, *args, **kwargs)


@replaces("RwkvModel")
def _rwkv_model(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run RWKV's body without dividing weights in place, as transformers does in eval mode for float16."""
    module.training = not module.layers_are_rescaled
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module.training = False


@replaces("xLSTMModel")
def _xlstm_model(module: Any, input_ids: Tensor, **_: Any) -> Any:
    """xLSTM's body for the whole batch; transformers splits large batches."""
    hidden = module.embeddings(input_ids)
    for block in module.blocks:
        hidden = block(hidden)[0]
    return _source(module, "xLSTMOutput")(module.out_norm(hidden))


# JetMoE's two mixtures in each layer: of MLPs, and of query and output projections of its attention.


def _jetmoe_choice(router: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and the experts of each row, `[T, k]`."""
    form = RouterForm(router.top_k, AS_IS, SOFTMAX, rounded=True)
    return choose(router.layer(rows).float(), form, None, forced_experts(), rows.dtype)


@replaces("JetMoeMoE")
def _jetmoe_mlps(module: Any, layer_input: Tensor) -> Tensor:
    rows = layer_input.flatten(0, -2)
    weights, experts = _jetmoe_choice(module.router, rows)
    out = flat_experts(module, rows, experts, weights)
    return torch.add(out.view(layer_input.shape), module.bias)


@replaces("JetMoeMoA.map")
def _jetmoe_queries(module: Any, layer_input: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
    rows = layer_input.flatten(0, -2)
    weights, experts = _jetmoe_choice(module.router, rows)
    route(module, experts)
    queries = project_chosen(stack_of(module.input_linear, "weight"), rows, experts)
    return queries.view(*layer_input.shape[:-1], *queries.shape[1:]), None, (weights, experts)


@replaces("JetMoeMoA.reduce")
def _jetmoe_out(module: Any, layer_input: Tensor, topo_info: tuple[Tensor, Tensor]) -> Tensor:
    """Return the weighted sum of the attention experts' output projections."""
    weights, experts = topo_info
    rows = layer_input.flatten(0, -2)
    out = project_chosen(stack_of(module.output_linear, "weight"), rows, experts.reshape(-1, 1))
    out = weighted_sum(out.view(*experts.shape, -1), weights).to(rows.dtype)
    return torch.add(out.view(*layer_input.shape[:2], -1), module.bias)


@replaces("Llama4TextMoe")
def _llama4_experts(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's MoE block, which applies router weights to the inputs of experts, not to their outputs."""
    form = RouterForm(module.top_k, AS_IS, SIGMOID, rounded=True)
    rows = hidden_states.reshape(-1, module.hidden_dim)
    logits = products.linear(rows, module.router.weight)
    weights, experts = choose(logits.float(), form, None, forced_experts(), rows.dtype)
    inputs = (rows[:, None] * weights[..., None].to(rows.dtype)).flatten(0, 1)
    ones = torch.ones_like(weights).reshape(-1, 1)
    outputs = module.experts(inputs, experts.reshape(-1, 1), ones)
    out = module.shared_expert(rows)
    for routed in outputs.view(len(rows), -1, module.hidden_dim).unbind(1):
        out = out + routed
    return out, logits


# Rotary function of each indexer, and whether it rotates the last dimensions instead of the first.
_INDEXERS = {
    "AXK2Indexer": ("apply_rotary_pos_emb", False),
    "DeepseekV32Indexer": ("apply_rotary_pos_emb", False),
    "Dots3NoteTextIndexer": ("apply_rotary_pos_emb_interleave", False),
    "GlmMoeDsaIndexer": ("apply_rotary_pos_emb_interleave", False),
    "HYV4Indexer": ("apply_rotary_pos_emb", True),
    "HYV4VLIndexer": ("apply_rotary_pos_emb", True),
    "MistralLarge4TextIndexer": ("apply_rotary_pos_emb_interleave", False),
}


@attends(*_INDEXERS)
def _indexer(
    module: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Tensor:
    """An indexer of DeepSeek Sparse Attention; returns the positions of the chosen keys, `[B, T, top_k]`."""
    q = _split(module.wq_b(q_resid), module.n_heads)
    return _choose(module, hidden_states, q, position_embeddings)


@attends("MistralLarge4TextIndexer")
def _mistral_indexer(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    position_ids: Tensor,
    **_: Any,
) -> Tensor:
    """Mistral Large 4's indexer, which scales queries by position, and doesn't rotate in all layers."""
    q = _split(module.wq_b(module.q_input_norm(hidden_states)), module.n_heads)
    q = module.softmax_scaling(q, position_ids, head_dim_first=False)
    return _choose(module, hidden_states, q, position_embeddings if module.use_rope else None)


def _choose(
    module: Any, hidden_states: Tensor, q: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the positions of the keys that an indexer chooses for unrotated queries `[B, T, H, D]`."""
    keys = in_dtype(module.wk(hidden_states), module.k_norm)
    k = module.k_norm(keys).to(hidden_states.dtype).unsqueeze(2)
    if position_embeddings is not None:
        rotation, rotated_last = _INDEXERS[type(module).__name__]
        order = -1 if rotated_last else 1
        widths = [module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim][::order]
        (q, q_plain), (k, k_plain) = (x.split(widths, dim=-1)[::order] for x in (q, k))
        q, k = _source(module, rotation)(q, k, *position_embeddings, unsqueeze_dim=2)
        q, k = (
            torch.cat([rotated, plain][::order], dim=-1)
            for rotated, plain in ((q, q_plain), (k, k_plain))
        )
    weights = module.weights_proj(in_dtype(hidden_states, module.weights_proj)).float()
    weights = weights * float(module.n_heads**-0.5 * module.softmax_scale)
    options = IndexOptions(module.index_topk, weights.flatten(0, 1))
    return _attend(module, q, k, k[..., :0], options)


@attends("MiniMaxM3VLIndexer")
def _block_indexer(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Tensor:
    """MiniMax M3's indexer; returns the positions of the keys in the chosen blocks, `[B, T, G, k]`."""
    if module.num_heads != module.config.num_key_value_heads:
        raise UnsupportedModel(
            f"its indexers choose blocks for {module.num_heads} groups of heads, but it has "
            f"{module.config.num_key_value_heads} KV heads"
        )
    if module.local_blocks > module.topk_blocks:
        raise UnsupportedModel(
            f"its indexers always choose {module.local_blocks} blocks, of {module.topk_blocks} in all"
        )
    options = IndexOptions(module.topk_blocks, None, module.block_size, module.local_blocks)
    dim, heads = module.head_dim, module.num_heads
    q = module.q_norm(_split(module.q_proj(hidden_states), heads))
    k = module.k_norm(module.k_proj(hidden_states).unflatten(-1, (-1, dim)))
    q, k = _rotated(module, q, k, (x[..., :dim] for x in position_embeddings))
    chosen: Tensor = _attend(module, q, k, k[..., :0], options).unflatten(-1, (heads, -1))
    return chosen


@attends("Qwen4ExpTextQSAIndexer")
def _pooled_indexer(
    module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> Tensor:
    """Qwen 4's indexer; returns the positions of the keys in the chosen blocks, `[T, 1, k]`.

    A block's key is the mean of its tokens' keys, rotated by the first position and computed at the last.
    """
    rotate, size = _source(module, "apply_rotary_pos_emb"), module.compress_ratio
    heads, dim = module.index_n_heads, module.index_head_dim
    cos, sin = position_embeddings
    queries, keys = module.index_qk_proj(hidden_states).split([heads * dim, dim], dim=-1)
    q = rotate(module.q_layernorm(_split(queries, heads)), None, cos, sin, unsqueeze_dim=2)
    rows = torch.cat([keys, cos, sin], dim=-1)
    taps = rows.new_zeros(rows.shape[-1], size)
    taps[:dim], taps[dim:, 0] = 1.0 / size, 1.0
    rows = causal_conv1d(rows.transpose(1, 2), taps).transpose(1, 2)
    keys, cos, sin = rows.split([dim, cos.shape[-1], sin.shape[-1]], dim=-1)
    k = rotate(module.k_layernorm(keys)[:, :, None], None, cos, sin, unsqueeze_dim=2)
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    ones = torch.ones(q.shape[:2], device=q.device)
    options = IndexOptions(module.block_topk, ones, size, pooled=True)
    return attend(module, q, k, k[..., :0], options)


@attends("Qwen4ExpTextAttention")
def _qwen4(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    """Qwen 4's attention to the keys that its indexer chooses, without transformers' mask."""
    config = module.config
    chosen = module.indexer(hidden_states, position_embeddings)
    q, gate = _split(module.q_proj(hidden_states), config.num_attention_heads).chunk(2, -1)
    k, v = (
        _split(projection(hidden_states), config.num_key_value_heads)
        for projection in (module.k_proj, module.v_proj)
    )
    q, k = _rotated(module, module.q_norm(q), module.k_norm(k), position_embeddings)
    options = AttentionOptions(scale=module.scaling, chosen=chosen)
    out = _attend(module, q, k, v, options) * sigmoid(gate.flatten(2))
    return module.o_proj(out), None


@replaces("Llama4TextRotaryEmbedding")
def _llama4_rotary(module: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Llama 4's rotary embedding without `torch.polar`, which is not batch-invariant."""
    if module.rope_type in ("dynamic", "longrope"):  # frequencies depend on the length
        return type(module).forward(module, x, position_ids)  # type: ignore[no-any-return]
    frequencies = module.inv_freq.to(x.device, torch.float32)
    angles = position_ids[..., None].float() * frequencies
    rotations: Tensor = torch.complex(angles.cos(), angles.sin()) * module.attention_scaling
    return rotations


@replaces("BloomGelu")
def _bloom_gelu(module: Any, x: Tensor) -> Tensor:
    return gelu(x, "tanh")


# ---- positions

# Some models take no `position_ids`, or count positions from the start of a row without padding ids. As a
# flat batch has rows of many sequences, their counting functions return the forward context's positions in
# the engine's forwards. Padding ids in a prompt count like any other id.

_POSITIONS_METHOD = "create_position_ids_from_input_ids"  # in models like RoBERTa
# Arguments of position embeddings like BART's; `cache_length` since transformers 5.24.
_POSITION_ARGUMENTS = {("past_key_values_length", "position_ids"), ("cache_length", "position_ids")}
_IDS_ARGUMENTS = ("input_ids", "input_ids_shape")


def counts_by_padding(cls: type) -> bool:
    """Return whether the positions of a class start after the padding id, as in RoBERTa."""
    return hasattr(cls, _POSITIONS_METHOD)


def _counts_from_the_start(cls: type) -> bool:
    """Return whether a class embeds positions counted from the start of a row, as in BART."""
    if not issubclass(cls, nn.Embedding) or cls is nn.Embedding:
        return False
    _, *names = inspect.signature(cls.forward).parameters
    return tuple(names[1:]) in _POSITION_ARGUMENTS and names[0] in _IDS_ARGUMENTS


def _positions(*args: Any) -> Tensor:
    """Return the positions of the forward context, on the device of the first tensor."""
    context = active_context()
    assert context is not None
    device = next((a.device for a in args if isinstance(a, Tensor)), context.positions.device)
    return context.positions.to(device)


def _after_padding(*args: Any) -> Tensor:
    """Return the positions of the forward context, as `create_position_ids_from_input_ids` would.

    Takes the function's ids and padding id, after `self` if it is a method.
    """
    input_ids, padding_idx, *_ = args if isinstance(args[0], Tensor) else args[1:]
    return _positions(input_ids) + (padding_idx + 1)  # type: ignore[no-any-return]


def _embed(layer: Any, *args: Any, **_: Any) -> Tensor:
    """Return BART's position embeddings for the forward context."""
    return nn.Embedding.forward(layer, _positions(*args) + getattr(layer, "offset", 0))


class _FakeCache:
    """A fake cache with a "length" that, added to the index of a flat row, is the token's position."""

    def __init__(self, positions: Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, *_: Any) -> Tensor:
        return self._before

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


@replaces("Llama4TextAttention")
def _counting_attention(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run Llama 4's attention, which computes its temperature from the cache length and row index."""
    if layer.use_rope:
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    cached = _FakeCache(_positions(hidden_states).flatten())
    kwargs |= {n: cached for n in ("cache", "past_key_values") if n in kwargs}
    rows = hidden_states.flatten(0, 1)[None]
    out, *others = type(layer).forward(layer, rows, *args, **kwargs)
    return out.view(hidden_states.shape), *others


# ---- look-up

_BEFORE_5_24 = ("CodeGenAttention", "GPTJAttention")  # use the attention interface since 5.24


def runs_indexer(module: nn.Module) -> bool:
    """Return whether a module is an indexer that is replaced here."""
    name = type(module).__name__
    return name.endswith("Indexer") and name in FORWARDS


def has_indexers(model: nn.Module) -> bool:
    """Return whether the source files of a model's classes define an indexer, even if `model` has none."""
    names = [name for name in FORWARDS if name.endswith("Indexer")]
    return any(_source(layer, name) for layer in model.modules() for name in names)


def adapter_for(module: nn.Module) -> Forward | None:
    """Return the replacement for a module's forward; None if its class has none or the instance its own."""
    cls = type(module)
    if "forward" in module.__dict__:
        return None
    if _counts_from_the_start(cls):
        return partial(_embed, module)
    if not cls.__module__.startswith("transformers."):
        return None
    if type(module._modules.get("indexer")).__name__ in _INDEXERS:
        return partial(_with_mask, module)
    if cls.__name__ in _BEFORE_5_24 and _source(module, "ALL_ATTENTION_FUNCTIONS"):
        return None
    name = cls.__name__
    if (cls.__module__, name) == ("transformers.models.openai.modeling_openai", "Attention"):
        name = "OpenAIGPTAttention"
    return partial(FORWARDS[name], module) if name in FORWARDS else None


_PADDING_WARNING = "warn_if_padding_and_no_attention_mask"


def _keep_latent(
    expand: Callable[..., tuple[Tensor, Tensor]], module: Any, vectors: Tensor, rotated: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the stored vectors, if the context stores them, or the keys and values that `expand` makes."""
    context = active_context()
    if context is not None and context.stores_latent(module):
        stored = torch.cat([vectors, rotated], -1)
        return stored, stored
    return expand(module, vectors, rotated)


def patch_functions(module: nn.Module) -> None:
    """Patch functions used by a model for recurrent operations, positions and residual streams; idempotent.

    Also silence the padding warning, which reads the token ids in each forward. Outside of the engine's
    forwards the originals are called.
    """
    for file in recurrent_ops.files_of(module):
        for name in FUNCTIONS.keys() & vars(file).keys():
            replace_function(file, name, FUNCTIONS[name])
    for cls in {type(layer) for layer in module.modules()}:
        if counts_by_padding(cls):
            replace_function(cls, _POSITIONS_METHOD, _after_padding)
        if (method := latent.method_of(cls)) is not None:
            replace_function(cls, latent.METHOD, partial(_keep_latent, method))
        if hasattr(cls, _PADDING_WARNING):
            replace_function(cls, _PADDING_WARNING, lambda *_, **__: None)
        if cls.__module__.startswith("transformers."):
            for name, ours in FORWARDS.items():
                if name.startswith(f"{cls.__name__}."):
                    replace_function(cls, name.rpartition(".")[2], ours)
