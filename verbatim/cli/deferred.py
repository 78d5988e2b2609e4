"""Speeds up opening a model, by not importing packages that transformers imports and commands do not use.

`transformers.modeling_utils` imports torch's compiler, DTensor (with sympy) and scipy, and building a module
on the meta device imports the compiler and sympy again. Together they take longer than torch itself. A
command has its own process, so it can run as if they were not installed.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

_MODELS = "transformers.modeling_layers"  # imported by every model of transformers

# Packages that transformers imports if they are installed, for training and for formats that
# verbatim/weights/ reads itself. torchao also warns on stderr about libraries that it can't load.
_OPTIONAL = ("accelerate", "scipy", "sklearn", "torchao")

_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
_DTENSOR = "torch.distributed.tensor"
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"

# torch's functions on symbolic sizes, for the meta device, on which no size is symbolic.
_STATIC: dict[str, Callable[..., Any]] = {
    "expect_true": bool,
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "guarding_hint_or_throw": lambda size: size,
    "has_guarding_hint": lambda size: True,
    "is_nested_int": lambda size: False,
    "statically_known_true": bool,
    "sym_and": lambda *conditions: all(conditions),
    "sym_eq": lambda sizes, others: list(sizes) == list(others),
    "sym_or": lambda *conditions: any(conditions),
}


@contextmanager
def deferred_imports() -> Iterator[None]:
    """Import the modules that opening a model needs, and block the unused packages during the block.

    Does nothing if transformers is imported already, or with VERBATIM_DEFER=0.
    """
    if "transformers" in sys.modules or os.environ.get("VERBATIM_DEFER") == "0":
        yield
        return
    original = builtins.__import__

    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        importer = (globals or {}).get("__name__", "")
        if level == 0 and name not in sys.modules:
            if stub := _substitute(name, importer, fromlist or ()):
                return stub
        module = original(name, globals, locals, fromlist, level)
        if name == "utils.import_utils" and importer == "transformers":
            _patch_all_parser(module)
        return module

    builtins.__import__ = import_
    try:
        gc.disable()  # imported objects stay, so repeated collections would be wasted
        try:
            _import_models()
            importlib.import_module("verbatim.api.llm")
            gc.freeze()
        finally:
            gc.enable()
        yield
    finally:
        builtins.__import__ = original
        if isinstance(sys.modules.get(_DTENSOR), SimpleNamespace):
            del sys.modules[_DTENSOR]


def _substitute(name: str, importer: str, names: tuple[str, ...]) -> SimpleNamespace | None:
    """Return the substitute for a module in an import statement; None to import the module."""
    if name == _COMPILER.__name__ and importer in ("torch._compile", "torch.compiler"):
        return SimpleNamespace(_dynamo=_COMPILER)
    if name == _MASKS and importer.startswith("transformers."):
        return SimpleNamespace(**{each: _lazy_function(name, each) for each in names})
    if name == _SYMBOLS and importer.startswith("torch") and _STATIC.keys() >= set(names):
        return SimpleNamespace(**_STATIC)
    if name == _DTENSOR and importer == "transformers.core_model_loading":
        # torch checks tensors of any subclass for DTensor, which it looks up in `sys.modules`.
        sys.modules[name] = SimpleNamespace(DTensor=type("DTensor", (), {}))  # type: ignore[assignment]
    if name == "sympy" and importer == "torch._prims_common":
        return SimpleNamespace(Basic=())  # for isinstance: a type without instances
    return None


def _patch_all_parser(module: Any) -> None:
    """Make transformers look for `__all__` only at the end of each of its 3,400 files, not line by line."""
    if names_of := getattr(module, "fetch__all__", None):
        module.fetch__all__ = lambda text: names_of(text[text.rfind("\n__all__") + 1 :])


def _lazy_function(module: str, name: str) -> Callable[..., Any]:
    """Return a function that, when called, imports `module` and calls its function `name`."""
    return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)


def _import_models() -> None:
    """Import the base of transformers' models, as if torch.distributed and `_OPTIONAL` were missing."""
    import torch

    missing: Any = {name: None for name in _OPTIONAL if name not in sys.modules}
    is_available = torch.distributed.is_available
    try:
        sys.modules |= missing
        torch.distributed.is_available = lambda: False
        vars(torch)["_dynamo"] = _COMPILER  # transformers also uses its decorators as attributes
        importlib.import_module(_MODELS)
    finally:
        vars(torch).pop("_dynamo")  # from here on torch imports the real module
        torch.distributed.is_available = is_available
        for name in missing:
            del sys.modules[name]


class _Compiler(ModuleType):
    """Stand-in for torch's compiler: its decorators return functions unchanged."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("allow_in_graph", "assume_constant_result", "disable"):
            return getattr(importlib.import_module(self.__name__), name)

        def mark(function: Any = None, *_: Any, **__: Any) -> Any:
            return (lambda decorated: decorated) if function is None else function

        return mark


_COMPILER = _Compiler("torch._dynamo")
