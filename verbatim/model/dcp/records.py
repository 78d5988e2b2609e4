"""Safe unpickling of DCP's `.metadata` and of torch.save's tensor descriptions, without running code.

Nothing named in a pickle is imported or called: calls become `Record`s. Names, opcodes and dictionary key
types that these files don't use are refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from verbatim.errors import ModelError


class Record:
    """A call in a pickle: the name of the function or class, its arguments, and the state of the result."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: Any) -> None:
        self.name, self.args = name, args
        self.state: Any = None


# Names in `.metadata`. Those of path classes depend on the version of Python and the system.
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.3
METADATA = frozenset(
    f"{module}.{name}"
    for module, names in {
        "torch.distributed.checkpoint.metadata": (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "torch": ("Size",),
        _SHARDED: ("TensorProperties", "MEM_FORMAT_ENCODING"),
        "pathlib": _PATHS,
        "pathlib._local": _PATHS,
        # Some versions of Python (3.11.2) pickle an enum member as a call of getattr.
        "builtins": ("getattr",),
        "__builtin__": ("getattr",),
    }.items()
    for name in names
)
# Names in the description of a tensor.
TENSOR = frozenset(
    {
        *(f"torch._utils._rebuild_{name}" for name in ("tensor_v2", "tensor_v3", "parameter")),
        *(f"torch.{name}" for name in vars(torch) if name.endswith("Storage")),
        "torch.storage.UntypedStorage",
        "collections.OrderedDict",  # of hooks, always empty
    }
)


class _Opcodes(dict[int, Any]):
    def __missing__(self, code: int) -> NoReturn:
        raise ModelError("it has an opcode that is not allowed")


class _Unpickler(pickle._Unpickler):
    """A subclass of the pure-Python unpickler, which is three times slower than the C version, but safe.

    The C version can overflow its stack by hashing nested keys, and can be made to allocate a memo of a
    billion entries. Here memory is proportional to the file: an opcode creates at most one small object.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, allowed: frozenset[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if f"{module}.{name}" not in self._allowed:
            raise ModelError(
                f"it refers to {module[:80]}.{name[:80]}, which DCP does not need; nothing was "
                "executed"
            )
        return Record(f"{module}.{name}", None)

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def load_reduce(self) -> None:
        args, kind = self.stack.pop(), self.stack[-1]
        self.stack[-1] = Record(kind.name, args)

    def load_build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record) or record.args is None:
            raise ModelError("it sets the state of something other than an object")
        record.state = state

    def load_setitem(self) -> None:
        self._set([self.stack.pop(-2), self.stack.pop()])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        mapping = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(mapping) is not dict or not isinstance(key, str | Record):
                raise ModelError("it sets something other than a named item")
            mapping[key] = value

    # Opcodes of protocols 2 to 5 for strings, numbers, tuples, lists, dictionaries and objects.
    dispatch = _Opcodes(
        {
            getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
            for name in (
                "PROTO FRAME STOP MARK GLOBAL STACK_GLOBAL NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 "
                "LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 "
                "TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET "
                "BINPERSID"
            ).split()
        }
        | {
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_reduce,
            pickle.BUILD[0]: load_build,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
        }
    )


def unpickle(data: bytes, allowed: frozenset[str]) -> Any:
    """Read a pickle as strings, numbers, tuples, lists, dictionaries, dtypes and records.

    Args:
        allowed: the names that the pickle may refer to, besides those of torch's dtypes.

    Raises:
        ModelError: the pickle has a name, opcode or key that is not allowed.
        Exception: any type, if the pickle is damaged.
    """
    return _Unpickler(data, allowed).load()
