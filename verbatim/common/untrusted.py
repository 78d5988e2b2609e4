"""Checks of a checkpoint's files before transformers reads them: a checkpoint is data, not code.

Errors never quote a file's contents, as a name or a link may lead to a file outside the checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from torch import Tensor, nn

from verbatim.errors import ModelError, NotSupported

MAX_LAYERS = 4096  # of any kind; the deepest known models have about 200
MAX_PARTS = 65_536  # heads, experts and groups of a layer
_MAX_WEIGHTS_PER_BYTE = 8  # one bit per weight
_LAYERS = re.compile(
    r"^(num|n)_(\w+_)?layers?$|^(encoder|decoder)_layers$|^depth$|^mtp_num_layers$"
)
_PARTS = re.compile(r"^(num|n)_\w*(heads?|experts?|groups?|blocks?|codebooks)$")
_IMPLEMENTATIONS = re.compile(r"^_?(attn|experts)_implementation(_internal)?$")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024  # Git LFS's own limit


def reason(error: BaseException) -> str:
    """Describe why a file can't be read, without quoting its contents as a parser's message might."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON (line {error.lineno}, column {error.colno})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else type(error).__name__


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise ModelError if the file is unreadable, or holds another type."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} can't be read: {reason(error)}") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} can't be read: it holds a {type(parsed).__name__}, not an object")
    return parsed


def check_stored(path: Path) -> None:
    """Raise ModelError if `path` is a pipe, or a Git LFS pointer: the file itself was not fetched."""
    if path.is_fifo():  # opening it would wait for a writer
        raise ModelError(f"{path} is a pipe; must be a file")
    if not path.is_file() or path.stat().st_size > _MAX_POINTER_BYTES:
        return
    with suppress(OSError), path.open("rb") as file:  # reported where the file is needed
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelError(
                f"{path} is a Git LFS pointer, not the file that it stands for; fetch it: git lfs pull"
            )


def shards_of(index: Path) -> list[str]:
    """Return the file names in a weight index; raise ModelError if it is unreadable or leads elsewhere."""
    weight_map = read_json(index).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{index} can't be read: its weight_map names no files")
    check_names(index, names)
    return sorted(names)


def check_names(file: Path, names: Iterable[str]) -> None:
    """Raise ModelError if a name that `file` lists is absolute or contains "..".

    Links in the folder may lead anywhere, as in the hub's cache: only the folder's owner can create them.
    """
    for name in names:
        for kind in (PurePosixPath(name), PureWindowsPath(name)):
            if kind.anchor or ".." in kind.parts or "\0" in name:
                raise ModelError(
                    f"{file} is refused: it names {name[:200]!r}, outside of its folder"
                )


def check_tokenizer(folder: Path) -> None:
    """Raise ModelError if tokenizer_config.json can't be read, or names files outside its folder."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    for key, value in read_json(path).items():
        # Old configs contain a path on the author's machine to special_tokens_map.json, which is not read.
        if key.endswith(("_file", "_files")) and key != "special_tokens_map_file":
            values = value.values() if isinstance(value, dict) else value
            names = [value] if isinstance(value, str) else values
            if isinstance(names, Iterable):
                check_names(path, [name for name in names if isinstance(name, str)])


def check_config(source: str, config: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Refuse a config, as plain data, that would load code or build a model of absurd size.

    Raises:
        NotSupported: the config names a kernel in a hub repository.
        ModelError: a number of layers or parts out of range, weights outside the config's folder, or a
            `quantization_config` that is not an object.
    """
    for key, value in _fields(config):
        if _IMPLEMENTATIONS.match(key):
            names = value.values() if isinstance(value, dict) else [value]
            for name in names:
                if isinstance(name, str) and "/" in name and not trust_remote_code:
                    raise NotSupported(
                        f"{source}: config.json: {key}={name[:200]!r} is code of a hub repository, which "
                        "is not loaded; remove the field"
                    )
        elif key == "transformers_weights" and value is not None:
            if not isinstance(value, str):
                raise ModelError(
                    f"{source}: config.json: {key}={str(value)[:80]!r}: must be the name of a file"
                )
            check_names(Path(source) / "config.json", [value])
        elif key == "quantization_config" and not isinstance(value, Mapping | None):
            raise ModelError(f"{source}: config.json: {key}={str(value)[:80]!r}: must be an object")
        elif isinstance(value, int) and not isinstance(value, bool):
            limit = MAX_LAYERS if _LAYERS.match(key) else MAX_PARTS if _PARTS.match(key) else None
            if limit is not None and not 0 <= value <= limit:
                raise ModelError(f"{source}: config.json: {key}={value}: must be from 0 to {limit}")


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of every field of nested objects."""
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, Mapping):
            yield from ((str(key), inner) for key, inner in top.items())
            stack += top.values()
        elif isinstance(top, list):
            stack += top


def resolve_implementations(config: Any) -> None:
    """Reset a transformers config's implementations of attention and experts, which may load code."""
    for part in parts_of(config):
        part._attn_implementation = part._experts_implementation = None


def parts_of(config: Any) -> list[Any]:
    """Return a transformers config and its sub-configs."""
    inner = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(part for part in inner if part is not None)]


def check_size(source: object, module: nn.Module, nbytes: int) -> None:
    """Raise ModelError if a model on the meta device is far larger than its checkpoint of `nbytes` bytes."""
    number = sum(math.prod(p.shape) for p in module.parameters())
    if number > _MAX_WEIGHTS_PER_BYTE * nbytes:
        raise ModelError(
            f"{source}: config.json describes {number:,} weights, but the checkpoint has "
            f"{nbytes:,} bytes"
        )


def check_dtypes(source: object, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError for integer, boolean and complex tensors that transformers would convert to weights.

    `tensors` are the checkpoint's tensors, dequantized.
    """
    non_float_dtypes = {name: x.dtype for name, x in tensors.items() if not x.is_floating_point()}
    names = [f".{name}" for name, p in module.named_parameters() if p.is_floating_point()]
    for name, dtype in non_float_dtypes.items():
        # Names may differ by a prefix. Those of experts differ by more, as experts are stacked.
        suffix = f".{name}"
        if ".experts." in name or any(n.endswith(suffix) or suffix.endswith(n) for n in names):
            raise ModelError(
                f"{source}: {name} is {dtype}: weights must be floating-point numbers, as config.json "
                "declares no quantization"
            )
