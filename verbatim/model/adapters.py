"""Forwards and functions of transformers that are replaced during the engine's forwards.

A forward here takes the module and its arguments. Most are of attention that predates transformers' attention
interface: the module's own projections around `attend`. These classes differ in the layout of heads, rotary
embeddings and the scale of ALiBi. `hidden` is `[B, T, H * D]`, with B = 1 except in inspection.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import AttentionOptions, IndexOptions
from verbatim.model import compressed, positions, products, recurrent_layers, streams
from verbatim.model.context import attend, replace_function
from verbatim.model.experts import flat_experts
from verbatim.model.invariant import gelu, sigmoid
from verbatim.model.masks import LATER, NotedMask
from verbatim.model.recurrent_ops import FUNCTIONS, causal_conv1d
from verbatim.model.router import AS_IS, SIGMOID, RouterForm, choose, forced_experts

Forward = Callable[..., Any]


@functools.cache
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Return one slope per head, `[H]` float32 (Press, Smith and Lewis 2022).

    For a power of two the slopes are the powers of 2 ** (-8 / H); otherwise those of the nearest lower
    power of two, followed by every other slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(lower) - 3)))
    slopes = [base**i for i in range(1, lower + 1)]
    if lower < num_heads:
        extra = 2.0 ** (-(2.0 ** -(math.log2(2 * lower) - 3)))
        slopes += [extra**i for i in range(1, 2 * (num_heads - lower), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend: q `[B, T, H, Dk]`, k and v `[B, T, Hkv, D]` to `[B, T, H * Dv]`."""
    out = attend(module, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), options)
    return out.reshape(q.shape[0], q.shape[1], -1)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, -1)


def _source(module: nn.Module, name: str) -> Any:
    """Return a global of the file that defines `module`'s class, or None."""
    return getattr(sys.modules[type(module).__module__], name, None)


