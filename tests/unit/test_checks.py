"""Checks of arguments: NumPy and torch scalars, and amounts of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from verbatim.common.checks import budget, memory_bytes
from verbatim.errors import InvalidRequest, OutOfBlocks
from verbatim.model.early_exit import EarlyExit
from verbatim.placement.distributed.choice import Cluster, PipelineParallel, TensorParallel
from verbatim.placement.offload.choice import Offload
from verbatim.placement.options import engine_options
from verbatim.serve.settings import ServeSettings

MAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "cluster": (Cluster, "stages micro_batches spares max_restarts patience_s step_timeout_s"),
    "tensor parallel": (TensorParallel, "size"),
    "pipeline parallel": (PipelineParallel, "size"),
    "offload": (Offload, "batch_size micro_batches attention_top_k"),
    "early exit": (EarlyExit, "layers"),
    "server": (ServeSettings, "max_requests max_choices idle_timeout_s"),
}


@pytest.mark.parametrize("case", MAKES)
@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2)], ids=["numpy", "torch"])
def test_settings_convert_numpy_and_torch_scalars_to_python_numbers(case: str, number: Any) -> None:
    make, names = MAKES[case]
    for name in names.split():
        of_seconds = name.endswith("_s")
        kept = getattr(make(**{name: np.float32(2) if of_seconds else number}), name)
        assert type(kept) is (float if of_seconds else int) and kept == 2


@pytest.mark.parametrize(
    ("value", "of_memory", "of_a_budget"),
    [
        (5000, 5000, 5000),
        (np.int64(7), 7, 7),
        ("1.5KiB", 1536, 1536),
        ("40%", 4000, "an amount such as"),
        ("101%", "at most 100%", "an amount such as"),
        ("0GB", "is 0 bytes; must be between 1 and 10000", 0),
        ("9" * 400 + "TB", "must be between 1 and 10000", "an amount such as"),
        *((odd, "must be bytes", "must be bytes") for odd in ("x", "5 QB", "", 2.5, True, None)),
    ],
)
def test_memory_amounts_are_parsed_or_rejected(
    value: Any, of_memory: int | str, of_a_budget: int | str
) -> None:
    for read, expected in (
        (partial(memory_bytes, total=10_000), of_memory),
        (partial(budget, "keep"), of_a_budget),
    ):
        if isinstance(expected, int):
            assert read(value) == expected
        else:
            with pytest.raises(InvalidRequest, match=expected):
                read(value)


def test_kv_memory_beside_recurrent_states_is_named_as_given() -> None:
    options = engine_options(kv_memory=10_000)
    with pytest.raises(
        OutOfBlocks, match=r"kv_memory of 10000 .* 3200 bytes, recurrent states 9000"
    ):
        options.num_blocks(100, None, 9000)
