"""The storyteller: the small model inside the package.

`path()` returns its Hugging Face model folder; see `docs/storyteller.md`. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the folder with the storyteller's config, weights (bfloat16) and tokenizer."""
    return Path(__file__).resolve().parent
