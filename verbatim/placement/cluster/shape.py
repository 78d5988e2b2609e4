"""The description of a part of a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from verbatim.batch import Choices
from verbatim.kv.states import StateShape
from verbatim.kv.store import LayerShape


def joined_quantization(stages: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Return the "quantization" of `info`, of all stages: sums, and each stage's own."""
    found = [stage for stage in stages if stage is not None]
    if not found:
        return {}
    sums = {name: sum(stage[name] for stage in found) for name in ("bytes_before", "bytes_after")}
    return {"quantization": {"format": found[0]["format"], **sums, "stages": found}}


@dataclass(frozen=True, slots=True)
class PartShape:
    """The description of a part, for the head.

    Attributes:
        first, end: its layers, as `Split` counts them.
        num_layers: of the whole model.
        layers: what each attention call of its own layers stores for a token, in their order.
        states: what each of its recurrent operations keeps of a sequence, in their order.
        kv_dtype: of the keys.
        hidden_size, hidden_dtype: of what enters and leaves, for each token.
        vocab_size: of the whole model.
        choices: of its own layers, by `CHOICES`.
        hidden_reason: why what the head sees can't be handed back; None: it can, by the last part.
        architecture: name of the model's class.
        parameters, weight_bytes: what it holds; what several parts hold counts on each.
        quantization: of its weights, as `PackingReport.info` has it, or None.
        override: functions its layers call directly that must be swapped; usually none.
    """

    first: int
    end: int
    num_layers: int
    layers: list[LayerShape]
    states: list[StateShape]
    kv_dtype: torch.dtype
    hidden_size: int
    hidden_dtype: torch.dtype
    vocab_size: int
    choices: dict[str, Choices]
    hidden_reason: str | None
    architecture: str
    parameters: int
    weight_bytes: int
    quantization: dict[str, Any] | None
    override: list[str]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and keys."""
        return self.kv_dtype

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
