"""KempnerForge's text models in plain torch, written from its documentation and config.

Only what generation needs: no losses, no parallelism. Modules, classes and their package have
KempnerForge's names, so state dicts are like those it saves, and live modules are recognized as its own.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verbatim.model.kempner.config import ModelConfig

VOCAB = 50
FIELDS: dict[str, Any] = dict(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCAB, ffn_hidden_dim=48, max_seq_len=64
)
_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def linear(a: int, b: int) -> nn.Linear:
    return nn.Linear(a, b, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class Mlp(nn.Module):
    def __init__(self, dim: int, width: int, activation: str) -> None:
        super().__init__()
        if activation == "silu":
            self.gate_proj = linear(dim, width)
        self.up_proj = linear(dim, width)
        self.down_proj = linear(width, dim)
        self.act = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "gate_proj"):
            return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.act(self.up_proj(x)))


class Router(nn.Module):
    def __init__(self, dim: int, experts: int, top_k: int, sigmoid: bool) -> None:
        super().__init__()
        self.gate = linear(dim, experts)
        self.top_k = top_k
        self.sigmoid = sigmoid
        if sigmoid:
            self.expert_bias = nn.Parameter(torch.zeros(experts))
            self.register_buffer("expert_ema", torch.ones(experts) / experts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weight of every expert for every token, `[T, E]`; 0 for experts that are not chosen."""
        logits = self.gate(x)
        scores = torch.sigmoid(logits + self.expert_bias) if self.sigmoid else logits.softmax(-1)
        kept = scores >= scores.topk(self.top_k).values[:, -1:]
        scores = scores * kept
        return scores / scores.sum(-1, keepdim=True)


class Moe(nn.Module):
    def __init__(self, fields: dict[str, Any], width: int) -> None:
        super().__init__()
        dim, count, activation = fields["dim"], fields["num_experts"], "silu"
        sigmoid = fields.get("moe_router") == "sigmoid_topk"
        self.router = Router(dim, count, fields.get("moe_top_k", 2), sigmoid)
        experts = nn.ModuleList([Mlp(dim, width, activation) for _ in range(count)])
        self.packed = fields.get("moe_packed_experts", False)
        if self.packed:
            for part in ("up", "down", "gate"):
                each = [getattr(e, f"{part}_proj").weight.t() for e in experts]
                self.register_parameter(f"{part}_w", nn.Parameter(torch.stack(each)))
        else:
            self.experts = experts
        self.shared_expert = None
        if fields.get("moe_shared_experts"):
            self.shared_expert = Mlp(dim, width, activation)

    def expert(self, j: int, x: Tensor) -> Tensor:
        if self.packed:
            return (F.silu(x @ self.gate_w[j]) * (x @ self.up_w[j])) @ self.down_w[j]
        return self.experts[j](x)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x.flatten(0, 1)).view(*x.shape[:-1], -1)
        out = sum(weights[..., j, None] * self.expert(j, x) for j in range(weights.shape[-1]))
        return out if self.shared_expert is None else out + self.shared_expert(x)


class Attention(nn.Module):
    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        dim, heads = fields["dim"], fields["n_heads"]
        self.heads, self.kv_heads = heads, fields.get("n_kv_heads") or heads
        self.width, self.theta = dim // heads, fields.get("rope_theta", 10000.0)
        self.q_proj = linear(dim, dim)
        self.k_proj = linear(dim, self.kv_heads * self.width)
        self.v_proj = linear(dim, self.kv_heads * self.width)
        self.o_proj = linear(dim, dim)
        self.q_norm = RMSNorm(self.width) if fields.get("qk_norm") else None
        self.k_norm = RMSNorm(self.width) if fields.get("qk_norm") else None

    def rotated(self, x: Tensor, start: int) -> Tensor:  # [B, heads, L, width]
        half = self.width // 2
        speed = self.theta ** (-torch.arange(half) / half)
        angle = torch.arange(start, start + x.shape[2])[:, None] * speed
        cos, sin = angle.cos().to(x), angle.sin().to(x)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        rows, length, _ = x.shape
        start = 0 if cache is None else cache.seq_len
        q, k, v = (
            project(x).view(rows, length, -1, self.width)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = self.rotated(q, start), self.rotated(k, start)
        if cache is not None:
            k, v = cache.update(k, v)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        seen = torch.ones(length, start + length, dtype=torch.bool, device=x.device).tril(start)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fields: dict[str, Any], index: int) -> None:
        super().__init__()
        self.attention_norm = norm(fields)
        self.attention = Attention(fields)
        self.mlp_norm = norm(fields)
        every = fields.get("moe_frequency", 1)
        self.mlp: nn.Module
        if fields.get("num_experts") and (index + 1) % every == 0:
            self.mlp = Moe(fields, fields.get("expert_width", fields["ffn_hidden_dim"]))
        else:
            self.mlp = Mlp(
                fields["dim"], fields["ffn_hidden_dim"], fields.get("activation", "silu")
            )

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))


def norm(fields: dict[str, Any]) -> nn.Module:
    eps = fields.get("norm_eps", 1e-5)
    if fields.get("norm_type") == "layernorm":
        return nn.LayerNorm(fields["dim"], eps=eps)
    return RMSNorm(fields["dim"], eps)


class Transformer(nn.Module):
    """A model with random weights from `seed`; `fields` are those of `[model]`, with `ffn_hidden_dim`."""

    def __init__(self, fields: dict[str, Any], seed: int = 0) -> None:
        super().__init__()
        vocab, dim = fields["vocab_size"], fields["dim"]
        model = ModelConfig(**{k: v for k, v in fields.items() if k != "expert_width"})
        own = {name: getattr(model, name) for name in (*ModelConfig.__slots__, "head_dim")}
        self.config = SimpleNamespace(**own)
        self.token_embedding = nn.ModuleDict({"embedding": nn.Embedding(vocab, dim)})
        self.layers = nn.ModuleDict({str(i): Block(fields, i) for i in range(fields["n_layers"])})
        self.norm = norm(fields)
        self.output_head = nn.ModuleDict({"proj": linear(dim, vocab)})
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.data = 1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.3 * noise
        if fields.get("tie_embeddings"):
            self.output_head["proj"].weight = self.token_embedding["embedding"].weight

    def forward(self, tokens: Tensor, *, kv_caches: Any = None) -> Tensor:
        x = self.token_embedding["embedding"](tokens)
        for i, layer in enumerate(self.layers.values()):
            x = layer(x, None if kv_caches is None else kv_caches[i])
        return self.output_head["proj"](self.norm(x))


for cls in (RMSNorm, Mlp, Router, Moe, Attention, Block, Transformer):
    cls.__module__ = "kempnerforge.model.transformer"


def make(seed: int = 0, **fields: Any) -> Transformer:
    return Transformer(FIELDS | fields, seed)


def write_toml(path: Path, extra: str = "", **fields: Any) -> Path:
    """Write a TOML of `FIELDS` and `fields`, followed by the text `extra`, and return its path."""
    chosen = {k: v for k, v in (FIELDS | fields).items() if k != "expert_width"}
    lines = [
        f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in chosen.items()
    ]
    path.write_text("\n".join(["[model]", *lines, extra, ""]))
    return path
