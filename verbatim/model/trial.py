"""A trial run for model classes that are not in the list of verified ones.

Two short sequences go through the flat path, in one piece and in two, and must give what the model's
own forward gives for each of them alone; and bit for bit what the flat path gives for each alone. What the
inspection cannot see shows here: scores changed in ways of the model's own, positions that start
elsewhere, keyword arguments that mean something, a scale taken over all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.batch import AttentionBatch
from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import AnyOptions, AttentionOptions, IndexOptions
from verbatim.kv.indexing import choose_keys
from verbatim.kv.states import StateRows, StateShape
from verbatim.model.context import Update, activate
from verbatim.model.invariant import InvariantMode
from verbatim.model.patching import Forwards, configs_of, patched, quiet

_LENGTHS = (9, 6)
_CUT = (4, 1)


class _TrialContext:
    """A forward context with plain attention, over keys and values kept in lists."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.positions = torch.empty(1, 0, dtype=torch.int64)
        self.lengths: list[int] = []  # rows of each sequence in this forward
        self._calls: dict[int, int] = {}
        self._kept: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._states: list[Tensor] = []  # of each recurrent operation
        self._num_states = 0  # operations run in this forward
        self._num_forwards = 0

    def start(self, lengths: list[int]) -> None:
        self.lengths, self._calls = lengths, {}
        self._num_states = 0
        self._num_forwards += 1

    def update_state(
        self, shape: StateShape, update: Update, rowwise: Callable[[], Tensor]
    ) -> Tensor:
        count = len(self.lengths)
        if self._num_states == len(self._states):
            zeros = torch.zeros(1 + 2 * count, *shape.shape, dtype=shape.dtype)
            self._states.append(zeros.to(self._device))
        state = self._states[self._num_states]
        self._num_states += 1
        starts = torch.tensor([0, *self.lengths]).cumsum(0).int()
        # Each sequence has two slots, which it reads and writes in turns.
        slots = 1 + torch.arange(count, dtype=torch.int32)
        turn = self._num_forwards % 2
        sources = torch.zeros_like(slots) if self._num_forwards == 1 else slots + (1 - turn) * count
        at = (starts, sources, starts[1:] - 1, slots + turn * count)
        return update(state, StateRows(*(x.to(self._device) for x in at)))

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        pieces = zip(
            q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True
        )
        outs = []
        for s, (queries, keys, values) in enumerate(pieces):
            slot = (id(module), call, s)
            if slot in self._kept:
                keys = torch.cat([self._kept[slot][0], keys])
                values = torch.cat([self._kept[slot][1], values])
            self._kept[slot] = keys, values
            start = sum(self.lengths[:s])
            if isinstance(options, IndexOptions):
                outs.append(_choose(queries, keys, options, start))
                continue
            if options.chosen is not None:
                chosen = options.chosen[start : start + len(queries)]
                outs.append(_attention(queries, keys, values, replace(options, chosen=chosen)))
                continue
            outs.append(_attention(queries, keys, values, options))
        return torch.cat(outs)


def _choose(q: Tensor, k: Tensor, options: IndexOptions, start: int) -> Tensor:
    """Choose the keys of the last rows `q` `[R, H, D]` of a sequence with `k` `[L, 1, D]`."""
    if options.weights is not None:
        options = replace(options, weights=options.weights[start : start + len(q)])
    lens = torch.tensor([len(k)])
    batch = AttentionBatch(torch.tensor([0, len(q)]), lens, lens[:, None])
    return choose_keys(q, lambda _: k[:, 0].float(), batch, options)


