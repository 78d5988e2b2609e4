"""Inspection of a model by one forward: which modules attend, what they store, what they call.

In an inspection, a forward of a few tokens, attention only records its shapes and reads its masks. It runs
once when a model is opened, without the user's hooks, and decides whether the model can run on flat batches.
Classes that are not in the list of verified ones must also pass a trial (`trial.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.batch import Choices
from verbatim.errors import TierFailed, UnsupportedModel
from verbatim.kernels.options import AnyOptions, AttentionOptions, IndexOptions
from verbatim.kv.states import StateShape, Update
from verbatim.kv.store import LayerShape
from verbatim.model import masks
from verbatim.model.adapters import counts_by_padding, patch_functions
from verbatim.model.context import IMPLEMENTATION, activate, head_of, record_values, why_no_hidden
from verbatim.model.experts import num_experts, runs_flat
from verbatim.model.invariant import Recorder
from verbatim.model.latent import is_absorbable
from verbatim.model.patching import (
    Forwards,
    exclusive,
    has_own_forward,
    patched,
    replaced_forwards,
)
from verbatim.model.routing import UNKNOWN_ROUTER, choices_of


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The layout of a model, for the KV store and the decoder.

    Attributes:
        layers: shape per token of each layer of the KV store.
        dtype: dtype of the keys, the default for the store.
        vocab_size: width of the logits.
        routed: the experts that MoE layers choose.
        indexed: the keys that indexers choose.
        hidden_reason: why the model can't return the inputs of its head; None if it can.
        slots: layer of the store by (id of the attention module, index of its call in a forward).
        query_heads: number of query heads of each of `layers`.
        states: state shape of each recurrent operation, in call order.
        needs_override: names of functions that the model calls directly but must be replaced; usually none.
        override_in: classes with forwards that call these functions.
        torch_functions: functions that the model calls and that torch computes with other bits on other CPUs.
        takes_logit_rows: whether the model's forward has `logits_to_keep`, so that the head runs only on
            requested rows.
        takes_positions: whether the model's forward has `position_ids`, or passes them on.
        routed_modules: `id()` of the experts modules of `routed`, in call order.
        finite: whether the logits of the inspection were finite.
    """

    layers: list[LayerShape]
    dtype: torch.dtype
    vocab_size: int
    routed: Choices
    indexed: Choices
    hidden_reason: str | None
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    query_heads: list[int] = field(default_factory=list)
    states: list[StateShape] = field(default_factory=list)
    needs_override: frozenset[str] = frozenset()
    override_in: frozenset[type[nn.Module]] = frozenset()
    torch_functions: frozenset[str] = frozenset()
    takes_logit_rows: bool = False
    takes_positions: bool = False
    routed_modules: tuple[int, ...] = ()
    finite: bool = True

    @property
    def is_sparse(self) -> bool:
        """True if rows attend to chosen keys or to records, not to all keys in a window."""
        return any(shape.records or not shape.value_dim for shape in self.layers)

    @property
    def choices(self) -> dict[str, Choices]:
        """The choices that layers make for each token, by name (`CHOICES`)."""
        return {"routing": self.routed, "indices": self.indexed}


class InspectionContext:
    """A forward context that records attention calls, and returns values computed from their inputs."""

    def __init__(self, latent: Collection[nn.Module] = ()) -> None:
        self.latent = latent  # modules whose latent vectors are stored in place of keys and values
        self.slots: dict[tuple[int, int], int] = {}
        self.layers: list[LayerShape] = []
        self.query_heads: list[int] = []
        self.states: list[StateShape] = []
        self.calls: dict[int, int] = {}
        self.routed: list[int] = []  # ids of experts modules, in call order
        self.kinds: list[tuple[int, int]] = []  # experts per token, and in the layer
        self.routes_all = True  # whether each routed layer got all tokens
        self.choices = 0  # number of calls of routers with a known form
        # For each indexer: (number of keys that it chooses, 0); (0, 0) if it chooses records.
        self.indexed: list[tuple[int, int]] = []
        self.dtype: torch.dtype | None = None
        self.device = torch.device("cpu")
        self.needs_positions = False
        self.counts_positions = False  # whether the model reads `positions`

    @property
    def positions(self) -> Tensor:
        self.counts_positions = True
        return torch.tensor(_POSITIONS)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        call = self.calls.get(id(module), 0)
        self.calls[id(module)] = call + 1
        self.slots[id(module), call] = len(self.layers)
        records = isinstance(options, AttentionOptions) and options.records is not None
        self.layers.append(LayerShape(k.shape[1], k.shape[2], v.shape[2], records, v is k))
        self.query_heads.append(q.shape[1])
        if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[1] % k.shape[1] == 0):
            raise UnsupportedModel(
                f"{type(module).__name__} attends with shapes {tuple(q.shape)}, {tuple(k.shape)}"
            )
        self.dtype = self.dtype or k.dtype
        if isinstance(options, IndexOptions):
            groups = options.groups(q.shape[1])
            self.indexed += [(0 if options.records else options.width, 0)] * groups
            shape = len(q), groups, options.width
            return torch.full(shape, -1, dtype=torch.int32, device=q.device)
        self.needs_positions |= options.alibi is None and options.bias is None
        # Depends on the token's own query, key and value, so that wrong positions are also noticed.
        group = q.shape[1] // v.shape[1]
        angle = q.float().sum(-1) + k.float().sum(-1).repeat_interleave(group, dim=1)
        return v.repeat_interleave(group, dim=1) * torch.cos(angle)[..., None].to(v.dtype)

    def stores_latent(self, module: nn.Module) -> bool:
        return module in self.latent

    def update_state(self, shape: StateShape, update: Update) -> Tensor:
        self.states.append(shape)
        # Weights may be placeholders, and dispatch modes only see operations of torch.
        with kernels.using("none"):
            return shape.update_first_rows(update, len(_IDS) * len(_IDS[0]), self.device)

    def route(self, experts: Any, index: Tensor) -> None:
        count: int = getattr(experts, "total_experts", None) or num_experts(experts)
        self.routed.append(id(experts))
        self.kinds.append((index.shape[1], count))
        self.routes_all &= len(index) == len(_IDS) * len(_IDS[0])

    def forced_experts(self) -> None:
        """Count a router that supports forced experts."""
        self.choices += 1


