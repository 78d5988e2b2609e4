"""Triton kernels compiled without a GPU: one binary serves every number of rows."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from support.programs import run_program

pytest.importorskip("triton", reason="Triton is not installed (torch brings it along on a GPU)")

EVERY_KERNEL = """_attend _finish _linear _rms_norm _rope_and_write _pick _masses _draw _activate
    _causal_conv _linear_recurrence"""


@pytest.mark.slow
def test_one_triton_binary_serves_every_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler chooses instructions by tile shapes, so another binary might give other bits."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    output = run_program("-m", "support.triton_compile", TRITON_CACHE_DIR=str(tmp_path))
    lines = [line.split() for line in output.splitlines()]
    numbers: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for label, kernel, number, *words in lines:
        assert "tf32" not in words, (kernel, words)
        if kernel == "_masses":
            assert "fma.rn.f64" not in words  # bit-identical to the CPU
        numbers[kernel][label].add(number)
    assert {*EVERY_KERNEL.split()} <= set(numbers)
    for kernel in ("_attend", "_finish", "_linear", "_causal_conv", "_linear_recurrence"):
        by_rows = [numbers[kernel][label] for label in ("1x1", "4x4", "77x3")]
        # One per dtype; of recurrences, one per kind; of attention, one per `kv_dtype`; of products, one
        # per tile height, with one matrix and with one per expert.
        assert len(by_rows[0]) == {"_attend": 6, "_linear": 8}.get(kernel, 2)
        assert by_rows[0] == by_rows[1] == by_rows[2], kernel
