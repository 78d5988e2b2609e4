"""Inspection of a model by one forward: which modules attend, what they store, what they call.

An inspection is a forward of a few tokens in which attention only records its shapes and reads its masks. It
runs once when a model is opened, with the user's hooks silenced, and decides whether the model can be
run on flat batches. A class that is not in the list of verified ones must pass a trial besides.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
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
from verbatim.model.adapters import patch_functions
from verbatim.model.context import IMPLEMENTATION, activate
from verbatim.model.hidden import head_of, recorded, why_no_hidden
from verbatim.model.invariant import Recorder
from verbatim.model.patching import Forwards, patched, replaced_forwards
from verbatim.model.positions import counts_by_padding
from verbatim.model.routing import (
    UNKNOWN_ROUTER,
    RouterCall,
    indexed_layers_of,
    routed_layers_of,
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The layout of a model, for the KV store and the decoder.

    Attributes:
        layers: what each layer of the store holds for a token.
        dtype: of the keys, and so of the store unless told otherwise.
        vocab_size: width of the logits.
        routed: the experts that its mixture-of-experts layers choose.
        indexed: the keys that indexers of layers choose.
        hidden_reason: why it can't hand back what its head sees; None if it can.
        slots: (id of the attention module, its n-th call in a forward) to the layer of the store.
        query_heads: of each of `layers`.
        states: what each recurrent operation keeps of a sequence, in the order they run.
        needs_override: functions the model calls directly that must be swapped; usually none.
        override_in: classes of the modules in whose own forward it does so.
        takes_logit_rows: the model's forward has `logits_to_keep`, so that the head runs only on
            the rows that are asked for.
        takes_positions: the model's forward has `position_ids`, or passes them on.
        routed_modules: the id of the experts module of each of `routed`, in the order they run.
        finite: the logits of the inspection were finite.
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
    takes_logit_rows: bool = False
    takes_positions: bool = False
    routed_modules: tuple[int, ...] = ()
    finite: bool = True

    @property
    def is_sparse(self) -> bool:
        """Return whether rows attend to chosen keys or to records, and not to all keys in a window."""
        return any(shape.records or not shape.value_dim for shape in self.layers)

    @property
    def choices(self) -> dict[str, Choices]:
        """The choices of its layers for each token, by `CHOICES`."""
        return {"routing": self.routed, "indices": self.indexed}


class InspectionContext:
    """A forward context that records every attention call, and returns values computed from its inputs."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.layers: list[LayerShape] = []
        self.query_heads: list[int] = []
        self.states: list[StateShape] = []
        self.calls: dict[int, int] = {}
        self.routed: list[RouterCall] = []
        self.choices = 0  # of routers of a known form
        self.indexed: list[int] = []  # keys that each indexer chooses
        self.dtype: torch.dtype | None = None
        self.device = torch.device("cpu")
        self.needs_positions = False
        self.counts_positions = False  # itself, so it has asked for those of the rows

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
        self.layers.append(LayerShape(k.shape[1], k.shape[2], v.shape[2], records))
        self.query_heads.append(q.shape[1])
        if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[1] % k.shape[1] == 0):
            raise UnsupportedModel(
                f"{type(module).__name__} attends with shapes {tuple(q.shape)}, {tuple(k.shape)}"
            )
        self.dtype = self.dtype or k.dtype
        if isinstance(options, IndexOptions):
            groups = options.groups(q.shape[1])
            self.indexed += [0 if options.records else options.width] * groups  # 0: no keys
            shape = len(q), groups, options.width
            return torch.full(shape, -1, dtype=torch.int32, device=q.device)
        self.needs_positions |= options.alibi is None
        # Something of a token's own query, key and value, so that wrong positions show as well.
        group = q.shape[1] // v.shape[1]
        turn = q.float().sum(-1) + k.float().sum(-1).repeat_interleave(group, dim=1)
        return v.repeat_interleave(group, dim=1) * torch.cos(turn)[..., None].to(v.dtype)

    def update_state(self, shape: StateShape, update: Update) -> Tensor:
        self.states.append(shape)
        # Weights may be on the meta device, and dispatch modes see what torch computes alone.
        with kernels.using("none"):
            return shape.update_first_rows(update, len(_IDS) * len(_IDS[0]), self.device)

    def route(self, experts: Any, index: Tensor) -> None:
        count: int = getattr(experts, "total_experts", None) or experts.num_experts
        self.routed.append(RouterCall(id(experts), index.shape[0], (index.shape[1], count)))

    def forced_experts(self) -> None:
        """Count a router that asks whether its choice is forced."""
        self.choices += 1


