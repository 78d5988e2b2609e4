"""Runs models through the caller's hooks, with all rows in one batch.

`prepare_inputs_fn` returns the model's inputs for the ids so far, `update_model_kwargs_fn` the arguments of
the next step. Both receive one batch of ids, `[B, L]`, padded on the left. Ended rows continue with pad ids.
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

# Left out without a prepare_inputs_fn: every forward then receives all ids, which a cache would duplicate.
_CACHES = frozenset({*CACHE_NAMES, "past", "mems", "cache_params", "cache_position"})
# Suffixes of inputs with one column per id, such as position_ids and mm_token_type_ids.
_PER_TOKEN = ("input_ids", "position_ids", "token_type_ids", "cache_position")


class CallbackDecoder(RowsDecoder):
    """Runs one batch of rows from the prompts to the end. The engine must not run any other sequences.

    `model_kwargs` always has an `attention_mask` as wide as the ids: if `update` omits it or does not extend
    it, it is extended here. Ids that are already in a transformers cache are removed from the inputs.

    Args:
        prepare: `f(input_ids, past=past, **model_kwargs)` returns the model's inputs; `past` is None in the
            first step, later the cache of the last outputs, or `outputs.mems`. None: every step passes all
            ids, and the `model_kwargs` that the forward declares.
        update: `f(outputs, model_kwargs)` returns the next `model_kwargs`; None: they stay the same.
        input_ids: `[B, P]` int64, padded on the left.
        attention_mask: `[B, P]`, 0 on padding.
        model_kwargs: further arguments of the hooks.
        pad_token_id: id that fills a row after its end.

    Raises:
        InvalidRequest: `model_kwargs` has `input_ids` or `past`, or an id of a prompt or its padding is
            outside the vocabulary.
        UnsupportedModel: as for an `ActorDecoder`; with a `prepare`, the forward need not take `input_ids`.
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
                raise InvalidRequest(f"the hooks always receive {name}; leave it out")
        self.arguments = check_takes_ids(model) if prepare is None else ForwardArguments.of(model)
        self._prepare_inputs, self._update = prepare, update
        input_ids, attention_mask = (x.to(device_of(model)) for x in (input_ids, attention_mask))
        self._prompts, self._prompt_mask = input_ids, attention_mask
        self._model_kwargs = dict(model_kwargs)
        self._pad = pad_token_id
        self._names = _argument_names(model, self.arguments)
        # The row of each running sequence, by its first slot, and the first column of each row.
        self._rows: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        # The rows of the last forward's logits, and the token drawn for each row: the next forward has no
        # piece for a row that ends with its token.
        self._drawing: list[int] = []
        self._drawn: dict[int, int] = {}
        self._seen = [row[mask.bool()] for row, mask in zip(input_ids, attention_mask, strict=True)]
        self._tokens, self._mask = self._prompts, self._prompt_mask
        self._past: Any = None
        self._kwargs: dict[str, Any] = {}
        super().__init__(model, vocabulary_of(model, self.arguments, {}))
        # Padding is masked in attention, but the embedding layer reads it.
        used = [input_ids.flatten(), input_ids.new_tensor([pad_token_id] * (len(input_ids) > 1))]
        last = self.spec.vocab_size - 1
        for token in torch.cat(used).unique().tolist():
            if not 0 <= token <= last:
                raise InvalidRequest(
                    f"id {token} is outside 0 to {last}, and hooks pass padding to the model as "
                    "well; set pad_token_id= to an id of the vocabulary"
                )

    def run_rows(self, pieces: list[Piece]) -> list[Tensor]:
        drawn = [piece for piece in pieces if len(piece.logit_positions)]
        if not drawn:
            empty = torch.empty(0, self.spec.vocab_size, device=self.device)
            return [empty for _ in pieces]
        if self._append(drawn):
            rows = [self._rows[int(piece.slots[0])] for piece in drawn]
        else:
            rows = self._restart(drawn)
        for row, piece in zip(rows, drawn, strict=True):
            self._seen[row] = piece.ids
        self._drawing, self._drawn = rows, {}
        with evaluating(self.module):
            logits = self._step()
        row_of_piece = iter(rows)
        return [
            logits[next(row_of_piece), None] if len(p.logit_positions) else logits[:0]
            for p in pieces
        ]

    def on_drawn(self, plan: SamplePlan, ids: list[int]) -> None:
        logit_rows = range(len(plan.rows)) if plan.logits_rows is None else plan.logits_rows
        self._drawn = {self._drawing[at]: i for at, i in zip(logit_rows, ids, strict=True)}

    def _append(self, pieces: list[Piece]) -> bool:
        """Append a column and return True if every piece is a known row with one more token."""
        column = self._prompts.new_full((len(self._seen), 1), self._pad)
        for ended, token in self._drawn.items():
            column[ended] = max(token, 0)  # -1: nothing could be drawn
        for piece in pieces:
            row = self._rows.get(int(piece.slots[0]))
            if row is None or not torch.equal(piece.ids[:-1], self._seen[row]):
                return False
            if self._starts[row] + len(piece.ids) - 1 != self._tokens.shape[1]:
                return False  # the row was not part of the last step
            column[row] = piece.ids[-1]
        self._tokens = torch.cat([self._tokens, column], dim=1)
        self._mask = _extended(self._mask)
        return True

    def _restart(self, pieces: list[Piece]) -> list[int]:
        """Rebuild the batch from the ids of `pieces`, without a cache; return each piece's row."""
        rows = self._match(pieces)
        padding = (self._prompt_mask == 0).sum(dim=1).tolist()
        width = max(padding[row] + len(p.ids) for row, p in zip(rows, pieces, strict=True))
        self._tokens, self._mask = self._prompts.clone(), self._prompt_mask.clone()
        if width > self._prompts.shape[1] or len(pieces) < len(self._seen):
            self._tokens = self._prompts.new_full((len(self._seen), width), self._pad)
            self._mask = self._prompt_mask.new_zeros(len(self._seen), width)
            self._mask[:, -1] = 1  # an ended row must attend to at least one position
            for row, piece in zip(rows, pieces, strict=True):
                self._tokens[row, -len(piece.ids) :] = piece.ids
                self._mask[row, -len(piece.ids) :] = 1
        self._past = None
        self._kwargs = {**self._model_kwargs, "attention_mask": self._mask}
        self._rows = {int(p.slots[0]): row for row, p in zip(rows, pieces, strict=True)}
        self._starts = {row: width - len(p.ids) for row, p in zip(rows, pieces, strict=True)}
        return rows

    def _match(self, pieces: list[Piece]) -> list[int]:
        """Return the row of each piece: the first unused row with its ids, or with all but its last id."""
        rows: list[int] = []
        unused = list(range(len(self._seen)))
        for piece in pieces:
            seen = (piece.ids.tolist(), piece.ids[:-1].tolist())
            row = next((row for row in unused if self._seen[row].tolist() in seen), None)
            if row is None:
                raise InvalidRequest(
                    "the prompt does not match any row of the batch given with the hooks"
                )
            rows.append(row)
            unused.remove(row)
        return rows

    def _step(self) -> Tensor:
        """Run one step with the hooks; return the logits `[B, V]` of the last column."""
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
        if "past" not in self.arguments:  # transformers' own method returns unknown arguments
            inputs.pop("past", None)
        return rename_cache(inputs, self._names)

    def _uncached(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return `inputs` without the columns that are already in the cache, as transformers 5 expects."""
        ids: Any = inputs.get("input_ids")
        mask: Any = inputs.get("attention_mask")
        cache: Any = cache_of(inputs)
        # With any other kind of cache, the caller's hooks choose the columns.
        cached = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
        if not cached or not isinstance(ids, Tensor) or ids.dim() != 2:
            return inputs
        # A mask wider than the ids covers a prefix that was cached before the first id.
        flat = isinstance(mask, Tensor) and mask.dim() == 2
        total, width = (mask if flat else self._tokens).shape[1], ids.shape[1]
        uncached = total - cached
        if not 0 < uncached <= width:
            raise RequestFailed(
                f"prepare_inputs_fn returned a cache of {cached} tokens and {width} input_ids for {total} "
                "tokens in all; the input_ids must be those that the cache lacks, or all"
            )
        if uncached == width:
            return inputs
        if mask is not None and not flat:
            raise RequestFailed(
                f"prepare_inputs_fn returned a cache of {cached} tokens, all {width} input_ids and a mask "
                "that is made for all of them; return an attention_mask [B, L], or the input_ids that the "
                "cache lacks"
            )
        for name, value in inputs.items():
            if (
                name.endswith(_PER_TOKEN)
                and isinstance(value, Tensor)
                and value.shape[-1:] == (width,)
            ):
                inputs[name] = value[..., -uncached:]
        return inputs

    def _updated(self, outputs: Any) -> dict[str, Any]:
        kwargs = self._kwargs
        if self._update is not None:
            kwargs = _as_dict("update_model_kwargs_fn", self._update(outputs, kwargs))
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == self._tokens.shape:
            kwargs = {**kwargs, "attention_mask": _extended(mask)}
        return kwargs

    def _with_positions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return `inputs` with positions that skip padding; by default, models count leading pads, too."""
        mask = inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != self._tokens.shape:
            return inputs
        ids, passed = inputs.get("input_ids"), inputs.get("position_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return inputs
        positions = positions_of(mask)[:, mask.shape[1] - ids.shape[1] :]
        if "position_ids" in self._names:
            return {**inputs, "position_ids": positions if passed is None else passed}
        if isinstance(passed, Tensor) and torch.equal(passed, positions):
            # The model takes no position_ids, and computes the same ones from the mask.
            return {name: value for name, value in inputs.items() if name != "position_ids"}
        return inputs


def positions_of(mask: Tensor) -> Tensor:
    """Return the position of each token in its row, `[B, L]` int64; 0 for the padding before it."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def _extended(mask: Tensor) -> Tensor:
    return torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)


def _as_dict(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestFailed(f"{name} returned {type(value).__name__}; it must return a dict")
    return dict(value)


def _argument_names(model: Any, arguments: ForwardArguments) -> frozenset[str]:
    """Return the arguments of a model's forward; for a wrapper with `**kwargs`, also its inner model's."""
    from transformers import PreTrainedModel

    if not arguments.others:
        return arguments.names
    layers = (layer for module in modules_of(model) for layer in module.modules())
    inner = next((layer for layer in layers if isinstance(layer, PreTrainedModel)), None)
    return arguments.names if inner is None else arguments.names | ForwardArguments.of(inner).names