class OwnModel(nn.Module):
    """Base of models that are built here from transformers' layers, with a transformers model's methods.

    They request no masks and need no trial.
    """


def inner_model(module: nn.Module) -> Any:
    """Return the transformers model in `module`, which may be a wrapper (PEFT, DDP)."""
    from transformers import PreTrainedModel

    for candidate in module.modules():
        if isinstance(candidate, PreTrainedModel | OwnModel):
            return candidate
    raise UnsupportedModel(
        f"{type(module).__name__} holds no transformers model; a module, a folder or a hub id of a "
        "transformers causal language model is needed"
    )


_NO_INTERFACE = (
    "its layers call neither transformers' attention interface nor a known recurrent function"
)
_NO_POSITIONS = "its forward takes no position_ids, so it counts positions from the start of a row"

# Two rows with the same tokens at the same positions, shifted by one. If outputs differ, something other than
# attention mixes tokens, or the model uses the index in the row as position.
_IDS = [[4, 1, 3, 2], [1, 3, 2, 5]]
_POSITIONS = [[0, 1, 2, 3], [1, 2, 3, 4]]


def inspect_once(
    module: nn.Module, inner: Any, *, latent: bool, positions: bool | None = None
) -> ModelSpec:
    """Run one small forward of a module, and return its spec.

    Args:
        inner: the transformers model in `module`.
        latent: whether the store holds the latent vectors of latent attention.
        positions: whether to pass `position_ids`; None: if the forward has the argument.

    Raises:
        UnsupportedModel: the model can't be run on flat batches.
    """
    signature = inspect.signature(inner.forward).parameters
    named = takes_positions(inner)
    positions = named if positions is None else positions
    context, recorder = InspectionContext(_latent_in(module, latent)), Recorder(module)
    with recorder:
        logits, head_inputs = inspect_forward(module, inner, context, positions=positions)
    ids = torch.tensor(_IDS)
    if not context.layers and not context.states:
        raise UnsupportedModel(_NO_INTERFACE)
    if context.needs_positions and not (positions or context.counts_positions):
        if any(p.kind is p.VAR_KEYWORD for p in signature.values()):  # a wrapper may pass them on
            return inspect_once(module, inner, latent=latent, positions=True)
        raise UnsupportedModel(_NO_POSITIONS)
    if logits.shape[:2] != ids.shape:
        raise UnsupportedModel(
            f"its logits have shape {tuple(logits.shape)} for 2 rows of 4 tokens"
        )
    if not _close(logits[0, 1:], logits[1, :-1]):
        raise UnsupportedModel(
            "something other than attention mixes its tokens, or counts their positions"
            if named
            else _NO_POSITIONS
        )
    unknown = UNKNOWN_ROUTER if context.choices != len(context.routed) else None
    routed, indexed = choices_of("routing", context.kinds), choices_of("indices", context.indexed)
    if not context.routes_all:
        routed = Choices(reason="one of its layers sends only some of its tokens to experts")
    if (0, 0) in context.indexed:
        indexed = Choices(reason="its indexers choose records of windows, not keys")
    return ModelSpec(
        slots=context.slots,
        layers=context.layers,
        query_heads=context.query_heads,
        states=context.states,
        dtype=context.dtype or _dtype_of(inner),
        vocab_size=logits.shape[-1],
        needs_override=frozenset(recorder.swapped),
        override_in=frozenset(recorder.callers),
        torch_functions=frozenset(recorder.torch_functions) | _tables_of(module),
        takes_logit_rows="logits_to_keep" in signature,
        takes_positions=positions,
        routed=replace(routed, replay_reason=unknown),
        routed_modules=tuple(context.routed),
        indexed=indexed,
        hidden_reason=why_no_hidden(head_of(inner), head_inputs, ids.numel()),
        finite=bool(torch.isfinite(logits).all()),
    )


