"""The checked arguments of one `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbatim.compat.batches import append_rows, pad_rows, prompt_mask
from verbatim.compat.integers import integer
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams
from verbatim.tensors import check_padded

DEBUG_MODES = (None, "fewer_batch", "breakdown")
_FEW_TOKENS = 5  # of "fewer_batch": the prefill's, and four of decoding
_LARGEST_ID = 2**31 - 1  # of int32


@dataclass(frozen=True, slots=True)
class OptArguments:
    """The checked arguments of one `generate`.

    Attributes:
        ids: `[B, P]` int64, left-padded.
        prompts: the rows to run, without pads.
        new_tokens: columns after the prompt.
        run_tokens: the number of them to generate.
        params: sampling parameters for the engine.
        breakdown: measure load, compute and store separately.
    """

    ids: Tensor
    prompts: list[list[int]]
    new_tokens: int
    run_tokens: int
    params: SamplingParams
    breakdown: bool
    verbose: int

    @classmethod
    def of(
        cls,
        inputs: Any,
        attention_mask: Any,
        max_new_tokens: Any,
        do_sample: Any,
        temperature: Any,
        stop: Any,
        debug_mode: Any,
        cut_gen_len: Any,
        verbose: Any,
        seed: Any,
        *,
        pad_id: int,
        vocab_size: int,
        block: int,
    ) -> OptArguments:
        """Check the arguments of a call.

        Args:
            block: number of rows that run at once.

        Raises:
            InvalidRequest: the message names the argument.
        """
        if not isinstance(do_sample, bool):
            raise InvalidRequest(f"do_sample={do_sample!r}: must be True or False")
        if not (debug_mode is None or (isinstance(debug_mode, str) and debug_mode in DEBUG_MODES)):
            raise InvalidRequest(
                f"debug_mode={debug_mode!r}: must be None, 'fewer_batch' or 'breakdown'"
            )
        new_tokens = integer("max_new_tokens", max_new_tokens, 0)
        run_tokens = new_tokens
        if cut_gen_len is not None:
            run_tokens = min(run_tokens, integer("cut_gen_len", cut_gen_len, 1))
        ends = () if stop is None else (_stop_id(stop, vocab_size),)
        SamplingParams(temperature=temperature, seed=seed)  # validates them
        rows = _rows(inputs)
        ids = pad_rows(rows, pad_id, left=True)
        given = None if attention_mask is None else _mask(attention_mask, ids)
        mask = prompt_mask(ids, given, pad_id)
        prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        _check_prompts(prompts, pad_id, vocab_size)
        if debug_mode == "fewer_batch":
            prompts, run_tokens = prompts[:block], min(run_tokens, _FEW_TOKENS)
        greedy = not do_sample or temperature == 0
        if seed is None:
            seed = 0 if greedy else int(torch.randint(2**53, ()))
        return cls(
            ids=ids,
            prompts=prompts,
            new_tokens=new_tokens,
            run_tokens=run_tokens,
            params=SamplingParams(
                max_tokens=run_tokens,
                temperature=0.0 if greedy else temperature,
                stop_token_ids=ends,
                ignore_eos=True,  # `stop` alone ends a row
                seed=seed,
            ),
            breakdown=debug_mode == "breakdown",
            verbose=integer("verbose", verbose, 0),
        )

    def joined(self, new: list[list[int]], pad_id: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return `[B, P + new_tokens]` int32: `ids`, the new ids of each row, then pads."""
        return append_rows(self.ids, new, pad_id, self.new_tokens).numpy().astype(np.int32)


def _rows(inputs: Any) -> list[list[int]]:
    """Return rows of ids from a 2-D array or tensor, or from a list of rows."""
    if isinstance(inputs, np.ndarray | Tensor):
        kind = inputs.dtype.kind if isinstance(inputs, np.ndarray) else _kind(inputs)
        if inputs.ndim != 2 or kind not in "iu":
            raise InvalidRequest(
                f"inputs is {inputs.dtype} {list(inputs.shape)}; it must be integers [batch, prompt_len]"
            )
    elif not isinstance(inputs, Sequence) or isinstance(inputs, str | bytes):
        raise InvalidRequest(
            f"inputs is {type(inputs).__name__}; it must be an array [batch, prompt_len] or a list of "
            "lists of ids"
        )
    if not len(inputs):
        raise InvalidRequest("inputs holds no row; at least one is needed")
    return [_row(f"inputs[{number}]", row) for number, row in enumerate(inputs)]


def _kind(tensor: Tensor) -> str:
    dense = tensor.layout == torch.strided and not tensor.is_meta
    floats = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    return "i" if dense and not floats else "f"


def _row(name: str, row: Any) -> list[int]:
    plain = isinstance(row, Sequence) and not isinstance(row, str | bytes)
    if not plain and getattr(row, "ndim", 0) != 1:
        raise InvalidRequest(f"{name}={row!r}: must be a list of ids")
    values = row.tolist() if hasattr(row, "tolist") else row
    ids = [integer(name, value, 0) for value in values]
    if not ids:
        raise InvalidRequest(f"{name} is empty: at least one id is needed")
    if max(ids) > _LARGEST_ID:
        raise InvalidRequest(f"{name} holds {max(ids)}, which is not an int32")
    return ids


def _mask(attention_mask: Any, ids: Tensor) -> Tensor:
    """Return `attention_mask` as a tensor; its shape must be that of `ids`, padded at the ends of rows."""
    try:
        mask = torch.as_tensor(
            attention_mask.detach()
            if isinstance(attention_mask, Tensor)
            else np.asarray(attention_mask)
        )
    except (TypeError, ValueError, RuntimeError):
        raise InvalidRequest(
            f"attention_mask={attention_mask!r}: must be 0 and 1, in the shape of inputs"
        ) from None
    check_padded(ids, mask, name="inputs")
    return mask


def _check_prompts(prompts: list[list[int]], pad_id: int, vocab_size: int) -> None:
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest(
                f"inputs[{row}] holds nothing but padding (id {pad_id}); where that is a token, say so with "
                "attention_mask"
            )
        if max(prompt) >= vocab_size:
            raise InvalidRequest(
                f"inputs[{row}] holds id {max(prompt)}, which is outside 0 to {vocab_size - 1}"
            )


def _stop_id(stop: Any, vocab_size: int) -> int:
    token_id = integer("stop", stop, 0)
    if token_id >= vocab_size:
        raise InvalidRequest(f"stop={token_id}: is outside 0 to {vocab_size - 1}")
    return token_id
