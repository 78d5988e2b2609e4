"""Opens a model without the packages that transformers imports and no command uses.

`transformers.modeling_utils` imports torch's compiler, DTensor (with sympy) and scipy, and building a module
on the meta device imports the compiler and sympy again. Together they take longer than torch itself. A
command is a process of its own, so it may leave them out until one of their names is used.
"""

from __future__ import annotations

import builtins
import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

_MODELS = "transformers.modeling_layers"  # what every model of transformers imports

# What transformers imports from, for training and for tensors over several devices.
_DEFERRED = (
    "scipy.optimize",
    "torch._dynamo._trace_wrapped_higher_order_op",
    "torch.distributed._composable.fsdp",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor._utils",
    "torch.distributed.tensor.placement_types",
)

# What torch asks about sizes on the meta device, where no size is a symbol.
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
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

# Whether calls of deferred names are deferred too.
_importing = False


@contextmanager
def deferred_imports() -> Iterator[None]:
    """Import what opening a model needs, and none of these packages until the end of the block.

    In a process that has imported transformers' models already, and with VERBATIM_DEFER=0, nothing is.
    """
    if _MODELS in sys.modules or os.environ.get("VERBATIM_DEFER") == "0":
        yield
        return
    original = builtins.__import__
    compiler = _Compiler("torch._dynamo")
    deferred = set(_DEFERRED)

    def import_(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        importer = (globals or {}).get("__name__", "")
        if level == 0 and name not in sys.modules:
            if name == compiler.__name__ and importer in ("torch._compile", "torch.compiler"):
                return SimpleNamespace(_dynamo=compiler)
            if (
                name == _SYMBOLS
                and importer.startswith("torch")
                and _STATIC.keys() >= set(fromlist)
            ):
                return SimpleNamespace(**_STATIC)
            if name == "sympy" and importer == "torch._prims_common":
                return SimpleNamespace(Basic=())  # for isinstance: a type without instances
            if name in deferred and fromlist and importer.startswith("transformers."):
                return _Placeholder(name)
        module = original(name, globals, locals, fromlist, level)
        if importer == "transformers" and name == "utils.import_utils":
            _scan_once(module)
        return module

    collecting = gc.isenabled()
    builtins.__import__ = import_
    try:
        gc.disable()  # what is imported stays, and need not be looked through again and again
        try:
            if not _import_transformers(compiler):
                deferred.clear()
            importlib.import_module("verbatim.llm")
            gc.freeze()
        finally:
            if collecting:
                gc.enable()
        yield
    finally:
        builtins.__import__ = original


def _import_transformers(compiler: ModuleType) -> bool:
    """Import what transformers' models need; return whether that worked with what was deferred."""
    global _importing
    import torch

    decorators: Any = torch  # transformers reaches the compiler's as attributes
    decorators._dynamo = compiler
    _importing = True
    try:
        importlib.import_module(_MODELS)
        return True
    except Exception:  # it is imported again, with all that it asks for
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        return False
    finally:
        _importing = False
        if vars(torch).get("_dynamo") is compiler:
            del decorators._dynamo


def _scan_once(import_utils: Any) -> None:
    """Let transformers list the files of its models once; its `__init__` and that of `models` both do."""
    scan = getattr(import_utils, "create_import_structure_from_path", None)
    if scan is not None and not hasattr(scan, "__wrapped__"):
        cached = functools.cache(scan)

        @functools.wraps(scan)
        def scan_once(path: Any) -> Any:
            return cached(str(path).removesuffix("/__init__.py"))

        import_utils.create_import_structure_from_path = scan_once


class _Compiler(ModuleType):
    """The decorators of torch's compiler, which leave functions as they are."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("allow_in_graph", "assume_constant_result", "disable"):
            return getattr(importlib.import_module(self.__name__), name)

        def mark(function: Any = None, *_: Any, **__: Any) -> Any:
            return (lambda decorated: decorated) if function is None else function

        return mark


class _Placeholder(ModuleType):
    """A module whose names are deferred."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__
        return Deferred(module, lambda: getattr(importlib.import_module(module), name))


class Deferred:
    """A name of a module, or the result of a call of one, that is looked up when it is used."""

    def __init__(self, module: str, resolve: Callable[[], Any]) -> None:
        self._module = module
        self._resolve = resolve

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _importing:
            return Deferred(self._module, lambda: self._resolve()(*args, **kwargs))
        return self._resolve()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resolve(), name)

    def __instancecheck__(self, instance: Any) -> bool:
        # A class that has not been imported has no instances.
        return self._module in sys.modules and isinstance(instance, self._resolve())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._resolve(),)

    def __or__(self, other: Any) -> Any:  # of annotations
        return Any

    __ror__ = __or__
