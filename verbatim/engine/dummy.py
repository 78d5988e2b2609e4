"""A batch for forwards without requests."""

from __future__ import annotations

import torch

from verbatim.batch import SCRATCH_BLOCK, Batch


def dummy_batch() -> Batch:
    """The smallest batch there is: one row of a sequence that lives in the scratch block."""
    return Batch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.ones(1, dtype=torch.int32),
        block_tables=torch.full((1, 1), SCRATCH_BLOCK, dtype=torch.int32),
        logit_rows=torch.zeros(1, dtype=torch.int64),
    )