def _attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Attend with the last rows `q` `[R, H, Dk]` of a sequence to `k` and `v` `[L, Hkv, D]`, in float32."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q.float()[:, None] * keys).sum(-1) * options.scale  # [R, L, H]
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    positions = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    distance = (positions - torch.arange(len(k), device=q.device))[..., None]
    if options.alibi is not None:
        scores = scores - distance * options.alibi.to(q.device)
    lowest = options.lowest_key(positions)[..., None]
    seen = (distance >= 0) & (distance <= positions[..., None] - lowest)
    if options.chosen is not None:
        chosen = options.chosen.long().movedim(1, 2) % (len(k) + 1)
        among = torch.zeros(len(q), len(k) + 1, chosen.shape[2], dtype=torch.bool, device=q.device)
        among = among.scatter(1, chosen, True)[:, :-1]
        seen = seen & among.repeat_interleave(q.shape[1] // among.shape[2], dim=2)
    scores = scores.masked_fill(~seen, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(q.device).expand(len(q), 1, -1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=1), dim=1)[:, :-1]
    else:
        weights = torch.softmax(scores, dim=1)
    return (weights[..., None] * values).sum(1).to(q.dtype)


def try_out(
    module: nn.Module, forwards: Forwards, *, vocab_size: int, positions: bool, override: bool
) -> None:
    """Compare the flat path with the model's own forward.

    Args:
        forwards: of this module, as for `patched`.
        vocab_size: width of its logits.
        positions: its forward takes `position_ids`.
        override: it must run in `InvariantMode`.

    Raises:
        UnsupportedModel: they differ.
    """
    device = next(module.parameters()).device
    high = max(2, min(vocab_size, 1000) - 3)  # special ids stand at either end
    whole = [(torch.arange(n, device=device) * 37 + 5 * n) % high + 2 for n in _LENGTHS]
    plain = [_plain(module, ids) for ids in whole]
    scale = max(float(logits.abs().max()) for logits in plain)
    if not math.isfinite(scale):  # a matter of weights
        return

    def flat(context: _TrialContext, pieces: list[Tensor], starts: list[int]) -> list[Tensor]:
        """Return the logits of each piece, in one flat forward."""
        context.start([len(piece) for piece in pieces])
        inputs: dict[str, Any] = {"input_ids": torch.cat(pieces)[None]}
        ranges = [
            torch.arange(start, start + len(piece), device=device)
            for start, piece in zip(starts, pieces, strict=True)
        ]
        context.positions = torch.cat(ranges)[None]
        if positions:
            inputs["position_ids"] = context.positions
        with (
            patched(module, forwards, configs_of(module), hooks=False),
            activate(context),
            InvariantMode() if override else nullcontext(),
        ):
            logits: Tensor = module(**inputs, use_cache=False).logits[0]
        return list(logits.split(context.lengths))

    together = flat(_TrialContext(device), whole, [0] * len(whole))
    for ids, beside in zip(whole, together, strict=True):
        if not torch.equal(flat(_TrialContext(device), [ids], [0])[0], beside):
            raise UnsupportedModel("in a trial its logits changed with the rows beside them")
    for cuts in ((_LENGTHS,), (_CUT, _LENGTHS)):
        context = _TrialContext(device)
        starts = [0] * len(whole)
        for stops in cuts:
            spans = list(zip(starts, stops, strict=True))
            pieces = [ids[start:stop] for ids, (start, stop) in zip(whole, spans, strict=True)]
            logits = flat(context, pieces, starts)
            for s, (start, stop) in enumerate(spans):
                error = _error(logits[s], plain[s][start:stop])
                if not error <= scale * (1e-3 if logits[s].dtype == torch.float32 else 1e-1):
                    raise UnsupportedModel(
                        "in a trial its logits on a flat batch were off by "
                        f"{error:.2g} (largest logit: {scale:.2g}) from its own forward"
                    )
            starts = list(stops)


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Return the error of the logits `[T, V]`: the worst row's error in float32, the median row's in less,
    where a rounding may send a token to another expert.
    """
    rows = (ours - theirs).abs().amax(-1).float()
    return float(rows.max() if ours.dtype == torch.float32 else rows.median())


def _plain(module: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits `[T, V]` of the module's own forward, with eager attention."""
    configs = configs_of(module)
    with quiet(progress=True), patched(module, [], configs, hooks=False):
        for config in configs:  # `patched` puts it back
            config.__dict__["_attn_implementation_internal"] = "eager"
            config.__dict__["_experts_implementation_internal"] = "eager"
        return module(input_ids=ids[None], use_cache=False).logits[0]  # type: ignore[no-any-return]
