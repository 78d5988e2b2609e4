"""Reading of DCP's `.metadata` pickles without running code from them.

Classes become records of their state, without behaviour; classes and opcodes that DCP does not use are
refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from verbatim.errors import ModelError
from verbatim.untrusted import reason

MOST_DIMENSIONS = 64  # of a tensor; also numpy's limit
_MOST_ARGUMENTS = 64


class PickledObject:
    """The replacement of a class in the pickle. Its state is unchecked."""

    __slots__ = ("state",)
    state: Any

    def __new__(cls, *args: Any) -> PickledObject:
        if len(args) > _MOST_ARGUMENTS:  # copied for each call, so a small file could take hours
            raise ModelError(f"it makes a {cls.__name__} of {len(args)} arguments")
        made = super().__new__(cls)
        made.state = None
        return made


class _Size(tuple[Any, ...]):
    """torch.Size. The reader checks its elements."""

    __slots__ = ()

    def __new__(cls, dimensions: Any) -> _Size:
        if type(dimensions) is not tuple or len(dimensions) > MOST_DIMENSIONS:
            raise ModelError("it makes a torch.Size of something else than a few numbers")
        return super().__new__(cls, dimensions)


class _Member(PickledObject):
    """A member of an enum, which some Pythons (3.11.2) pickle as a getattr; no other getattr is allowed."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> _Member:
        kind, name = args if len(args) == 2 else (None, None)
        if kind not in _ENUMS or type(name) is not str:
            raise ModelError(
                "it asks for builtins.getattr of something else than an enum, which DCP has no need of; "
                "nothing was run"
            )
        made = super().__new__(cls, *args)
        assert isinstance(made, _Member)
        return made


def record(name: str) -> type[PickledObject]:
    """Return a record class, the replacement of the class of this name."""
    return type(name, (PickledObject,), {"__slots__": ()})


_ALLOWED: dict[tuple[str, str], Any] = {
    (module, name): record(name)
    for module, names in {
        "torch.distributed.checkpoint.metadata": (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        # Their module before torch 2.3.
        "torch.distributed._shard.sharded_tensor.metadata": (
            "TensorProperties",
            "MEM_FORMAT_ENCODING",
        ),
        # The class of the saved folder's path, by Python version and system.
        "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
        "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    }.items()
    for name in names
}
_ENUMS = [kind for (_, name), kind in _ALLOWED.items() if name.endswith("MEM_FORMAT_ENCODING")]
_ALLOWED["torch", "Size"] = _Size
_ALLOWED["builtins", "getattr"] = _ALLOWED["__builtin__", "getattr"] = (
    _Member  # the latter in protocol 2
)
_ALLOWED |= {("torch", n): d for n, d in vars(torch).items() if isinstance(d, torch.dtype)}


class Unpickler(pickle._Unpickler):
    """Python's unpickler in Python, three times slower than the one in C.

    The C one can overflow its stack by hashing nested keys, and allocates memos of a billion entries.
    The memory of this one is proportional to the file: each opcode in `dispatch` creates at most one
    small object.
    """

    allowed: ClassVar[dict[tuple[str, str], Any]] = _ALLOWED

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.allowed[module, name]
        except KeyError:
            raise ModelError(
                f"it asks for {module[:80]}.{name[:80]}, which DCP has no need of; nothing was run"
            ) from None

    def load_build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, PickledObject):
            raise ModelError(f"it gives a state to a {type(record).__name__}")
        record.state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        mapping = self.stack[-1]
        if type(mapping) is not dict:
            raise ModelError(f"it sets an item of a {type(mapping).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str and not isinstance(key, PickledObject):
                raise ModelError("the key of a dictionary is neither a string nor a record")
            mapping[key] = value


class _Opcodes(dict[int, Any]):
    def __missing__(self, code: int) -> NoReturn:
        raise ModelError("it has an opcode that DCP has no need of")


# Opcodes of protocols 2 to 5 for strings, numbers, tuples, lists, dictionaries and objects.
_NAMES = (
    "PROTO FRAME STOP MARK GLOBAL STACK_GLOBAL NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT REDUCE NEWOBJ BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET"
)
Unpickler.dispatch = _Opcodes(
    {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in _NAMES.split()
    }
    | {
        pickle.BUILD[0]: Unpickler.load_build,
        pickle.SETITEM[0]: Unpickler.load_setitem,
        pickle.SETITEMS[0]: Unpickler.load_setitems,
    }
)


def read_records(path: Path) -> Any:
    """Read a `.metadata` as strings, numbers, tuples, lists, dictionaries, dtypes and records.

    Args:
        path: the file.

    Raises:
        ModelError: it can't be read, or is not DCP's.
    """
    try:
        with open(path, "rb") as file:
            return Unpickler(file).load()
    except ModelError as error:
        raise ModelError(f"{path} is refused: {error}") from None
    except Exception as error:  # a damaged pickle leads to arbitrary exceptions
        raise ModelError(f"{path} can't be read: {reason(error)}") from None