def _bloom(
    module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    fused = module.query_key_value(hidden_states).unflatten(
        -1, (module.num_heads, 3, module.head_dim)
    )
    slopes = alibi_slopes(module.num_heads, fused.device)
    options = AttentionOptions(scale=float(module.inv_norm_factor), alibi=slopes)
    out = _attend(module, fused[..., 0, :], fused[..., 1, :], fused[..., 2, :], options)
    return residual + module.dense(out), None


def _falcon(
    module: Any, hidden_states: Tensor, alibi: Tensor | None = None, *_: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    q, k, v = _falcon_heads(module, module.query_key_value(hidden_states))
    slopes = None
    if alibi is None:
        rotate = _source(module, "apply_rotary_pos_emb")
        rotated = rotate(q.transpose(1, 2), k.transpose(1, 2), *kwargs["position_embeddings"])
        q, k = (x.transpose(1, 2) for x in rotated)
    else:
        # Falcon scales score and bias together, so the slope includes the scale. Its slopes are rounded to
        # bfloat16 in the original. (transformers' eager attention adds the bias twice, also with the mask;
        # its default, scaled_dot_product_attention, does not, and is the reference here.)
        slopes = alibi_slopes(module.num_heads, q.device).bfloat16().float()
        slopes = slopes * module.inv_norm_factor
    options = AttentionOptions(scale=module.inv_norm_factor, alibi=slopes)
    return module.dense(_attend(module, q, k, v, options)), None


def _falcon_heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q `[B, T, H, D]`, k and v `[B, T, Hkv, D]`, without repeated shared heads."""
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


def _mpt(
    module: Any, hidden_states: Tensor, position_bias: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    # `[H, 1, positions]`, rising by a head's slope from position to position up to 0.
    slopes = -position_bias[:, 0, -2].float()
    fused, clip = module.Wqkv(hidden_states), module.clip_qkv
    if clip:
        fused = fused.clamp(min=-clip, max=clip)
    q, k, v = (_split(x, module.n_heads) for x in fused.chunk(3, dim=-1))
    options = AttentionOptions(scale=float(module.softmax_scale), alibi=slopes)
    return module.out_proj(_attend(module, q, k, v, options)), None


def _separate(module: Any, heads: int, hidden: Tensor) -> Iterator[Tensor]:
    """Return the heads of `q_proj`, `k_proj` and `v_proj`."""
    linears = module.q_proj, module.k_proj, module.v_proj
    return (_split(linear(hidden), heads) for linear in linears)


def _gptj(module: Any, hidden_states: Tensor, *_: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """GPT-J's and CodeGen's: rotary over `rotary_dim` dimensions, in pairs of neighbours."""
    rotate = _source(module, "apply_rotary_pos_emb")
    angles = module.embed_positions[kwargs["position_ids"]].to(hidden_states.dtype)
    sin, cos = angles.chunk(2, dim=-1)
    if type(module).__name__ == "CodeGenAttention":  # laid out for four devices
        fused = module.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1, module.head_dim))
        q, v, k = (x.flatten(-3, -2) for x in fused.unbind(-3))
    else:
        q, k, v = _separate(module, module.num_attention_heads, hidden_states)
    q, k = (_rotate(x, module.rotary_dim, rotate, sin, cos) for x in (q, k))
    options = AttentionOptions(scale=1.0 / float(module.scale_attn))
    return module.out_proj(_attend(module, q, k, v, options)), None


def _rotate(x: Tensor, width: int | None, rotate: Any, sin: Tensor, cos: Tensor) -> Tensor:
    if width is None:
        return rotate(x, sin, cos)  # type: ignore[no-any-return]
    return torch.cat([rotate(x[..., :width], sin, cos), x[..., width:]], dim=-1)


def _gpt_neo(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else 0
    return _projected(module, hidden_states, AttentionOptions(scale=1.0, window=window))


def _xglm(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attention of BART's kind."""
    return _projected(module, hidden_states, AttentionOptions(scale=float(module.scaling)))


def _projected(module: Any, hidden: Tensor, options: AttentionOptions) -> tuple[Tensor, None]:
    """Attend without positions, between separate projections."""
    q, k, v = _separate(module, module.num_heads, hidden)
    return module.out_proj(_attend(module, q, k, v, options)), None


def _neox_japanese(
    module: Any, hidden_states: Tensor, *_: Any, **kwargs: Any
) -> tuple[Tensor, None, Any]:
    rotate, width = _source(module, "apply_rotary_pos_emb"), module.rotary_ndims
    fused = _split(module.query_key_value(hidden_states), module.num_attention_heads)
    q, k, v = fused.chunk(3, dim=-1)
    turning = (x[..., :width].transpose(1, 2) for x in (q, k))
    q, k = (
        torch.cat([turned.transpose(1, 2), x[..., width:]], dim=-1)
        for turned, x in zip(rotate(*turning, *kwargs["position_embeddings"]), (q, k), strict=True)
    )
    options = AttentionOptions(scale=1.0 / float(module.norm_factor))
    return module.dense(_attend(module, q, k, v, options)), None, module.dense_bias


def _openai_gpt(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    q, k, v = (_split(x, module.n_head) for x in module.c_attn(hidden_states).chunk(3, dim=-1))
    options = AttentionOptions(scale=v.shape[-1] ** -0.5 if module.scale else 1.0)
    return [module.c_proj(_attend(module, q, k, v, options))]


def _bert(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    sinusoidal_pos: Any = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    """BERT variants with their own attention, without output projection.

    RoFormer's is rotary over all dimensions, of values if its config says so.
    """
    if not module.is_decoder:
        raise UnsupportedModel(f"{type(module).__name__} attends to later tokens")
    linears = module.query, module.key, module.value
    q, k, v = (_split(linear(hidden_states), module.num_attention_heads) for linear in linears)
    if hasattr(module, "rotary_value"):
        angles = sinusoidal_pos.reshape(*q.shape[:2], 1, -1)
        values = [v] if module.rotary_value else []
        q, k, *turned = module.apply_rotary_position_embeddings(angles, q, k, *values)
        v = turned[0] if turned else v
    options = AttentionOptions(scale=module.attention_head_size**-0.5)
    return _attend(module, q, k, v, options), None


def _falcon_linear(module: Any, x: Tensor) -> Tensor:
    """Falcon's linear, which rounds between product and bias."""
    out = products.linear(x, module.weight)
    return out if module.bias is None else out + module.bias


def _with_mask(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward with a mask of four dimensions, where there is none; it is not read.

    For MPT's body, and attention with an indexer.
    """
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    return type(module).forward(module, *args, **kwargs)


def _rwkv_model(module: Any, *args: Any, **kwargs: Any) -> Any:
    """RWKV's body, which leaves the weights as they are.

    In eval mode transformers divides some weights, in place, by powers of two, against overflows in float16.
    """
    module.training = not module.layers_are_rescaled
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module.training = False


def _xlstm_model(module: Any, input_ids: Tensor, **_: Any) -> Any:
    """xLSTM's body, which transformers cuts where a batch has many rows."""
    hidden = module.embeddings(input_ids)
    for block in module.blocks:
        hidden = block(hidden)[0]
    return _source(module, "xLSTMOutput")(module.out_norm(hidden))


def _jetmoe_experts(module: Any, inputs: Tensor, expert_size: list[int]) -> Tensor:
    """JetMoE's experts, a product per expert over sorted rows."""
    rows = inputs.split(expert_size)
    return torch.cat([products.linear(x, w) for x, w in zip(rows, module.weight, strict=True)])


def _llama4_experts(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's mixture, which weights the inputs of its experts, not the outputs."""
    form = RouterForm(module.top_k, AS_IS, SIGMOID, rounded=True)
    rows = hidden_states.reshape(-1, module.hidden_dim)
    logits = products.linear(rows, module.router.weight)
    weights, experts = choose(logits.float(), form, None, forced_experts(), rows.dtype)
    inputs = (rows[:, None] * weights[..., None].to(rows.dtype)).flatten(0, 1)
    ones = torch.ones_like(weights).reshape(-1, 1)
    outputs = flat_experts(module.experts, inputs, experts.reshape(-1, 1), ones)
    out = module.shared_expert(rows)
    for routed in outputs.view(len(rows), -1, module.hidden_dim).unbind(1):
        out = out + routed
    return out, logits


def _indexer(
    module: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Tensor:
    """An indexer of DeepSeek Sparse Attention: positions `[B, T, top_k]`."""
    rotation, rotated_last = _INDEXERS[type(module).__name__]
    order = -1 if rotated_last else 1
    widths = [module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim]
    q = _split(module.wq_b(q_resid), module.n_heads)
    keys = _in_dtype(module.wk(hidden_states), module.k_norm)
    k = module.k_norm(keys).to(hidden_states.dtype).unsqueeze(2)
    (q, q_plain), (k, k_plain) = (x.split(widths[::order], dim=-1)[::order] for x in (q, k))
    q, k = _source(module, rotation)(q, k, *position_embeddings, unsqueeze_dim=2)
    q, k = (
        torch.cat([turned, plain][::order], dim=-1).flatten(0, 1)
        for turned, plain in ((q, q_plain), (k, k_plain))
    )
    weights = module.weights_proj(_in_dtype(hidden_states, module.weights_proj)).float()
    weights = weights * float(module.n_heads**-0.5 * module.softmax_scale)
    options = IndexOptions(module.index_topk, weights.flatten(0, 1))
    chosen = attend(module, q, k, k[..., :0], options)
    return chosen.view(*hidden_states.shape[:2], -1)


def _block_indexer(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Tensor:
    """MiniMax M3's indexer: the keys in the chosen blocks, `[B, T, G, k]`."""
    rotate, dim = _source(module, "apply_rotary_pos_emb"), module.head_dim
    if module.num_heads != module.config.num_key_value_heads:
        raise UnsupportedModel(
            f"its indexers choose blocks for {module.num_heads} groups of heads, and it has "
            f"{module.config.num_key_value_heads} KV heads"
        )
    if module.local_blocks > module.topk_blocks:
        raise UnsupportedModel(
            f"its indexers always choose {module.local_blocks} blocks, of {module.topk_blocks} in all"
        )
    options = IndexOptions(module.topk_blocks, None, module.block_size, module.local_blocks)
    shape = *hidden_states.shape[:2], -1, dim
    q = module.q_norm(module.q_proj(hidden_states).view(shape)).transpose(1, 2)
    k = module.k_norm(module.k_proj(hidden_states).view(shape)).transpose(1, 2)
    q, k = rotate(q, k, *(x[..., :dim] for x in position_embeddings))
    q, k = (x.transpose(1, 2).flatten(0, 1) for x in (q, k))
    chosen = attend(module, q, k, k[..., :0], options)
    return chosen.view(*hidden_states.shape[:2], *chosen.shape[1:])


def _pooled_indexer(
    module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> Tensor:
    """Qwen 4's indexer: the keys in the chosen blocks, `[T, 1, k]`.

    A block's key is the mean of its tokens' keys, rotated as the first of them; it is made at the last one.
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


def _qwen4(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    """Qwen 4's attention, which makes a mask of what its indexer chooses."""
    rotate, config = _source(module, "apply_rotary_pos_emb"), module.config
    chosen = module.indexer(hidden_states, position_embeddings)
    q, gate = _split(module.q_proj(hidden_states), config.num_attention_heads).chunk(2, -1)
    k, v = (
        _split(projection(hidden_states), config.num_key_value_heads)
        for projection in (module.k_proj, module.v_proj)
    )
    q, k = rotate(module.q_norm(q), module.k_norm(k), *position_embeddings, unsqueeze_dim=2)
    options = AttentionOptions(scale=module.scaling, chosen=chosen)
    out = _attend(module, q, k, v, options) * sigmoid(gate.flatten(2))
    return module.o_proj(out), None


def _in_dtype(x: Tensor, layer: nn.Module) -> Tensor:
    weight: Any = layer._parameters.get("weight")
    held = getattr(layer, "packing", None) if weight is None else weight  # if it is quantized
    return x if held is None else x.to(held.dtype)


def _llama4_rotary(module: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Llama 4's rotary embedding without `torch.polar`.

    The bits of `torch.polar` depend on how many rows there are, and on their layout.
    """
    if module.rope_type in ("dynamic", "longrope"):  # frequencies follow the length
        return type(module).forward(module, x, position_ids)  # type: ignore[no-any-return]
    frequencies = module.inv_freq.to(x.device, torch.float32)
    angles = position_ids[..., None].float() * frequencies
    turns: Tensor = torch.complex(angles.cos(), angles.sin()) * module.attention_scaling
    return turns


# The rotary function of an indexer, and whether it rotates the last dimensions instead of the first.
_INDEXERS = {
    "AXK2Indexer": ("apply_rotary_pos_emb", False),
    "DeepseekV32Indexer": ("apply_rotary_pos_emb", False),
    "Dots3NoteTextIndexer": ("apply_rotary_pos_emb_interleave", False),
    "GlmMoeDsaIndexer": ("apply_rotary_pos_emb_interleave", False),
    "HYV4Indexer": ("apply_rotary_pos_emb", True),
}
_BLOCK_INDEXERS: dict[str, Forward] = {
    "DeepseekV4Indexer": compressed.indexer,
    "MiniMaxM3VLIndexer": _block_indexer,
    "Qwen4ExpTextQSAIndexer": _pooled_indexer,
}
# Attention and indexers, which are checked to be given no other mask than a causal one.
_ATTENTION: dict[str, Forward] = {
    **dict.fromkeys(_INDEXERS, _indexer),
    **_BLOCK_INDEXERS,
    "BloomAttention": _bloom,
    "CodeGenAttention": _gptj,
    "DeepseekV4Attention": compressed.attention,
    "FalconAttention": _falcon,
    "GPTJAttention": _gptj,
    "GPTNeoSelfAttention": _gpt_neo,
    "GPTNeoXJapaneseAttention": _neox_japanese,
    "MegatronBertSelfAttention": _bert,
    "MptAttention": _mpt,
    "MvpAttention": _xglm,
    "OpenAIGPTAttention": _openai_gpt,
    "Qwen4ExpTextAttention": _qwen4,
    "RemBertSelfAttention": _bert,
    "RoFormerSelfAttention": _bert,
    "TrOCRAttention": _xglm,
    "XGLMAttention": _xglm,
}
_FORWARDS: dict[str, Forward] = {
    **recurrent_layers.FORWARDS,
    **streams.FORWARDS,
    "BloomGelu": lambda module, x: gelu(x, "tanh"),
    "DeepseekV4GroupedLinear": compressed.grouped_linear,
    "FalconLinear": _falcon_linear,
    "JetMoeParallelExperts": _jetmoe_experts,
    "Llama4TextAttention": positions.counting_attention,
    "Llama4TextMoe": _llama4_experts,
    "Llama4TextRotaryEmbedding": _llama4_rotary,
    "MptModel": _with_mask,
    "RwkvModel": _rwkv_model,
    "xLSTMModel": _xlstm_model,
}
_BEFORE_5_24 = (
    "CodeGenAttention",
    "GPTJAttention",
)  # which have the attention interface since then


def runs_indexer(module: nn.Module) -> bool:
    """Return whether a module is an indexer with a forward here."""
    return type(module).__name__ in (*_INDEXERS, *_BLOCK_INDEXERS)


def has_indexers(model: nn.Module) -> bool:
    """Return whether such an indexer is in the files of a model's classes, if not in all parts of it."""
    return any(
        _source(layer, name) for layer in model.modules() for name in (*_INDEXERS, *_BLOCK_INDEXERS)
    )


def adapter_for(module: nn.Module) -> Forward | None:
    """Return the replacement of a module's forward by its class, else None.

    A forward replaced on the instance is kept.
    """
    cls = type(module)
    if "forward" in module.__dict__:
        return None
    if positions.counts_from_the_start(cls):
        return partial(positions.embed, module)
    if not cls.__module__.startswith("transformers."):
        return None
    if type(module._modules.get("indexer")).__name__ in _INDEXERS:
        return partial(_with_mask, module)
    if cls.__name__ in _BEFORE_5_24 and _source(module, "ALL_ATTENTION_FUNCTIONS"):
        return None
    name = cls.__name__
    if (cls.__module__, name) == ("transformers.models.openai.modeling_openai", "Attention"):
        name = "OpenAIGPTAttention"
    if name in _ATTENTION:
        return partial(_attend_causally, module, _ATTENTION[name])
    return partial(_FORWARDS[name], module) if name in _FORWARDS else None


def _attend_causally(module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run a forward; refuse masks that are not causal, with the module's own window if it has one.

    Masks are only passed in inspection.
    """
    windows = (0, getattr(module, "sliding_window", None))
    for value in (*args, *kwargs.values()):
        if isinstance(value, NotedMask) and value.window not in windows:
            raise UnsupportedModel(
                f"{type(module).__name__} "
                + ("attends to later tokens" if value.window == LATER else "has another mask")
            )
    return forward(module, *args, **kwargs)


def patch_functions(module: nn.Module) -> None:
    """Replace functions that a model's classes call for recurrent operations, positions or residual streams.

    They call the originals outside of the engine's forwards. Does nothing the second time.
    """
    for file in recurrent_layers.files_of(module):
        for name in FUNCTIONS.keys() & vars(file).keys():
            replace_function(file, name, FUNCTIONS[name])
    for cls in {type(layer) for layer in module.modules()}:
        if positions.counts_by_padding(cls):
            replace_function(cls, positions.BY_PADDING, positions.after_padding)
        if cls.__module__.startswith("transformers."):
            for name, ours in streams.METHODS.get(cls.__name__, {}).items():
                replace_function(cls, name, ours)
