"""Opening of a DCP checkpoint: a module is built from a config, and each parameter gets its lazy weight.

A DCP folder has no config, so `config=` is required: KempnerForge's TOML or a transformers config.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from verbatim.errors import InvalidRequest, ModelError, NotSupported, first_line
from verbatim.model.dcp.filling import Destination, checked_pieces, pieces_by_name, stored_dtype
from verbatim.model.dcp.folder import DcpCheckpoint
from verbatim.model.kempner.config import KempnerConfig
from verbatim.model.kempner.config import ModelConfig as KempnerModel
from verbatim.model.loader import (
    HUB_ID,
    LoadedModel,
    auto_class,
    building,
    read_config,
    resolve_dtype,
)
from verbatim.model.unused import mtp_names
from verbatim.untrusted import check_size
from verbatim.weights.dcp import leave_there
from verbatim.weights.lazy import LazyWeight

ALLOWED = (
    "a KempnerForge TOML (a path that ends in .toml), a transformers config, or the folder, "
    "config.json or hub id of one"
)


def load_dcp(
    folder: Path,
    config: Any,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    with_config: bool = False,
) -> LoadedModel:
    """Open a DCP checkpoint with lazy weights.

    Args:
        folder: the result of `find_dcp`.
        config: the config of the checkpoint's model.
        tokenizer: a transformers tokenizer; None takes that of KempnerForge's TOML, if any; False: none.
        dtype: "auto" is the dtype of most stored weights (float16: bfloat16).
        revision: revision of the config, if it is a hub id.
        trust_remote_code: run the checkpoint's Python code.
        with_config: return the config as plain data, too, for another process.

    Raises:
        InvalidRequest: a missing or invalid config.
        ModelError: the checkpoint is damaged, or does not fit the config.
        UnsupportedModel: an unsupported architecture.
        NotSupported: a module with parameters that share memory; `with_config`, a config of a foreign class.
    """
    where = {"trust_remote_code": trust_remote_code, "revision": revision}
    builder = _ModuleBuilder.of(folder, config, where)
    if builder.kempner is not None and tokenizer is None and builder.kempner.tokenizer_path:
        from verbatim.text.tokenizer import Tokenizer

        path = builder.kempner.tokenizer_path
        tokenizer = Tokenizer.open(path, trust_remote_code=trust_remote_code).hf
    checkpoint = DcpCheckpoint(folder)
    resolved = resolve_dtype(dtype, SimpleNamespace(dtype=builder.dtype(checkpoint)))
    module, lazy_weights = builder.skeleton(checkpoint, resolved)
    if builder.kempner is not None and tokenizer:
        module.generation_config.eos_token_id = tokenizer.eos_token_id
    return LoadedModel(
        module,
        tokenizer or None,
        module.generation_config,
        str(folder),
        lazy_weights=lazy_weights,
        folder=folder,
        config=builder.as_dict() if with_config else None,
    )


def config_from_dict(plain: Mapping[str, Any]) -> Any:
    """Return `load_dcp`'s `config` from a `LoadedModel.config`."""
    from transformers import CONFIG_MAPPING

    if "kempner" in plain:
        return KempnerConfig(KempnerModel(**plain["kempner"]))
    fields = dict(plain["transformers"])
    return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)


