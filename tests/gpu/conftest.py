"""Marks all tests of this folder as GPU tests, and skips them if there is no GPU."""

from __future__ import annotations

import pytest
import torch

_WHY = f"no GPU: torch {torch.__version__} sees none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=_WHY))
