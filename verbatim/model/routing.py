"""Which experts each token went to: recorded beside its K and V, and replayed on demand.

A layer counts as routed if it hands its tokens to experts through transformers' `ExpertsInterface`,
where `flat_experts` sees its choice. Layers are numbered in the order of their calls: dense layers
and shared experts have no number.

The record lies at the slots of K and V and is written in the same forward, so a cached prefix, a
forked block and a request that was evicted and computed again carry theirs without bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verbatim.errors import NotSupported
from verbatim.model.invariant import InvariantMode


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """The routed layers of a model, which are alike.

    Attributes:
        modules: the id of each layer's experts module, in the order of the calls.
    """

    modules: tuple[int, ...] = field(compare=False)
    count: int
    experts_per_token: int
    num_experts: int

    @property
    def bytes_per_token(self) -> int:
        """What a token's record takes beside its K and V."""
        width = 1 if self.num_experts <= 256 else 2
        return width * self.count * self.experts_per_token


class Call(NamedTuple):
    """One layer hands its tokens to experts."""

    module: int
    num_rows: int
    experts_per_token: int
    num_experts: int


NOT_ROUTED = "no layer of it sends its tokens to experts through transformers' experts interface"


def different_kinds(kinds: set[tuple[int, int]]) -> str:
    """Why layers with so many experts of so many for each token can't be recorded as one."""
    listed = ", ".join(f"{k} of {experts}" for k, experts in sorted(kinds))
    return f"its layers send a token to different numbers of experts ({listed})"


def routed_layers_of(calls: list[Call], num_rows: int) -> tuple[RoutedLayers | None, str | None]:
    """What the calls in a forward of `num_rows` tokens tell; else None, and why nothing is recorded."""
    if not calls:
        return None, NOT_ROUTED
    if any(call.num_rows != num_rows for call in calls):
        return None, "a layer of it sends only some of its tokens to experts"
    kinds = {(call.experts_per_token, call.num_experts) for call in calls}
    if len(kinds) > 1:
        return None, different_kinds(kinds)
    ((k, experts),) = kinds
    return RoutedLayers(tuple(call.module for call in calls), len(calls), k, experts), None