class OwnModel(nn.Module):
    """Base of models that are made of layers of transformers here, with the methods of one that are called.

    They have no masks and are not tried: layers attend as their settings say.
    """


def inner_model(module: nn.Module) -> Any:
    """Return the transformers model inside of `module`, which may be wrapped (PEFT, DDP)."""
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

# Two rows with the same tokens at the same positions, one place apart: wherever they differ, something
# else than attention mixes tokens, or takes a token's place in its row for its position.
_IDS = [[4, 1, 3, 2], [1, 3, 2, 5]]
_POSITIONS = [[0, 1, 2, 3], [1, 2, 3, 4]]


def inspect_once(module: nn.Module, inner: Any, *, positions: bool | None = None) -> ModelSpec:
    """Run one small forward of a module, and return its spec.

    Args:
        inner: the transformers model in it.
        positions: pass `position_ids`; None: if the forward names them.

    Raises:
        UnsupportedModel: it can't be run on flat batches.
    """
    signature = inspect.signature(inner.forward).parameters
    named = takes_positions(inner)
    positions = named if positions is None else positions
    context, recorder = InspectionContext(), Recorder(module)
    with recorder:
        logits, seen = inspect_forward(module, inner, context, positions=positions)
    ids = torch.tensor(_IDS)
    if not context.layers and not context.states:
        raise UnsupportedModel(_NO_INTERFACE)
    if context.needs_positions and not (positions or context.counts_positions):
        if any(p.kind is p.VAR_KEYWORD for p in signature.values()):  # a wrapper may pass them on
            return inspect_once(module, inner, positions=True)
        raise UnsupportedModel(_NO_POSITIONS)
    if logits.shape[:2] != ids.shape:
        raise UnsupportedModel(
            f"its logits have shape {tuple(logits.shape)} for 2 rows of 4 tokens"
        )
    if not _close(logits[0, 1:], logits[1, :-1]):
        raise UnsupportedModel(
            "something else than attention mixes its tokens, or counts their positions"
            if named
            else _NO_POSITIONS
        )
    unknown = UNKNOWN_ROUTER if context.choices != len(context.routed) else None
    return ModelSpec(
        slots=context.slots,
        layers=context.layers,
        query_heads=context.query_heads,
        states=context.states,
        dtype=context.dtype or _dtype_of(inner),
        vocab_size=logits.shape[-1],
        needs_override=frozenset(recorder.swapped),
        override_in=frozenset(recorder.callers),
        takes_logit_rows="logits_to_keep" in signature,
        takes_positions=positions,
        routed=replace(routed_layers_of(context.routed, ids.numel()), replay_reason=unknown),
        routed_modules=tuple(call.module for call in context.routed),
        indexed=indexed_layers_of(context.indexed),
        hidden_reason=why_no_hidden(head_of(inner), seen, ids.numel()),
        finite=bool(torch.isfinite(logits).all()),
    )


def takes_positions(inner: Any) -> bool:
    """Return whether the forward of a transformers model takes `position_ids`, counted from 0."""
    signature = inspect.signature(inner.forward).parameters
    counted = any(counts_by_padding(type(layer)) for layer in inner.modules())
    return "position_ids" in signature and not counted


def _dtype_of(inner: nn.Module) -> torch.dtype:
    """Return the dtype of a model without attention: that of its first parameter, mostly the embedding.

    Logits don't tell: some heads return float32, and a part of a model has none.
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
    """Run the forward of an inspection: a few tokens without a cache, with masks that describe themselves.

    Args:
        inner: the transformers model in `module`.
        context: active meanwhile.
        positions: hand over `position_ids`.
        forwards: patched into its layers; None: those of every known layer.

    Returns:
        The logits `[2, 4, V]`, and what the model's head was called with.

    Raises:
        UnsupportedModel: raised by the context, or the forward failed.
    """
    masks.register()
    patch_functions(module)
    device = next(module.parameters()).device
    if device.type == "meta":
        device = torch.device("cpu")
    context.device = device
    attention = IMPLEMENTATION if isinstance(inner, OwnModel) else masks.LOOK
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
            recorded(head_of(inner), [context]) as (seen,),
        ):
            logits: Tensor = module(**inputs, use_cache=False).logits
    except (UnsupportedModel, TierFailed):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"a forward of a few tokens without a cache raised {type(error).__name__}: {error}"
        ) from error
    return logits, seen


def _close(a: Tensor, b: Tensor) -> bool:
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):  # a matter of weights
        return True
    tolerance = 1e-4 if a.dtype == torch.float32 else 2e-2
    return bool(((a - b).abs() <= tolerance * a.abs().max()).all())
