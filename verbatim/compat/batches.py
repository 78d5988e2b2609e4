"""Arguments, padded batches and model objects, shared by the adapters."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from verbatim.core import Completion, FinishReason, Request
from verbatim.core import Sequence as Row
from verbatim.errors import EngineClosed, InvalidRequest, NotSupported, RequestFailed
from verbatim.llm import LLM
from verbatim.tensors import check_padded, engine_of, pad_rows


def accepts(function: Any, *args: Any, unknown: bool = False, **kwargs: Any) -> bool:
    """Return whether a callable can be called with these arguments.

    Args:
        unknown: the answer for a function without a signature.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return unknown
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def by_name(groups: dict[str, str]) -> dict[str, str]:
    """Return the reason of each name, from names separated by spaces for each reason."""
    return {name: reason for reason, names in groups.items() for name in names.split()}


def pad_id_of(*sources: Any) -> int | None:
    """Return the first pad id of configs, tokenizers or models; None if no source has one."""
    ids = (getattr(source, "pad_token_id", None) for source in sources)
    return next((i for i in ids if isinstance(i, int) and i >= 0), None)


def flag(name: str, value: Any) -> bool:
    """Return a switch as a bool; 0 and 1 are False and True.

    Raises:
        InvalidRequest: any other value.
    """
    if not isinstance(value, int) or value not in (0, 1):
        raise InvalidRequest(f"{name}={value!r}: must be True or False")
    return bool(value)


