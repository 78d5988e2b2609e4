"""The storyteller's network: a small Qwen3 with one multi-token-prediction layer, and its export.

The extra layer is built and run by transformers' own `MtpModel`, so training and use agree. Given
the final hidden state at position i and the token at i + 1, it predicts the token at i + 2. In the
file it follows the last decoder layer, under the names of the DeepSeek checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from data import Batch
from safetensors.torch import save_file
from tokenizer import TURN_END
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_layers import MtpModel

MTP_NAMES = {"post_norm.": "shared_head.norm.", "mtp_block.": ""}


def config(vocab_size: int, *, hidden: int, layers: int) -> Qwen3Config:
    """About 2.7 million parameters at the default width and depth."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 48,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        num_mtp_layers=1,
        mtp_layer_types=["full_attention"],
    )


def build(settings: Qwen3Config) -> tuple[Qwen3ForCausalLM, MtpModel]:
    """The main model and its drafter, which shares embedding and head."""
    main = Qwen3ForCausalLM(settings)
    return main, MtpModel(main, 1)


def hidden_states(main: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Final normed hidden states, [B, L, hidden]."""
    return main.model(
        input_ids=batch.ids,
        position_ids=batch.position,
        attention_mask={"full_attention": batch.mask()},
        use_cache=False,
    ).last_hidden_state


def draft_logits(mtp: MtpModel, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Logits [B, L - 1, vocab] of the draft layer; entry i speaks about position i + 2."""
    embeds = mtp.embed_tokens(batch.ids[:, 1:])
    position = batch.position[:, :-1] + 1
    mask = batch.mask()
    out = mtp.layers[0](
        embeds,
        hidden[:, :-1],
        mtp.rotary_emb(embeds, position_ids=position),
        None if mask is None else mask[:, :, :-1, :-1],
        position,
        None,  # the cache, whose name changed with transformers 5.24
    )
    return mtp._project_to_logits(out)


def _mean(
    logits: torch.Tensor, batch: Batch, ahead: int, weight: torch.Tensor | None
) -> torch.Tensor:
    targets = batch.targets(ahead).flatten()
    each = cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
    counted = (targets >= 0).float()
    if weight is not None:
        counted = counted * weight[:, ahead:].flatten()
    return (each * counted).sum() / counted.sum()


def losses(
    main: Qwen3ForCausalLM, mtp: MtpModel, batch: Batch, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy in nats per token: of the main model, and of the draft layer.

    `weight` [B, L] says how much each token counts as a target; without it all count the same.
    """
    hidden = hidden_states(main, batch)
    logits = main.lm_head(hidden[:, :-1])
    drafted = draft_logits(mtp, hidden, batch)[:, :-1]
    return _mean(logits, batch, 1, weight), _mean(drafted, batch, 2, weight)


def parameters(main: Qwen3ForCausalLM, mtp: MtpModel) -> list[torch.nn.Parameter]:
    """All parameters, shared ones once."""
    return list({id(p): p for p in (*main.parameters(), *mtp.parameters())}.values())


def tensors(main: Qwen3ForCausalLM, mtp: MtpModel) -> dict[str, torch.Tensor]:
    """Every stored tensor under its checkpoint name, in bfloat16."""
    found = {k: v for k, v in main.state_dict().items() if k != "lm_head.weight"}
    last = main.config.num_hidden_layers
    for name, value in mtp.layers[0].state_dict().items():
        for ours, theirs in MTP_NAMES.items():
            name = name.replace(ours, theirs)
        found[f"model.layers.{last}.{name}"] = value
    return {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in found.items()}


def export(
    folder: Path, main: Qwen3ForCausalLM, mtp: MtpModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write a folder that `from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    main.config.architectures = ["Qwen3ForCausalLM"]
    main.config.dtype = torch.bfloat16
    main.config.save_pretrained(folder)
    main.config.dtype = torch.float32
    stored = tensors(main, mtp)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    # Every release of transformers knows this name of the class; its newest name is private.
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    sampling = {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "eos_token_id": [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURN_END)],
        "pad_token_id": tokenizer.pad_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(sampling, indent=2) + "\n")
