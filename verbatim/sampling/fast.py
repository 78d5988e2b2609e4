"""The compiled samplers of the CPU (`kernels/sampling.cpp`) and of a GPU (`kernels/triton/sampling.py`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from verbatim.batch import Draw, SampleRow, Support
from verbatim.kernels.functions import run
from verbatim.params import SamplingParams
from verbatim.sampling.processors import edit, is_edited


class _Row(ctypes.Structure):
    """`vb::SampleRow`; must match it field for field."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("logits_row", ctypes.c_int64),
        ("edited", ctypes.c_void_p),
        ("target", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("sample_index", ctypes.c_uint32),
        ("position", ctypes.c_uint32),
        ("num_top", ctypes.c_int32),
        ("id", ctypes.c_int32),
        ("logprob", ctypes.c_float),
        ("sampled_logprob", ctypes.c_float),
        ("found_top", ctypes.c_int32),
    )


def supports(row: SampleRow) -> bool:
    """Return whether the kernel supports a row: anything but the typical filter and beams."""
    return not row.num_candidates and (row.target is not None or row.params.typical_p == 1)


def sample_rows(logits: Tensor, rows: list[SampleRow], logits_rows: list[int]) -> list[Draw]:
    """Draw supported rows on the CPU, row i from `logits[logits_rows[i]]` of `[R, V]`."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = len(rows), logits.shape[1]
    edited: list[Tensor] = []  # keeps the tensors alive until the kernel has read them
    specs = (_Row * num_rows)()
    for spec, row, logits_row in zip(specs, rows, logits_rows, strict=True):
        spec.logits_row = logits_row
        _fill(spec, row, logits[logits_row], edited)
    width = max((spec.num_top for spec in specs), default=0)
    top_ids = torch.empty(num_rows, width, dtype=torch.int32)
    top_logprobs = torch.empty(num_rows, width, dtype=torch.float32)
    run(
        "vb_sample_rows",
        None,
        logits.data_ptr(),
        logits.dtype == torch.bfloat16,
        logits.stride(0),
        *(num_rows, vocab_size),
        specs,
        *(top_ids.data_ptr(), top_logprobs.data_ptr(), width),
        max(1, min(torch.get_num_threads(), num_rows)),
    )
    tops = zip(specs, top_ids.tolist(), top_logprobs.tolist(), strict=True)
    return [
        Draw(
            spec.id,
            spec.logprob,
            spec.sampled_logprob,
            ids[: spec.found_top],
            values[: spec.found_top],
        )
        for spec, ids, values in tops
    ]


def _fill(spec: _Row, row: SampleRow, raw: Tensor, edited: list[Tensor]) -> None:
    """Set the fields for a row with logits `raw` of any dtype; append edited logits to `edited`."""
    params, vocab_size = row.params, raw.shape[0]
    spec.target = -1 if row.target is None else row.target
    spec.num_top = min(row.num_logprobs, vocab_size)
    if row.target is not None:
        return
    spec.seed, spec.sample_index, spec.position = row.seed, row.sample_index, row.position
    spec.temperature = params.temperature
    spec.top_k = params.top_k if params.top_k < vocab_size else 0
    spec.top_p, spec.min_p = params.top_p, params.min_p
    changed = edit(raw, row)
    if changed is not raw:
        edited.append(changed)
        spec.edited = changed.data_ptr()


def specs_of_chain(rows: list[SampleRow], vocab_size: int) -> ctypes.Array[_Row] | None:
    """Return the kernel's rows for drawing several tokens in sequence (`WholeModel.chain`).

    None if a row is not supported, or has penalties, biases, bans or a structure.
    """
    specs, raw = (_Row * len(rows))(), torch.empty(vocab_size, device="meta")
    for spec, row in zip(specs, rows, strict=True):
        if not supports(row) or is_edited(row):
            return None
        _fill(spec, row, raw, [])
    return specs


def support(logits: Tensor, params: SamplingParams) -> Support:
    """Return the support of float32 logits `[V]`, already divided by the temperature."""
    vocab_size = logits.shape[0]
    top_k = params.top_k if params.top_k < vocab_size else 0
    spec = _Row(top_k=top_k, top_p=params.top_p, min_p=params.min_p)
    ids = torch.empty(vocab_size + 32, dtype=torch.int32)  # the kernel writes past the last id
    log_mass = ctypes.c_double()
    logits = logits.contiguous()
    at = ctypes.byref(spec), ids.data_ptr(), ctypes.byref(log_mass)
    count = run("vb_support", None, logits.data_ptr(), vocab_size, *at)
    return Support(None, 0.0) if count < 0 else Support(ids[:count].tolist(), log_mass.value)


def gpu_supports(row: SampleRow) -> bool:
    """Return whether the GPU's sampler supports a row: only with a temperature and nothing else."""
    if row.num_candidates or row.num_logprobs:
        return False
    if row.target is not None:
        return True
    params = row.params
    plain = not params.top_k and params.top_p >= 1 and params.min_p <= 0 and params.typical_p >= 1
    return plain and row.processed is None and not is_edited(row)


def gpu_sample_rows(
    logits: Tensor, rows: list[SampleRow], logits_rows: list[int]
) -> list[Draw | None]:
    """Draw supported rows on a GPU; None for rows that the CPU must draw, about one in several 100,000."""
    from verbatim.kernels.triton.sampling import draw

    seeds = [row.seed - (row.seed >> 63 << 64) for row in rows]  # as int64
    columns = draw(
        logits,
        torch.tensor(logits_rows),
        torch.tensor(seeds),
        torch.tensor([row.position for row in rows]),
        torch.tensor([row.sample_index for row in rows]),
        torch.tensor([row.params.temperature for row in rows], dtype=torch.float32),
        torch.tensor([-1 if row.target is None else row.target for row in rows]),
    )
    return [
        Draw(token_id, logprob, sampled_logprob, [], []) if exact else None
        for exact, token_id, logprob, sampled_logprob in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]
