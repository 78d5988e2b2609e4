"""Records of the experts and keys chosen for each token, stored along with its K and V, for replay.

Keys are recorded only on request, as there can be thousands per token and layer.

A layer is routed if `flat_experts` runs its experts. Its choice can be replaced if its router has a known
form (`router.py`). Routed layers are numbered in call order, without dense layers and shared experts.

Records use the slots of K and V and are written in the same forward, so they survive prefix caching, forks
and preemption without bookkeeping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from verbatim.batch import Choices
from verbatim.errors import NotSupported, OutOfBlocks
from verbatim.kv.flat import BlockStore

UNKNOWN_ROUTER = "its router has an unknown form, so its choice can't be replaced"
_NONE = {
    "routing": "none of its layers sends tokens to experts through transformers' experts interface",
    "indices": "none of its layers selects keys with an indexer",
}


def choices_of(name: str, kinds: Sequence[tuple[int, int]]) -> Choices:
    """Return the `Choices` of layers, given `k` and `count` of each."""
    if not kinds:
        return Choices(reason=_NONE[name])
    if len(set(kinds)) == 1:
        return Choices(len(kinds), *kinds[0])
    if name == "routing":
        listed = ", ".join(f"{k} of {count}" for k, count in sorted(set(kinds)))
        return Choices(reason=f"its layers send a token to different numbers of experts ({listed})")
    listed = ", ".join(str(k) for k, _ in sorted(set(kinds)))
    return Choices(reason=f"its layers choose different numbers of keys ({listed})")


def joined(name: str, parts: Sequence[Choices]) -> Choices:
    """Return the choices of a model, given those of its parts."""
    kinds = [(part.k, part.count) for part in parts for _ in range(part.layers)]
    reasons = {part.reason for part in parts} - {None, _NONE[name]}
    if reasons and len(set(kinds)) <= 1:
        return Choices(reason=next(iter(reasons)))
    replay_reason = next((p.replay_reason for p in parts if p.replay_reason), None)
    return replace(choices_of(name, kinds), replay_reason=replay_reason)


class ChoiceStore(BlockStore):
    """The choices for every token in the KV cache, `[block, token, layer, k]`.

    Memory is reserved at the first access and committed by writes: keys take more memory than K and V, and
    few requests record them.
    """

    token_axis = 1

    def __init__(self, choices: Choices, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._shape = (num_blocks, block_size, choices.layers, choices.k)
        self._dtype = choices.dtype
        self._ids: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """The choices of all slots; raises OutOfBlocks if there is not enough memory."""
        if self._ids is None:
            try:
                with torch.inference_mode(False):  # as for K and V
                    self._ids = torch.empty(self._shape, dtype=self._dtype)
            except RuntimeError:
                raise OutOfBlocks(
                    f"{self.nbytes} bytes for recorded choices, one for each token of K and V, "
                    "can't be allocated; choose a smaller kv_memory"
                ) from None
        return self._ids

    @property
    def nbytes(self) -> int:
        return math.prod(self._shape) * self._dtype.itemsize

    @property
    def tensors(self) -> list[Tensor]:
        """A view of `ids` for each layer, `[blocks, block_size, k]`, as for K and V."""
        return [*self.ids.unbind(2)]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to)."""
        if copies and self._ids is not None:
            self.ids[[b for _, b in copies]] = self.ids[[a for a, _ in copies]]

    def write(self, slots: Tensor, ids: Tensor, layers: slice = slice(None)) -> None:
        """Write `ids` `[T, layers, k]`, or those of some layers, to `slots` `[T]`."""
        self.ids.flatten(0, 1)[slots.to(self.ids.device), layers] = ids.to(self.ids)

    def read(self, block_table: Sequence[int], num_tokens: int) -> Tensor:
        """Return the choices of a sequence's first tokens, `[num_tokens, layers, k]` int16 or int32."""
        blocks = list(block_table[: -(-num_tokens // self.block_size)])
        with torch.inference_mode(False):
            ids = self.ids[blocks].flatten(0, 1)[:num_tokens]
            return ids.short() if ids.dtype == torch.uint8 else ids


Records = Mapping[str, ChoiceStore]  # by `CHOICES`


def open_records(choices: Mapping[str, Choices], num_blocks: int, block_size: int) -> Records:
    """Open the stores for a model's choices."""
    return {
        name: ChoiceStore(chosen, num_blocks, block_size)
        for name, chosen in choices.items()
        if chosen.layers
    }


class Routing:
    """The routing of one forward: the chosen and the forced experts of each layer.

    Args:
        layers: the routed layers of the model.
        modules: `id()` of each layer's experts module, in call order.
        num_rows: number of rows of the forward.
        forced: `[T, layers, k]`, experts to use, in slot order; -1, or None for all: the router chooses.
        device: device of the forward.

    Attributes:
        chosen: `[T, layers, k]` int16, filled for the layers that ran.
        forced: the argument, int16 on `device`.
    """

    def __init__(
        self,
        layers: Choices,
        modules: Sequence[int],
        num_rows: int,
        forced: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self._modules = layers, modules
        shape = (num_rows, layers.layers, layers.k)
        with torch.inference_mode(False):  # it is edited in place outside of inference mode
            self.chosen = torch.empty(shape, dtype=torch.int16, device=device)
        self.forced = None
        if forced is not None:
            assert forced.shape == shape, (forced.shape, shape)
            assert int(forced.max()) < layers.count, int(forced.max())
            self.forced = forced.to(device, torch.int16).contiguous()
        self._num_done = 0  # number of layers that ran

    @property
    def is_complete(self) -> bool:
        return self._num_done == self.layers.layers

    def forced_experts(self) -> Tensor | None:
        """Return the forced experts of the next layer, `[T, k]`."""
        if self.forced is None or self.is_complete:
            return None
        return self.forced[:, self._num_done]

    def add(self, experts: nn.Module, index: Tensor) -> None:
        """Record the experts `index` `[T, k]` chosen from `experts`; NotSupported: others were forced."""
        if not self._is_next(experts):
            return  # a hook called a layer again
        forced = self.forced_experts()
        if forced is not None and not torch.equal(torch.where(forced >= 0, forced, index), index):
            raise NotSupported(UNKNOWN_ROUTER)
        self.chosen[:, self._num_done] = index
        self._num_done += 1

    def addresses(self, experts: nn.Module) -> tuple[int | None, int | None, int]:
        """Return the addresses of the next layer's record and forced experts, and the row stride."""
        if not self._is_next(experts):
            return None, None, 0
        offset = 2 * self._num_done * self.layers.k
        self._num_done += 1
        forced = None if self.forced is None else self.forced.data_ptr() + offset
        return self.chosen.data_ptr() + offset, forced, self.chosen.stride(0)

    def all_addresses(self) -> tuple[int, int | None]:
        """Return the addresses of the record and the forced experts of all layers."""
        self._num_done = self.layers.layers
        return self.chosen.data_ptr(), None if self.forced is None else self.forced.data_ptr()

    def record(self) -> Tensor:
        """Return the experts of all layers, `[T, layers, k]`."""
        if not self.is_complete:
            raise NotSupported(
                f"{self._num_done} layers sent their tokens to experts in this forward, but "
                f"{self.layers.layers} did when the model was opened, so the routing can't be "
                "recorded"
            )
        return self.chosen

    def _is_next(self, experts: nn.Module) -> bool:
        return not self.is_complete and id(experts) == self._modules[self._num_done]
