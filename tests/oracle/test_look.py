"""Checks when a model is opened: modified architectures are rejected instead of giving wrong results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MambaForCausalLM, Qwen3MoeForCausalLM
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

from support import toys
from verbatim.errors import UnsupportedModel
from verbatim.model.decoder import Decoder
from verbatim.model.limits import max_length_of
from verbatim.model.masks import NOT_CAUSAL, mask_rule


class OwnLlama(LlamaForCausalLM):
    """A user-defined class, which is in no list."""


def own_llama(**changes: Any) -> Any:
    return toys.build(OwnLlama, toys.make_toy("llama", **changes).config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unlisted_class_with_standard_attention_is_opened(dtype: torch.dtype) -> None:
    Decoder(own_llama().to(dtype))


class OwnMixture(Qwen3MoeForCausalLM):
    """As above, with experts, whose choice may depend on rounding."""


class OwnMamba(MambaForCausalLM):
    """As above, with logits in float32."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("cls", "name"), [(OwnMixture, "qwen3_moe"), (OwnMamba, "mamba")])
def test_unlisted_class_in_bfloat16_passes_trial(cls: Any, name: str, seed: int) -> None:
    Decoder(toys.build(cls, toys.make_toy(name).config, dtype=torch.bfloat16, seed=seed))


@pytest.mark.parametrize(
    ("kind", "long", "limit"),
    [
        ("default", 2.0, 256),
        ("dynamic", 2.0, 256),
        ("longrope", 2.0, 32),
        ("longrope", 1.0, 256),
        ("yarn", 2.0, 256),
    ],
)
def test_max_length_ends_where_rope_depends_on_sequence_length(
    kind: str, long: float, limit: int
) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0], "long_factor": [long]}
    config = toys.make_toy("llama").config
    config.rope_parameters = rope
    assert max_length_of(config)[0] == limit


class _ShiftedLlama(LlamaForCausalLM):
    """Adds half of the previous token's embedding to each token."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        mixed = embedded + 0.5 * torch.nn.functional.pad(embedded, (0, 0, 1, 0))[:, :-1]
        return super().forward(inputs_embeds=mixed, position_ids=position_ids, **kwargs)


class _LateLlama(LlamaForCausalLM):
    """Counts positions in steps of 2 unless they are given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None] * 2
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


class _RowLlama(LlamaForCausalLM):
    """Uses the index in the row as the position, and ignores `position_ids`."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        position_ids = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


class _FewRowsLlama(LlamaForCausalLM):
    """Rounds differently in a forward of few rows, as a prompt chunk may be."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, position_ids=position_ids, **kwargs)
        if input_ids.shape[1] < 6:
            out.logits = out.logits * (1 + 2.0**-20)
        return out


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (_FewRowsLlama, "changed with the other rows of the batch"),
        (_ShiftedLlama, "mixes its tokens"),
        (_LateLlama, "in a trial its logits"),
        (_RowLlama, "counts their positions"),
    ],
)
def test_class_that_fails_trial_is_rejected(cls: Any, why: str) -> None:
    model = toys.build(cls, toys.make_toy("llama").config)
    with pytest.raises(UnsupportedModel, match=f"{cls.__name__}.*{why}"):
        Decoder(model)


def _with_extra_argument(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, temperature=2.0, **kwargs)

    return forward


def _with_changed_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"] * 0.5
        return original(self, *args, **kwargs)

    return forward


@pytest.mark.parametrize(
    ("change", "why"),
    [(_with_extra_argument, "'temperature'"), (_with_changed_mask, "exists only as a mask")],
)
def test_attention_with_unknown_argument_or_mask_is_rejected(
    monkeypatch: pytest.MonkeyPatch, change: Any, why: str
) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", change(LlamaAttention.forward))
    with pytest.raises(UnsupportedModel, match=why):
        Decoder(toys.make_toy("llama"))


def test_sliding_window_that_is_only_in_mask_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the window is far longer than the rows of the inspection."""
    original = MistralAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config.sliding_window = window

    monkeypatch.setattr(MistralAttention, "forward", forward)
    with pytest.raises(UnsupportedModel, match="sliding window of None, while its mask has 100"):
        Decoder(toys.make_toy("mistral", sliding_window=100))


def test_sliding_window_beyond_max_length_is_accepted() -> None:
    Decoder(toys.make_toy("mistral", sliding_window=4096, max_position_embeddings=256))


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (causal_mask_function, 0),
        (sliding_window_causal_mask_function(7), 7),
        (sliding_window_causal_mask_function(999), 999),
        (sliding_window_causal_mask_function(1000), 0),  # as long as the longest sequence
        (bidirectional_mask_function, NOT_CAUSAL),
        (lambda b, h, q, k: (k <= q) & (k % 2 == q % 2), None),
        (lambda b, h, q, k: torch.ones(4, dtype=torch.bool)[k], None),  # has four positions
    ],
)
def test_mask_rule_detects_sliding_window(rule: Any, window: int | None) -> None:
    assert mask_rule(rule, 1000) == (window, 0)


@pytest.mark.parametrize("size", [1, 7, 64, 333, 499, 500, 998, 999])
@pytest.mark.parametrize("start", [0, 3])
def test_mask_rule_detects_chunk_size(size: int, start: int) -> None:
    rule = chunked_causal_mask_function(size, torch.tensor([start]))
    expected = (None, 0 if start % size else size)
    assert mask_rule(rule, 1000) == ((1, 0) if size == 1 else expected)
