"""Write an attention head that looks up names, for the optimizer to refine.

Left alone, a model of this size learned every phrase of the grammar within a million tokens and
then stayed where it was: each mention of a name was drawn afresh, at 4.3 nats, which is chance.
Names are all alike but for the one purpose of being repeated, so early in training whatever tells
them apart is noise, the first layer drowns it, and no gradient leads back. One head set up from
three linear fits is enough of a hint: from there on, training itself brings names home.

The head (`QUERY_HEADS` over one KV head of layer `LAYER`) asks "is a name coming?", answers "I am a
name", carries what tells names apart, and writes it back along the embeddings.
"""

from __future__ import annotations

import lexicon as lex
import torch
from data import Batch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.modeling_layers import MtpModel

LAYER = 3
QUERY_HEADS = 2
EMBEDDING_GAIN = 6.0
WRITE_GAIN = 3.0


@torch.no_grad()
def louder_embeddings(main: Qwen3ForCausalLM, mtp: MtpModel) -> None:
    """Raise the embedding in the residual stream; the final norms keep the tied head's logits."""
    main.model.embed_tokens.weight.mul_(EMBEDDING_GAIN)
    for norm in (main.model.norm, mtp.layers[0].post_norm):
        norm.weight.div_(EMBEDDING_GAIN)


def _classifier(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Ridge regression [N, H] onto +1 and -1, both classes weighing the same. Returns [H]."""
    share = labels.float().mean()
    weight = torch.where(labels, 1 / share, 1 / (1 - share))[:, None]
    gram = (inputs * weight).T @ inputs + 0.01 * len(inputs) * torch.eye(inputs.shape[1])
    return torch.linalg.solve(gram, (inputs * weight).T @ (labels.float() * 2 - 1))


@torch.no_grad()
def install(
    main: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, batches: list[Batch]
) -> None:
    """Fit the head on `batches` and overwrite it in place. The model must be on the CPU."""
    layer = main.model.layers[LAYER]
    attention, width = layer.self_attn, main.config.head_dim
    found = (tokenizer(f" {name}")["input_ids"] for name in lex.GIRL_NAMES + lex.BOY_NAMES)
    names = torch.tensor([ids[0] for ids in found if len(ids) == 1])

    inputs, current, following = [], [], []
    for batch in batches:
        states = main.model(
            input_ids=batch.ids,
            position_ids=batch.position,
            attention_mask={"full_attention": batch.mask()},
            use_cache=False,
            output_hidden_states=True,
        ).hidden_states[LAYER]
        counted = batch.document[:, :-1] >= 0
        inputs.append(layer.input_layernorm(states)[:, :-1][counted])
        current.append(batch.ids[:, :-1][counted])
        following.append(batch.targets(1)[counted])
    states, ids, targets = torch.cat(inputs), torch.cat(current), torch.cat(following)
    here, coming = torch.isin(ids, names), torch.isin(targets, names)

    # What tells names apart at this depth: the main directions of their mean states.
    met = names[torch.isin(names, ids)]
    means = torch.stack([states[ids == name].mean(0) for name in met])
    basis = torch.linalg.svd(means - means.mean(0), full_matrices=False).Vh[:width]
    values = (means - means.mean(0)) @ basis.T
    embeddings = main.model.embed_tokens.weight[met]
    gram = values.T @ values + 0.1 * torch.eye(width)
    write = torch.linalg.solve(gram, values.T @ (embeddings - embeddings.mean(0)))

    # The slowest rotary pair, so that distance does not matter; other rows are left to learn.
    direction = torch.zeros(width)
    direction[[width // 2 - 1, width - 1]] = 3.0
    rows = QUERY_HEADS * width
    attention.q_proj.weight[:rows] = torch.outer(direction, _classifier(states, coming)).repeat(
        QUERY_HEADS, 1
    ) + 0.01 * torch.randn(rows, states.shape[1])
    attention.k_proj.weight[:width] = torch.outer(
        direction, _classifier(states, here)
    ) + 0.01 * torch.randn(width, states.shape[1])
    attention.v_proj.weight[:width] = basis
    attention.o_proj.weight[:, :rows] = WRITE_GAIN * write.T.repeat(1, QUERY_HEADS)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(1.0)