class _ModuleBuilder:
    """Builds the module of a config, and assigns a checkpoint's tensors to it."""

    def __init__(
        self, config: Any, kempner: KempnerConfig | None, trust: bool, generation: Any = None
    ) -> None:
        self.config = config
        self.kempner = kempner
        self._trust = trust
        self._generation = generation

    @classmethod
    def of(cls, folder: Path, config: Any, where: dict[str, Any]) -> _ModuleBuilder:
        from transformers import PretrainedConfig

        trust = bool(where["trust_remote_code"])
        if config is None:
            raise InvalidRequest(
                f"{folder} is a torch.distributed.checkpoint, which holds no config: config= must be "
                f"{ALLOWED}"
            )
        if isinstance(config, str | os.PathLike):
            source = os.path.expanduser(os.fspath(config))
            if source.endswith(".toml"):
                config = KempnerConfig.read(source)
            else:
                if not os.path.exists(source) and not HUB_ID.match(source):
                    raise InvalidRequest(
                        f"config={source!r}: it is not there, and no hub id; it must be {ALLOWED}"
                    )
                if os.path.exists(source):
                    where = {"trust_remote_code": trust, "local_files_only": True}
                return cls(read_config(source, where), None, trust, _generation(source, where))
        if isinstance(config, KempnerConfig):
            from verbatim.model.kempner.layout import transformers_config

            return cls(transformers_config(config.model), config, trust)
        if isinstance(config, PretrainedConfig):
            return cls(copy.deepcopy(config), None, trust)  # the weights may be read again
        raise InvalidRequest(f"config={config!r}: must be {ALLOWED}")

    def dtype(self, checkpoint: DcpCheckpoint) -> torch.dtype:
        """Return the dtype of most of the model's stored weights."""
        with torch.device("meta"):
            module = self._built(torch.float32)
        nbytes = sum(
            math.prod(checkpoint.size(key)) * checkpoint.dtype(key).itemsize
            for key in checkpoint.keys
        )
        check_size(checkpoint.folder, module, nbytes)
        return stored_dtype(checkpoint, self._pieces(module))

    def skeleton(
        self, checkpoint: DcpCheckpoint, dtype: torch.dtype
    ) -> tuple[Any, Mapping[nn.Parameter, LazyWeight]]:
        """Return a module without weights, in `dtype` unless its class fixes another, and its lazy weights.

        Memory is reserved and freed without being written, so none is committed.
        """
        with torch.inference_mode(False):
            module = self._built(dtype)
            pieces = checked_pieces(checkpoint, self._pieces(module), self._ignored(module))
            lazy_weights = leave_there(checkpoint, module, pieces)
        if self._generation is not None:
            module.generation_config = copy.deepcopy(self._generation)
        return module, lazy_weights

    def as_dict(self) -> dict[str, Any]:
        """Return the config as plain data, the input of `config_from_dict`.

        Raises:
            NotSupported: its class is not transformers'.
        """
        from transformers import CONFIG_MAPPING

        if self.kempner is not None:
            return {"kempner": dataclasses.asdict(self.kempner.model)}
        kind = self.config.model_type
        if kind not in CONFIG_MAPPING or type(self.config) is not CONFIG_MAPPING[kind]:
            raise NotSupported(
                f"placement: a config of the class {type(self.config).__name__}, which is none of "
                "transformers' own, is not handed on with a torch.distributed.checkpoint; save the model "
                "with save_pretrained"
            )
        return {"transformers": json.loads(self.config.to_json_string(use_diff=False))}

    def _ignored(self, module: Any) -> tuple[str, ...]:
        """Return patterns of names in the checkpoint that the module does not use."""
        if self.kempner is not None:
            from verbatim.model.kempner.layout import LEFT_OVER

            return LEFT_OVER
        own = tuple(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
        return (*own, *mtp_names(self.config))

    def _built(self, dtype: torch.dtype) -> Any:
        from transformers.initialization import no_init_weights

        config = copy.deepcopy(self.config)  # building writes to it
        if getattr(config, "quantization_config", None) is not None:
            raise NotSupported("a config with a quantization_config: quantized DCP is not read")
        try:
            # Each weight is read later; only allocate memory.
            with building, no_init_weights():
                module: Any = auto_class(config).from_config(
                    config, dtype=dtype, trust_remote_code=self._trust
                )
            module.tie_weights()
        except Exception as error:  # config classes raise arbitrary exceptions
            what = first_line(error)
            raise ModelError(f"no model can be built by the config: {what}") from error
        if self.kempner is not None:
            from verbatim.model.kempner.layout import adjust

            adjust(module, self.kempner.model)
        return module.eval()

    def _pieces(self, module: Any) -> list[Destination]:
        if self.kempner is None:
            return pieces_by_name(module)
        from verbatim.model.kempner.layout import pieces

        return pieces(module, self.kempner.model)


def _generation(source: str, where: dict[str, Any]) -> Any:
    """Return the generation config beside a config, or None."""
    from transformers import GenerationConfig

    if os.path.isfile(source):
        source = os.path.dirname(source) or "."
    try:
        return GenerationConfig.from_pretrained(source, **where)
    except (OSError, ValueError, TypeError):  # most have none
        return None
