"""Adapters: the documented calls of other systems, on Verbatim's engine.

An adapter only translates arguments and results: a test verifies that it has no loop over tokens and calls no
model. Its names can also be imported by the original's module paths, so that changing the top-level name is
enough: `from verbatim.compat.coati.models.generation import generate`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# Module paths of the originals. Each module exports all public names of its adapter.
_PATHS = {
    "coati": ("models.generation",),
    "flexllmgen": ("compression", "flex_opt", "opt_config", "pytorch_backend", "utils"),
    "kempnerforge": ("model.attention", "model.generate"),
    "megatron": (
        "core.inference.async_stream",
        "core.inference.common_inference_params",
        "core.inference.contexts.dynamic_context",
        "core.inference.inference_request",
        "core.inference.model_inference_wrappers.abstract_model_inference_wrapper",
        "core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper",
        "core.inference.sampling_params",
        "core.inference.text_generation_controllers.text_generation_controller",
    ),
    "petals": (
        "client.inference_session",
        "client.remote_generation",
        "models.bloom",
        "models.falcon",
        "models.llama",
        "models.mixtral",
        "utils.auto_config",
    ),
}


class _OriginalPaths:
    """Import hook for the modules of `_PATHS` and their packages, which are filled on first import."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        adapter, _, rest = name.removeprefix(f"{__name__}.").partition(".")
        known = rest and any(f"{p}.".startswith(f"{rest}.") for p in _PATHS.get(adapter, ()))
        return ModuleSpec(name, self, is_package=True) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, to create an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        adapter = importlib.import_module(".".join(module.__name__.split(".")[:3]))
        names: Sequence[str] = adapter.__all__
        vars(module).update({name: getattr(adapter, name) for name in names}, __all__=names)


sys.meta_path.append(_OriginalPaths())
