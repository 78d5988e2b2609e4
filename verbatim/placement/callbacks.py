"""Models that are called through the caller's own hooks, all rows together.

`prepare_inputs_fn` makes the model's inputs from the ids so far, `update_model_kwargs_fn` the arguments of
the next step. They are written for one padded batch, so they get one: `[B, L]` ids, padded on the left;
rows continue with pads once they have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import SamplePlan
from verbatim.errors import InvalidRequest, RequestFailed
from verbatim.placement.actor import (
    CACHE_NAMES,
    ForwardArguments,
    cache_of,
    check_logits,
    check_takes_ids,
    evaluating,
    field_of,
    rename_cache,
    vocabulary_of,
)
from verbatim.placement.external import Piece, RowsDecoder
from verbatim.placement.wrapped import device_of, modules_of

# Without a prepare_inputs_fn each forward is over all ids, so a cache would count them twice.
_CACHES = frozenset({*CACHE_NAMES, "past", "mems", "cache_params", "cache_position"})
# Inputs with a column for each of the ids: position_ids, token_type_ids, mm_token_type_ids.
_BESIDE = ("input_ids", "position_ids", "token_type_ids", "cache_position")


class CallbackDecoder(RowsDecoder):
    """Runs one batch of rows, from its prompts to its end; the engine must run no other.

    `model_kwargs` always has an `attention_mask` as wide as the ids: if `update` omits it or does not widen
    it, it is widened here. Ids that are in a transformers cache already are not passed on.

    Args:
        prepare: `f(input_ids, past=past, **model_kwargs)` returns the model's inputs; `past` is None at
            first, then the cache in the outputs, or `outputs.mems`. None passes all ids at each step, and
            the `model_kwargs` that the forward names.
        update: `f(outputs, model_kwargs)` returns the next `model_kwargs`; None keeps them.
        input_ids: `[B, P]` int64, padded on the left.
        attention_mask: `[B, P]`, 0 on padding.
        model_kwargs: further arguments of the hooks.
        pad_token_id: continues a row after its end.

    Raises:
        InvalidRequest: `model_kwargs` has an argument that the hooks get anyway, or a pad is outside of
            the vocabulary.
        UnsupportedModel: as for an `ActorDecoder`; a `prepare` of the caller need not pass `input_ids`.
    """

    placement = "callbacks"

    def __init__(
        self,
        model: Any,
        prepare: Callable[..., Any] | None,
        update: Callable[..., Any] | None,
        input_ids: Tensor,
        attention_mask: Tensor,
        model_kwargs: Mapping[str, Any],
        pad_token_id: int,
    ) -> None:
        for name in ("input_ids", "past"):
            if name in model_kwargs:
                raise InvalidRequest(f"{name} is what the hooks are handed anyway; leave it out")
        self.arguments = check_takes_ids(model) if prepare is None else ForwardArguments.of(model)
        self._prepare_inputs, self._update = prepare, update
        input_ids, attention_mask = (x.to(device_of(model)) for x in (input_ids, attention_mask))
        self._prompts, self._prompt_mask = input_ids, attention_mask
        self._given = dict(model_kwargs)
        self._pad = pad_token_id
        self._names = _argument_names(model, self.arguments)
        # The row of each running sequence, by its first slot, and the column in which a row begins.
        self._rows: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        # The rows of the last forward's logits, and the tokens drawn from them: the next forward only
        # brings the tokens of rows that continue.
        self._drawing: list[int] = []
        self._drawn: dict[int, int] = {}
        self._seen = [row[mask.bool()] for row, mask in zip(input_ids, attention_mask, strict=True)]
        self._tokens, self._mask = self._prompts, self._prompt_mask
        self._past: Any = None
        self._kwargs: dict[str, Any] = {}
        super().__init__(model, vocabulary_of(model, self.arguments, {}))
        # Padding is masked, but its embeddings are looked up.
        fed = [
            input_ids.flatten(),
            input_ids.new_tensor([pad_token_id] * (len(input_ids) > 1)),
        ]
        last = self.spec.vocab_size - 1
        for token in torch.cat(fed).unique().tolist():
            if not 0 <= token <= last:
                raise InvalidRequest(
                    f"id {token} is outside 0 to {last}, and hooks hand the model padding as "
                    "well; give pads an id of the vocabulary (pad_token_id=)"
                )

    def run_rows(self, pieces: list[Piece]) -> list[Tensor]:
        drawn = [piece for piece in pieces if len(piece.wanted)]
        if not drawn:
            empty = torch.empty(0, self.spec.vocab_size, device=self.device)
            return [empty for _ in pieces]
        if self._go_on(drawn):
            rows = [self._rows[int(piece.slots[0])] for piece in drawn]
        else:
            rows = self._begin(drawn)
        for row, piece in zip(rows, drawn, strict=True):
            self._seen[row] = piece.ids
        self._drawing, self._drawn = rows, {}
        with evaluating(self.module):
            logits = self._step()
        row_of_piece = iter(rows)
        return [logits[next(row_of_piece), None] if len(p.wanted) else logits[:0] for p in pieces]

    def drawn(self, plan: SamplePlan, ids: list[int]) -> None:
        places = range(len(plan.rows)) if plan.logits_rows is None else plan.logits_rows
        self._drawn = {self._drawing[at]: i for at, i in zip(places, ids, strict=True)}

    def _go_on(self, pieces: list[Piece]) -> bool:
        """Add a column and return True if every piece is a known row with one more token."""
        column = self._prompts.new_full((len(self._seen), 1), self._pad)
        for ended, token in self._drawn.items():
            column[ended] = max(token, 0)  # -1: nothing could be drawn
        for piece in pieces:
            row = self._rows.get(int(piece.slots[0]))
            if row is None or not torch.equal(piece.ids[:-1], self._seen[row]):
                return False
            if self._starts[row] + len(piece.ids) - 1 != self._tokens.shape[1]:
                return False  # it missed a step
            column[row] = piece.ids[-1]
        self._tokens = torch.cat([self._tokens, column], dim=1)
        self._mask = _grown(self._mask)
        return True

    def _begin(self, pieces: list[Piece]) -> list[int]:
        """Start from the ids, at first or when rows are recomputed; return the row of each piece."""
        rows = self._match(pieces)
        padding = (self._prompt_mask == 0).sum(dim=1).tolist()
        width = max(padding[row] + len(p.ids) for row, p in zip(rows, pieces, strict=True))
        self._tokens, self._mask = self._prompts.clone(), self._prompt_mask.clone()
        if width > self._prompts.shape[1] or len(pieces) < len(self._seen):
            self._tokens = self._prompts.new_full((len(self._seen), width), self._pad)
            self._mask = self._prompt_mask.new_zeros(len(self._seen), width)
            self._mask[:, -1] = 1  # rows that have ended attend to something, too
            for row, piece in zip(rows, pieces, strict=True):
                self._tokens[row, -len(piece.ids) :] = piece.ids
                self._mask[row, -len(piece.ids) :] = 1
        self._past = None
        self._kwargs = {**self._given, "attention_mask": self._mask}
        self._rows = {int(p.slots[0]): row for row, p in zip(rows, pieces, strict=True)}
        self._starts = {row: width - len(p.ids) for row, p in zip(rows, pieces, strict=True)}
        return rows

    def _match(self, pieces: list[Piece]) -> list[int]:
        """Return the row of each piece: the first unused one with its ids, or with all but the last."""
        rows: list[int] = []
        left = list(range(len(self._seen)))
        for piece in pieces:
            seen = (piece.ids.tolist(), piece.ids[:-1].tolist())
            row = next((row for row in left if self._seen[row].tolist() in seen), None)
            if row is None:
                raise InvalidRequest(
                    "the prompt is none of the rows that the hooks were opened for"
                )
            rows.append(row)
            left.remove(row)
        return rows

    def _step(self) -> Tensor:
        """Run one step as those loops do; return logits `[B, V]` of the last column."""
        if self._kwargs.get("attention_mask") is None:
            self._kwargs = {**self._kwargs, "attention_mask": self._mask}
        inputs = self._with_positions(self._uncached(self._inputs()))
        outputs = self.module(**inputs)
        rows, width = len(self._seen), self.spec.vocab_size
        logits = check_logits(self.module, outputs, rows=rows, tokens=1, width=width)
        last_logits = logits[:, -1].clone()
        for past in (cache_of(outputs), field_of(outputs, "mems")):
            if past is not None:
                self._past = past
                break
        self._kwargs = self._updated(outputs)
        return last_logits

    def _inputs(self) -> dict[str, Any]:
        ids, kwargs = self._tokens.clone(), self._kwargs
        prepare = self._prepare_inputs
        if prepare is None:
            named = {k: v for k, v in kwargs.items() if k in self.arguments.names - _CACHES}
            if "attention_mask" in self.arguments:
                named["attention_mask"] = kwargs["attention_mask"]
            return {**named, "input_ids": ids}
        kwargs = rename_cache(kwargs, ForwardArguments.of(prepare).names)
        inputs = _as_dict("prepare_inputs_fn", prepare(ids, past=self._past, **kwargs))
        if "past" not in self.arguments:  # transformers' own method passes on unknown arguments
            inputs.pop("past", None)
        return rename_cache(inputs, self._names)

    def _uncached(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return inputs with only the columns that the cache lacks, as transformers 5 expects."""
        ids: Any = inputs.get("input_ids")
        mask: Any = inputs.get("attention_mask")
        cache: Any = cache_of(inputs)
        # Any other kind of cache is the caller's own, and so is what goes with it.
        held = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
        if not held or not isinstance(ids, Tensor) or ids.dim() != 2:
            return inputs
        # A wider mask means a prefix that was in the cache before the first id.
        flat = isinstance(mask, Tensor) and mask.dim() == 2
        total, width = (mask if flat else self._tokens).shape[1], ids.shape[1]
        lacking = total - held
        if not 0 < lacking <= width:
            raise RequestFailed(
                f"prepare_inputs_fn returned a cache of {held} tokens and {width} input_ids for {total} "
                "tokens in all; the input_ids must be those that the cache lacks, or all"
            )
        if lacking == width:
            return inputs
        if mask is not None and not flat:
            raise RequestFailed(
                f"prepare_inputs_fn returned a cache of {held} tokens, all {width} input_ids and a mask "
                "that is made for all of them; return an attention_mask [B, L], or the input_ids that the "
                "cache lacks"
            )
        for name, value in inputs.items():
            if (
                name.endswith(_BESIDE)
                and isinstance(value, Tensor)
                and value.shape[-1:] == (width,)
            ):
                inputs[name] = value[..., -lacking:]
        return inputs

    def _updated(self, outputs: Any) -> dict[str, Any]:
        kwargs = self._kwargs
        if self._update is not None:
            kwargs = _as_dict("update_model_kwargs_fn", self._update(outputs, kwargs))
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == self._tokens.shape:
            kwargs = {**kwargs, "attention_mask": _grown(mask)}
        return kwargs

    def _with_positions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return inputs with the mask's positions; by default, models count leading pads as tokens."""
        mask = inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != self._tokens.shape:
            return inputs
        ids, given = inputs.get("input_ids"), inputs.get("position_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return inputs
        positions = positions_of(mask)[:, mask.shape[1] - ids.shape[1] :]
        if "position_ids" in self._names:
            return {**inputs, "position_ids": positions if given is None else given}
        if isinstance(given, Tensor) and torch.equal(given, positions):
            # They follow from the mask, and this model takes the mask alone.
            return {name: value for name, value in inputs.items() if name != "position_ids"}
        return inputs


def positions_of(mask: Tensor) -> Tensor:
    """Return each token's position in its own row, `[B, L]` int64; 0 on the padding before it."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _grown(mask: Tensor) -> Tensor:
    return torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)


def _as_dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestFailed(f"{name} returned {type(value).__name__}; it must return a dict")
    return dict(value)


def _argument_names(model: Any, takes: ForwardArguments) -> frozenset[str]:
    """Return the arguments that a model names; of a wrapper with `**kwargs`, also the inner model's."""
    from transformers import PreTrainedModel

    if not takes.others:
        return takes.names
    layers = (layer for module in modules_of(model) for layer in module.modules())
    inner = next((layer for layer in layers if isinstance(layer, PreTrainedModel)), None)
    return takes.names if inner is None else takes.names | ForwardArguments.of(inner).names
