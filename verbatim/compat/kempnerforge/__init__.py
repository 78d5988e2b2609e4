"""KempnerForge's `generate`, `sample` and `KVCache` on Verbatim's engine.

See docs/coming-from/kempnerforge.md; the command is `python -m verbatim.compat.kempnerforge`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verbatim.compat.kempnerforge.generation import KVCache, generate, sample

__all__ = ["KVCache", "generate", "sample"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command's --help does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.generation"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
