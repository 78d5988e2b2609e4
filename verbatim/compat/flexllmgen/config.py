"""`OptConfig`, `get_opt_config`, and the search for a model by name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.common.checks import check_kind
from verbatim.errors import InvalidRequest, ModelError, NotSupported

# Layers, heads and width of each OPT (Zhang et al. 2022, table 1) and of Galactica 30B.
_SHAPES = {
    "opt-125m": (12, 12, 768),
    "opt-350m": (24, 16, 1024),
    "opt-1.3b": (24, 32, 2048),
    "opt-2.7b": (32, 32, 2560),
    "opt-6.7b": (32, 32, 4096),
    "opt-13b": (40, 40, 5120),
    "opt-30b": (48, 56, 7168),
    "opt-66b": (64, 72, 9216),
    "opt-175b": (96, 96, 12288),
    "galactica-30b": (48, 56, 7168),
}
_GALACTICA_VOCAB = 50_000
# transformers' names of the OptConfig fields. A model's name implies only `_IMPLIED_BY_NAME`: fine-tuning
# can change the vocabulary.
_FIELDS = {
    "num_hidden_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "n_head": "num_attention_heads",
    "ffn_embed_dim": "ffn_dim",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
_IMPLIED_BY_NAME = ("num_hidden_layers", "hidden_size", "n_head")


@dataclass(frozen=True)
class OptConfig:
    """The shape of an OPT model, which must match the checkpoint's.

    Attributes:
        pad_token_id: id that pads `inputs` on the left, and a row after its stop.
    """

    name: str = "opt-125m"
    num_hidden_layers: int = 12
    max_seq_len: int = 2048
    hidden_size: int = 768
    n_head: int = 12
    ffn_embed_dim: int = 3072
    vocab_size: int = 50_272
    pad_token_id: int = 1

    @property
    def input_dim(self) -> int:
        """Alias of `hidden_size`."""
        return self.hidden_size

    def model_bytes(self) -> int:
        """Return the size of the weights in bytes: 16 bits per weight, LM head tied to the embedding."""
        width, hidden = self.hidden_size, self.ffn_embed_dim
        layer = 4 * width * (width + 1) + 2 * width * hidden + hidden + width + 4 * width
        embeddings = (self.vocab_size + self.max_seq_len + 2) * width
        return 2 * (self.num_hidden_layers * layer + embeddings + 2 * width)

    def cache_bytes(self, batch_size: int, seq_len: int) -> int:
        """Return the size of K and V in bytes, in 16 bits."""
        return 2 * self.num_hidden_layers * self.hidden_bytes(batch_size, seq_len)

    def hidden_bytes(self, batch_size: int, seq_len: int) -> int:
        """Return the size of one layer's output in bytes, in 16 bits."""
        return 2 * batch_size * seq_len * self.hidden_size


def get_opt_config(name: str, **kwargs: Any) -> OptConfig:
    """Return the config of an OPT by its name, such as "facebook/opt-30b"; `kwargs` override its fields.

    Raises:
        InvalidRequest: an unknown name; other models need no config.
    """
    check_kind("name", name, str, "a string")
    config = config_by_name(name, **kwargs)
    if config is None:
        raise InvalidRequest(f"there is no OPT model {name!r}; known are {', '.join(_SHAPES)}")
    return config


def config_by_name(name: str, **kwargs: Any) -> OptConfig | None:
    """Return the config of an OPT by its name; None for other models."""
    short = name.rsplit("/", 1)[-1].lower()
    shape = _SHAPES.get(short.replace("-iml-max", "").replace("-iml", ""))
    if shape is None:
        return None
    layers, heads, width = shape
    fields = {"num_hidden_layers": layers, "n_head": heads, "hidden_size": width}
    fields |= {"ffn_embed_dim": 4 * width}
    if short == "galactica-30b":
        fields["vocab_size"] = _GALACTICA_VOCAB
    return OptConfig(**{"name": short, **fields, **kwargs})


def find_model(config: OptConfig | str | os.PathLike[str], path: Any) -> str:
    """Return the folder or the hub id of a model.

    Args:
        config: a folder, a hub id, the name of an OPT, or a config with such a name.
        path: the model's folder, or its parent; or None.

    Raises:
        InvalidRequest: `path` is invalid or would not be used.
        NotSupported: a folder of FlexLLMGen's numpy files, or its dummy weights.
        ModelError: the folder does not exist.
    """
    name = config.name if isinstance(config, OptConfig) else os.path.expanduser(config)
    if not name:
        raise InvalidRequest("config='': must be a model's folder, hub id or name")
    if path is None:
        return name if os.path.isdir(name) else _hub_id(name)
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidRequest(f"path={path!r}: must be the path of a folder, or None")
    if "_DUMMY_" in os.fspath(path):
        raise NotSupported(f"path={path!r}: dummy weights are not supported; give a model's folder")
    root, short = Path(os.path.expanduser(path)), name.rstrip("/").rsplit("/", 1)[-1]
    # Joining an absolute name would drop the root.
    for folder in (root / name.lstrip("/"), root / short, root):
        if (folder / "config.json").is_file():
            return str(folder)
    if (root / f"{short}-np").is_dir():
        raise NotSupported(
            f"{root / f'{short}-np'} holds numpy files of FlexLLMGen; weights are read from the "
            "checkpoint itself, as save_pretrained writes it"
        )
    if os.path.isdir(name):
        raise InvalidRequest(f"path={path!r} is not used: config={name!r} is a folder itself")
    if not root.exists() and "/" not in name and config_by_name(name) is None:
        raise ModelError(f"no model {name!r} in {root}, which doesn't exist")
    return _hub_id(name)


def check_config(config: OptConfig, model_config: Any, *, by_name: bool) -> None:
    """Raise InvalidRequest unless the model, with this transformers config, has the shape of `config`.

    `by_name`: `config` comes from a name, and only the fields implied by the name are compared.
    """
    for name in _IMPLIED_BY_NAME if by_name else _FIELDS:
        expected, actual = getattr(config, name), getattr(model_config, _FIELDS[name], None)
        if expected != actual:
            raise InvalidRequest(
                f"{config.name} has {name}={expected}, but the model found has {actual}"
            )


def _hub_id(name: str) -> str:
    return f"facebook/{name}" if "/" not in name and config_by_name(name) else name
