"""Numbers of numpy and torch that are given for Python's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from verbatim.model.early_exit import EarlyExit
from verbatim.placement.distributed.choice import Cluster, PipelineParallel, TensorParallel
from verbatim.placement.offload.choice import Offload
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
def test_settings_keep_numbers_as_those_of_python(case: str, number: Any) -> None:
    make, names = MAKES[case]
    for name in names.split():
        of_seconds = name.endswith("_s")
        kept = getattr(make(**{name: np.float32(2) if of_seconds else number}), name)
        assert type(kept) is (float if of_seconds else int) and kept == 2
