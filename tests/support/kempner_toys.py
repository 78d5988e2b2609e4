"""Toy modules that are called as `model(tokens, kv_caches=[...])`, as KempnerForge's are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from support.kempner_reference import Mlp


@dataclass
class Config:
    """A Llama of toy size; `qk_norm` and `experts` make it another."""

    dim: int = 60
    n_layers: int = 2
    n_heads: int = 6
    n_kv_heads: int = 2
    head_dim: int = 10
    hidden: int = 100
    vocab_size: int = 128
    max_seq_len: int = 64
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    experts: int = 0
    by_hand: bool = False  # attention without scaled_dot_product_attention


class Norm(nn.Module):
    """Root mean square norm, in float32 inside."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        size = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * size).to(x.dtype) * self.weight


def rotated(x, cos, sin):
    """`x` `[B, H, T, D]` turned by angles `[T, D / 2]`, halves rotated."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=False)
        self.q_norm = Norm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = Norm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x, cos, sin, cache):
        c, (batch, rows, _) = self.c, x.shape
        q, k, v = (
            project(x).view(batch, rows, -1, c.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotated(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotated(self.k_norm(k).transpose(1, 2), cos, sin)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v)
        k, v = (x.repeat_interleave(c.n_heads // c.n_kv_heads, dim=1) for x in (k, v))
        if c.by_hand:
            scores = q @ k.transpose(-1, -2) / math.sqrt(c.head_dim)
            if rows > 1:  # right where nothing is cached, and wrong after it
                hidden = torch.ones(rows, k.shape[2], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -math.inf)
            out = scores.softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=rows > 1)
        return self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1))


class Experts(nn.Module):
    """Two of several experts a token."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate = nn.Linear(c.dim, c.experts, bias=False)
        self.experts = nn.ModuleList(Mlp(c.dim, c.hidden, "silu") for _ in range(c.experts))
        self.load = torch.zeros(c.experts)

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                at = mine.any(-1)
                share = (weights * mine).sum(-1)[at]
                out[at] += share[:, None] * expert(rows[at])
        self.load = F.one_hot(chosen, len(self.experts)).sum((0, 1))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.attention_norm = Norm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = Norm(c.dim, c.norm_eps)
        self.mlp = Experts(c) if c.experts else Mlp(c.dim, c.hidden, "silu")

    def forward(self, x, cos, sin, cache):
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        return x + self.mlp(self.mlp_norm(x))


class Toy(nn.Module):
    """The whole model; `calls` counts its forwards."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = Norm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.calls: list[tuple[int, int]] = []
        half = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(config.max_seq_len), config.rope_theta**-half)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens, *, kv_caches=None):
        self.calls.append(tuple(tokens.shape))
        start, rows = 0 if kv_caches is None else kv_caches[0].seq_len, tokens.shape[1]
        kv_caches = [None] * len(self.layers) if kv_caches is None else kv_caches
        cos, sin = (table[start : start + rows] for table in (self.cos, self.sin))
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers.values(), kv_caches, strict=True):
            x = layer(x, cos, sin, cache)
        return self.head(self.norm(x))


def kempner_toy(seed=0, dtype=torch.float32, cls=Toy, **changes):
    """A toy in eval mode with random weights, norms included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = cls(Config(**changes))
        for parameter in module.parameters():
            spread = 0.15 if parameter.dim() > 1 else 0.1
            parameter.data = spread * torch.randn(parameter.shape) + (parameter.dim() == 1)
    return module.to(dtype).eval()


def as_llama(module):
    """The same weights in transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = module.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.dim,
            intermediate_size=c.hidden,
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.max_seq_len,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=False,
        )
    )
    names = {
        "embedding.": "model.embed_tokens.",
        "norm.": "model.norm.",
        "head.": "lm_head.",
        "layers.": "model.layers.",
    }
    inside = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.": "self_attn.",
    }
    state = {}
    for key, value in module.state_dict().items():
        start = next(name for name in names if key.startswith(name))
        rest = key.removeprefix(start)
        for name, theirs in inside.items():
            rest = rest.replace(name, theirs)
        state[names[start] + rest] = value
    llama.load_state_dict(state)
    return llama.eval()


class Chain(nn.Module):
    """Each token is followed by the next id, surely; it keeps caches, and attends to nothing."""

    def __init__(self, vocab_size=32, max_seq_len=48):
        super().__init__()
        self.config = Config(
            n_layers=1, n_kv_heads=1, head_dim=2, vocab_size=vocab_size, max_seq_len=max_seq_len
        )
        self.table = nn.Parameter(40 * torch.eye(vocab_size).roll(1, 1))
        self.calls: list[tuple[int, int]] = []

    def forward(self, tokens, *, kv_caches):
        self.calls.append(tuple(tokens.shape))
        kept = torch.zeros(len(tokens), 1, tokens.shape[1], 2)
        kv_caches[0].update(kept, kept)
        return F.embedding(tokens, self.table)