def _tables_of(module: nn.Module) -> frozenset[str]:
    """Return the names of tables that modules computed when they were made, such as positions."""
    return frozenset(
        name
        for part in module.modules()
        for name in part._non_persistent_buffers_set
        if (table := part._buffers.get(name)) is not None
        and table.is_floating_point()
        and table.dim() > 1
    )


def _latent_in(module: nn.Module, latent: bool) -> set[nn.Module]:
    """Return the attention modules whose latent vectors can be stored; none without `latent`."""
    return {
        attention
        for attention in module.modules()
        if latent
        and is_absorbable(attention)
        and not has_own_forward(attention.get_submodule("kv_b_proj"))
    }


def takes_positions(inner: Any) -> bool:
    """Return whether the forward of a transformers model takes `position_ids`, counted from 0."""
    signature = inspect.signature(inner.forward).parameters
    counted = any(counts_by_padding(type(layer)) for layer in inner.modules())
    return "position_ids" in signature and not counted


def _dtype_of(inner: nn.Module) -> torch.dtype:
    """Return the dtype of a model without attention: that of its first parameter, usually the embedding.

    Logits may have another dtype: some heads return float32, and a part of a model has no logits.
    """
    return next(p.dtype for p in inner.parameters() if p.is_floating_point())


def inspect_forward(
    module: nn.Module,
    inner: Any,
    context: InspectionContext,
    *,
    positions: bool,
    forwards: Forwards | None = None,
) -> tuple[Tensor, list[Any]]:
    """Run the forward of an inspection: a few tokens without a cache, with recorded masks.

    Args:
        inner: the transformers model in `module`.
        context: the active forward context.
        positions: whether to pass `position_ids`.
        forwards: the forwards to patch in; None: those of all known layers.

    Returns:
        The logits `[2, 4, V]`, and the inputs of the model's head.

    Raises:
        UnsupportedModel: raised by the context, or the forward failed.
    """
    masks.register()
    patch_functions(module)
    context.device = device = next(module.parameters()).device
    attention = IMPLEMENTATION if isinstance(inner, OwnModel) else masks.INSPECTION
    inputs: dict[str, Any] = {"input_ids": torch.tensor(_IDS, device=device)}
    if positions:
        inputs["position_ids"] = torch.tensor(_POSITIONS, device=device)
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        inputs["logits_to_keep"] = torch.arange(len(_IDS[0]), device=device)
    try:
        if forwards is None:
            forwards = replaced_forwards(module)
        with (
            patched(module, forwards, hooks=False, attention=attention),
            activate(context),
            record_values(head_of(inner), [context]) as (head_inputs,),
        ):
            logits: Tensor = module(**inputs, use_cache=False).logits
    except (UnsupportedModel, TierFailed):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"a forward of a few tokens without a cache raised {type(error).__name__}: {error}"
        ) from error
    return logits, head_inputs


def _close(a: Tensor, b: Tensor) -> bool:
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):  # because of the weights
        return True
    tolerance = 1e-4 if a.dtype == torch.float32 else 2e-2
    return bool(((a - b).abs() <= tolerance * a.abs().max()).all())


# ---- inspection without weights

# Attributes with the output width of linear layers and transformers' Conv1D.
_WIDTHS = ("out_features", "nf")


def outline(module: nn.Module, *, latent: bool) -> InspectionContext:
    """Return the shapes of K, V and recurrent states, by inspecting a module without reading its weights.

    Parameters may be placeholders without memory: linear layers and experts return zeros without computing.
    If the forward fails, these are the shapes found until then.
    """
    context, inner = InspectionContext(_latent_in(module, latent)), inner_model(module)
    positions = takes_positions(inner)
    with exclusive, kernels.using("none"), suppress(UnsupportedModel):
        forwards = replaced_forwards(module)
        for layer in module.modules():
            fields = layer.__dict__
            width = next((fields[name] for name in _WIDTHS if name in fields), None)
            is_linear = width is not None and "top_k" not in fields  # routers also return indices
            if (is_linear or runs_flat(layer)) and "forward" not in fields:
                forwards.append((fields, partial(_zeros, width)))
        inspect_forward(module, inner, context, positions=positions, forwards=forwards)
    return context


def _zeros(width: int | None, hidden: Tensor, *_: Any) -> Tensor:
    """Return zeros in place of a layer's output, `[..., width]`; None: as wide as `hidden`."""
    return hidden.new_zeros(*hidden.shape[:-1], width or hidden.shape[-1])