def check_search(num_beams: int, do_sample: bool, temperature: Any) -> None:
    """Refuse beams that sample, and sampling at temperature 0."""
    if num_beams > 1 and do_sample:
        raise NotSupported(
            f"num_beams={num_beams} with do_sample=True: beams search and do not sample; set do_sample=False"
        )
    if do_sample and temperature == 0:
        raise InvalidRequest(
            f"temperature={temperature!r}: must be above 0; the likeliest token is do_sample=False"
        )


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows of ids with padding.

    Attributes:
        ids: `[B, L]` int64, on the CPU.
        mask: `[B, L]` bool, False on pads, anywhere in a row.
        ends: for each row, the column after the token that ended it, or None.
    """

    ids: Tensor
    mask: Tensor
    ends: tuple[int | None, ...]

    @classmethod
    def of(
        cls, ids: Any, attention_mask: Any, pad_id: int | None, name: str = "input_ids"
    ) -> PaddedRows:
        """Return padded rows; without a mask, leading pads are masked, and later ones are tokens.

        Args:
            name: name of the ids in messages.

        Raises:
            InvalidRequest: not integers `[B, L]`, pads at the end of a row, or a row without a token.
        """
        check_padded(ids, attention_mask, name=name)
        ids = ids.detach().to("cpu", torch.int64, copy=True)
        if attention_mask is not None:
            mask = attention_mask.detach().cpu().bool()
        elif pad_id is None or not ids.numel():
            mask = torch.ones_like(ids, dtype=torch.bool)
        else:
            mask = (ids != pad_id).cummax(dim=1).values
        for row in (~mask[:, -1:].any(dim=1)).nonzero().flatten().tolist():
            if mask[row].any():
                raise InvalidRequest(
                    f"attention_mask has padding at the end of row {row}; rows must be padded on the left"
                )
            why = "" if attention_mask is None else ": attention_mask is 0 in all of it"
            raise InvalidRequest(f"row {row} of {name} has no tokens{why}")
        return cls(ids, mask, (None,) * len(ids))

    @classmethod
    def empty(cls, num_rows: int) -> PaddedRows:
        ids = torch.empty(num_rows, 0, dtype=torch.int64)
        return cls(ids, ids.bool(), (None,) * num_rows)

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def rows(self) -> list[list[int]]:
        """Return the ids of each row without its pads."""
        return [i[m].tolist() for i, m in zip(self.ids, self.mask, strict=True)]

    def first(self, width: int) -> PaddedRows:
        """Return the columns before `width`."""
        ends = tuple(None if end is None or end > width else end for end in self.ends)
        return PaddedRows(self.ids[:, :width], self.mask[:, :width], ends)

    def followed_by(self, ids: Tensor, mask: Tensor) -> PaddedRows:
        """Return these columns with more appended; all rows become unfinished."""
        both = torch.cat([self.ids, ids], dim=1), torch.cat([self.mask, mask], dim=1)
        return PaddedRows(*both, (None,) * self.num_rows)

    def grown(self, new: list[list[int]], ended: list[bool], fill_id: int) -> PaddedRows:
        """Return these columns with the new ids of each row appended, padded to the longest.

        Args:
            ended: whether a row's last new token is its end; ignored for a row without new ids.
        """
        ends = list(self.ends)
        for row, new_ids in enumerate(new):
            if new_ids:
                ends[row] = self.width + len(new_ids) if ended[row] else None
        mask = pad_rows([[1] * len(new_ids) for new_ids in new], 0).bool()
        ids = self.joined(new, fill_id, mask.shape[1])
        return PaddedRows(ids, torch.cat([self.mask, mask], dim=1), tuple(ends))

    def joined(self, new: Sequence[Sequence[int]], fill_id: int, width: int) -> Tensor:
        """Return the ids with `width` more columns, `[B, L + width]`: `new`, then `fill_id`.

        An ordinary tensor, not an inference tensor.
        """
        with torch.inference_mode(False), torch.no_grad():
            return torch.cat(
                [self.ids, pad_rows(new, fill_id, num_rows=len(self.ids), width=width)], 1
            )

    def repeated(self, copies: int) -> PaddedRows:
        """Return each row `copies` times."""
        ids, mask = (t.repeat_interleave(copies, dim=0) for t in (self.ids, self.mask))
        return PaddedRows(ids, mask, tuple(end for end in self.ends for _ in range(copies)))


def check_complete(row: int, output: Completion | Row) -> None:
    """Raise RequestFailed if the row was aborted, for example by closing a shared engine."""
    if output.finish_reason is FinishReason.ABORT:
        raise RequestFailed(f"row {row} was ended from outside, by close() or pause('abort')")


def new_rows(
    requests: Sequence[Request] | Mapping[int, Request],
    stops: Mapping[int, int] = MappingProxyType({}),
) -> tuple[list[list[int]], int]:
    """Return the new ids of each row so far, and the number of columns that no step changes.

    Args:
        requests: of all rows, or of some by their number.
        stops: for rows that were aborted on purpose, the number of new ids to keep.

    Raises:
        RequestFailed: a row was aborted. Or the error of one.
    """
    rows, growing = [], []
    by_number = requests if isinstance(requests, Mapping) else dict(enumerate(requests))
    for number, request in by_number.items():
        if request.error is not None:
            raise request.error
        row = request.sequences[0]
        if number not in stops:
            check_complete(number, row)
        rows.append(list(row.output_ids[: stops.get(number)]))
        growing += [] if request.finished or number in stops else [len(row.output_ids)]
    return rows, min(growing) if growing else max(map(len, rows), default=0)


class Opened:
    """An open `LLM`, or a live module, for which one engine is kept."""

    _source: LLM | nn.Module
    _closed = False
    _end: Any = None  # closes an engine that was opened here

    def _close_with(self, llm: LLM) -> None:
        """Close `llm` together with this object, also when it is collected."""
        self._end = weakref.finalize(self, llm.close)

    @property
    def llm(self) -> LLM:
        """The engine, with every sampling option, streams and scores.

        Raises:
            EngineClosed: after `close`.
        """
        if self._closed:
            raise EngineClosed(f"this {type(self).__name__} was closed")
        return engine_of(self._source)

    def close(self) -> None:
        """Close the engine if it was opened here; leave a given `LLM` or module open."""
        self._closed = True
        if self._end is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
