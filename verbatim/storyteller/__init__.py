"""The storyteller: the small model that ships inside the package.

`path()` is a Hugging Face model folder; see `docs/storyteller.md`. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """The folder with the storyteller's config, weights (bfloat16) and tokenizer."""
    return Path(__file__).resolve().parent