class RoutingStore:
    """The experts of every token whose K and V are kept, `[block, token, layer, k]`.

    As with K and V, memory is reserved at once and touched only where it is written.
    """

    def __init__(self, layers: RoutedLayers, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        dtype = torch.uint8 if layers.num_experts <= 256 else torch.int16
        shape = (num_blocks, block_size, layers.count, layers.experts_per_token)
        with torch.inference_mode(False):  # as for K and V
            self.ids = torch.empty(shape, dtype=dtype)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to)."""
        if copies:
            self.ids[[b for _, b in copies]] = self.ids[[a for a, _ in copies]]

    def write(self, slots: Tensor, ids: Tensor) -> None:
        """Put `ids` `[T, layers, k]` at `slots` `[T]`."""
        self.ids.flatten(0, 1)[slots.to(self.ids.device)] = ids.to(self.ids)

    def read(self, block_table: Sequence[int], num_tokens: int) -> Tensor:
        """A copy of the first `num_tokens` tokens of a sequence, `[num_tokens, layers, k]` int16."""
        blocks = list(block_table[: -(-num_tokens // self.block_size)])
        with torch.inference_mode(False):
            return self.ids[blocks].flatten(0, 1)[:num_tokens].to(torch.int16)


class Routing:
    """The routing of one forward: what each layer chose, and what it is made to choose.

    Args:
        layers: of this model.
        forced: `[T, layers, k]`, the experts of each token in the order of its slots, -1 where the
            router is free; None leaves all of them free.

    Attributes:
        chosen: `[T, k]` int64 of each layer so far.
        weights: `[T, k]` of each layer so far, in the same order; kept on demand only.
    """

    def __init__(
        self, layers: RoutedLayers, forced: Tensor | None = None, *, keep_weights: bool = False
    ) -> None:
        self.layers = layers
        self.chosen: list[Tensor] = []
        self.weights: list[Tensor] = []
        self._keep_weights = keep_weights
        self._forced = None
        if forced is not None:
            expected = (layers.count, layers.experts_per_token)
            assert forced.shape[1:] == expected, (forced.shape, expected)
            assert int(forced.max()) < layers.num_experts, int(forced.max())
            self._forced = forced.long()

    @property
    def is_complete(self) -> bool:
        return len(self.chosen) == self.layers.count

    def note(self, experts: nn.Module, index: Tensor, weights: Tensor) -> None:
        """`experts` serve `index` `[T, k]` with `weights` `[T, k]`.

        Raises:
            NotSupported: the tokens go elsewhere than where they were to be sent.
        """
        if self.is_complete or id(experts) != self.layers.modules[len(self.chosen)]:
            return  # a hook that calls a layer once more
        if self._forced is not None:
            forced = self._forced[:, len(self.chosen)]
            if not torch.equal(torch.where(forced >= 0, forced, index), index):
                raise NotSupported(
                    "its router does not choose its experts by topk, so its choice can't be replaced"
                )
        self.chosen.append(index)
        if self._keep_weights:
            self.weights.append(weights)

    def record(self) -> Tensor:
        """What all layers chose, `[T, layers, k]`."""
        if not self.is_complete:
            raise NotSupported(
                f"{len(self.chosen)} layers sent their tokens to experts in this forward, and "
                f"{self.layers.count} when the model was opened, so the routing can't be recorded"
            )
        return torch.stack(self.chosen, dim=1)

    def choose(self, scores: Tensor, own: Any) -> Any:
        """What `topk(scores)` gives in the next layer: `own` in free rows, what is forced elsewhere.

        Args:
            scores: `[T, experts]`.
            own: (values, indices), each `[T, k]`.
        """
        if self._forced is None or self.is_complete:
            return own
        ids = self._forced[:, len(self.chosen)]
        is_forced = ids >= 0
        values = torch.where(is_forced, scores.gather(1, ids.clamp(min=0)), own[0])
        return torch.return_types.topk((values, torch.where(is_forced, ids, own[1])))


_TOPK = frozenset({torch.topk, Tensor.topk})
_MASKING = frozenset({torch.masked_fill, Tensor.masked_fill})


class Replay(InvariantMode):
    """Stands between a router and its `topk`, for a forward in which experts are forced.

    Everything a router does before and after stays its own: what it scores, and how it turns the
    scores of the chosen experts into weights.

    Args:
        routing: tells that of the pass that is active.
        safety_net: be an `InvariantMode` too: one mode costs half of two.
    """

    def __init__(self, routing: Callable[[], Routing], *, safety_net: bool) -> None:
        super().__init__()
        self._routing = routing
        self._safety_net = safety_net
        self._masked: tuple[Any, Any] = (None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._safety_net:
            out = super().__torch_function__(func, types, args, kwargs)
        else:
            out = func(*args, **(kwargs or {}))
        if func in _MASKING:
            # Some routers mask the scores of all but a few groups for the choice and take weights
            # from what is left; a forced expert of another group has its weight from before.
            self._masked = (out, args[0])
        elif func in _TOPK and self._is_choice(args[0], out):
            masked, scores = self._masked
            return self._routing().choose(scores if args[0] is masked else args[0], out)
        return out

    def _is_choice(self, scores: Tensor, out: Any) -> bool:
        layers = self._routing().layers
        return (
            scores.dim() == 2
            and scores.shape[1] == layers.num_experts
            and out[1].shape == (scores.shape[0], layers.experts_per_token)
        )


Run = Callable[[Tensor | None], tuple[Tensor, Routing]]  # forced experts to logits and routing


def why_not_replayable(run: Run, num_tokens: int) -> str | None:
    """Try replay out on one sequence of `num_tokens` tokens; None, or what does not hold.

    The router's own choice, forced, must give its own bits; in reverse, its own weights in reverse.
    Other experts, forced on the last rows, must have weights and leave the rows before as they were.
    """
    try:
        free, routing = run(None)
        own, layers = routing.record(), routing.layers
        if not torch.isfinite(free).all():  # a matter of weights
            return None
        if not torch.equal(run(own)[0], free):
            return "in a trial its own choice of experts, forced, gave other logits"
        # Only the first layer's input is the same: sums in another order differ in the last bit.
        _, flipped = run(own.flip(-1))
        error = (flipped.weights[0].flip(-1) - routing.weights[0]).abs().max()
        if not error <= 1e-2 * routing.weights[0].abs().max():
            return "in a trial the weights of its experts depended on their order"
        half, k = num_tokens // 2, layers.experts_per_token
        others = torch.arange(num_tokens)[:, None] * k + torch.arange(k)
        others = (others % layers.num_experts)[:, None].repeat(1, layers.count, 1)
        others[:half] = -1
        logits, routing = run(others)
    except NotSupported as error:
        return str(error)
    if not torch.equal(logits[:half], free[:half]):
        return "in a trial forced experts changed the rows beside them"
    weights = torch.stack([w[half:] for w in routing.weights])
    # Softmax may leave an expert with nothing, but not many of them.
    if not torch.isfinite(weights).all() or (weights == 0).float().mean() > 0.2:
        return "its router has no weights for experts that it did not choose"
    return None
