"""Toy modules that are called as `model(tokens, kv_caches=[...])`, like KempnerForge's."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from support.kempner_reference import Transformer
from verbatim.model.kempner.layout import key_of

FIELDS = dict(
    dim=60, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=128, ffn_hidden_dim=100, max_seq_len=64
)


class Toy(Transformer):
    """A Llama of an unknown class, so that its own forward runs; `calls` holds the shape of each call."""

    def __init__(self, fields):
        super().__init__(fields)
        self.calls: list[tuple[int, int]] = []

    def forward(self, tokens, *, kv_caches=None):
        self.calls.append(tuple(tokens.shape))
        return super().forward(tokens, kv_caches=kv_caches)


def kempner_toy(seed=0, dtype=torch.float32, cls=Toy, **changes):
    """Return a toy in eval mode with random weights, including norms."""
    module = cls(FIELDS | changes)
    noise = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        spread = 0.15 if parameter.dim() > 1 else 0.1
        values = spread * torch.randn(parameter.shape, generator=noise)
        parameter.data = values + (parameter.dim() == 1)
    return module.to(dtype).eval()


def as_llama(module):
    """Return transformers' Llama with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = module.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.dim,
            intermediate_size=c.ffn_hidden_dim,
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads,
            max_position_embeddings=c.max_seq_len,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=False,
        )
    )
    state = module.state_dict()
    llama.load_state_dict({name: state[key_of(name)] for name in llama.state_dict()})
    return llama.eval()


class Chain(nn.Module):
    """A model that always predicts the next id; it updates its caches, but does not attend to them."""

    def __init__(self, vocab_size=32, max_seq_len=48):
        super().__init__()
        self.config = SimpleNamespace(
            n_layers=1, n_kv_heads=1, head_dim=2, vocab_size=vocab_size, max_seq_len=max_seq_len
        )
        self.table = nn.Parameter(40 * torch.eye(vocab_size).roll(1, 1))
        self.calls: list[tuple[int, int]] = []

    def forward(self, tokens, *, kv_caches):
        self.calls.append(tuple(tokens.shape))
        kept = torch.zeros(len(tokens), 1, tokens.shape[1], 2)
        kv_caches[0].update(kept, kept)
        return F.embedding(tokens, self.table)
