"""What one look at a model tells: which modules attend, what they store, what they call.

The look is a forward of two tokens in which attention only notes its shapes. It runs once when a model
is opened, with the user's hooks silenced, and decides whether the model can be run on flat batches.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.kv.store import LayerShape
from verbatim.model.attention import AttentionOptions
from verbatim.model.borrow import borrow, configs_of, replaced_forwards
from verbatim.model.context import activate
from verbatim.model.invariant import Recorder


@dataclass(frozen=True, slots=True)
class Anatomy:
    """How a model is laid out for the KV store and the decoder.

    Attributes:
        slots: (id of the attention module, its n-th call in a forward) to the layer of the store.
        layers: what each layer of the store holds for a token.
        dtype: of the keys, and so of the store unless told otherwise.
        vocab_size: width of the logits.
        needs_safety_net: functions the model calls directly that must be swapped; usually none.
        takes_logit_rows: the model's forward has `logits_to_keep`, so that the head runs only on
            the rows that are asked for.
        takes_positions: the model's forward has `position_ids`.
    """

    slots: dict[tuple[int, int], int]
    layers: list[LayerShape]
    dtype: torch.dtype
    vocab_size: int
    needs_safety_net: frozenset[str]
    takes_logit_rows: bool
    takes_positions: bool


class _Look:
    """A pass that notes every attention call and lets values flow through in their place."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.layers: list[LayerShape] = []
        self.calls: dict[int, int] = {}
        self.dtype: torch.dtype | None = None

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        call = self.calls.get(id(module), 0)
        self.calls[id(module)] = call + 1
        self.slots[id(module), call] = len(self.layers)
        self.layers.append(LayerShape(k.shape[1], k.shape[2], v.shape[2]))
        if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[1] % k.shape[1] == 0):
            raise UnsupportedModel(
                f"{type(module).__name__} attends with shapes {tuple(q.shape)}, {tuple(k.shape)}"
            )
        self.dtype = self.dtype or k.dtype
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def inner_model(module: nn.Module) -> Any:
    """The transformers model inside of `module`, which may be wrapped (PEFT, DDP)."""
    from transformers import PreTrainedModel

    for candidate in module.modules():
        if isinstance(candidate, PreTrainedModel):
            return candidate
    raise UnsupportedModel(
        f"{type(module).__name__} holds no transformers model; a module, a folder or a hub id of a "
        "transformers causal language model is needed"
    )


def look_at(module: nn.Module) -> Anatomy:
    """Look at `module` once.

    Raises:
        UnsupportedModel: the reason why it can't be run on flat batches.
    """
    inner = inner_model(module)
    name = type(inner).__name__
    _refuse_by_config(name, inner)
    signature = inspect.signature(inner.forward).parameters
    look, recorder = _Look(), Recorder()
    device = next(module.parameters()).device
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, 2, dtype=torch.int64, device=device)}
    if "position_ids" in signature:
        inputs["position_ids"] = torch.arange(2, device=device)[None]
    try:
        with (
            borrow(module, replaced_forwards(module), configs_of(module), hooks=False),
            activate(look),
            recorder,
        ):
            logits = module(**inputs, use_cache=False).logits
    except UnsupportedModel as reason:
        raise UnsupportedModel(f"{name} can't be run on flat batches: {reason}") from None
    except Exception as error:
        raise UnsupportedModel(
            f"{name} can't be run on flat batches: a forward of two tokens without a cache raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not look.layers:
        raise UnsupportedModel(
            f"{name} can't be run on flat batches: its attention does not go through transformers' "
            "attention interface"
        )
    assert look.dtype is not None
    return Anatomy(
        slots=look.slots,
        layers=look.layers,
        dtype=look.dtype,
        vocab_size=logits.shape[-1],
        needs_safety_net=frozenset(recorder.swapped),
        takes_logit_rows="logits_to_keep" in signature,
        takes_positions="position_ids" in signature,
    )


_STATE = ("linear_attention", "mamba", "conv", "recurrent", "hybrid")


def _refuse_by_config(name: str, inner: Any) -> None:
    """Refuse what runs without complaint and is wrong: state outside of K and V, masks that only a mask knows."""
    config = inner.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only causal models are run")
    if getattr(inner, "_is_stateful", False):
        raise UnsupportedModel(f"{name} keeps a recurrent state, which a flat batch would mix up")
    kinds = set(getattr(config, "layer_types", None) or ())
    for kind in sorted(kinds):
        if any(part in kind for part in _STATE):
            raise UnsupportedModel(f"{name} has {kind} layers, whose state is not in K and V")
        if kind == "chunked_attention":
            raise UnsupportedModel(f"{name} has chunked_attention layers, which exist only as masks")
