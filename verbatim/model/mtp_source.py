"""Loading layers for multi-token prediction (MTP)."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from verbatim.errors import InvalidRequest, ModelError, NotSupported, first_line
from verbatim.model.context import head_of
from verbatim.model.dcp.checkpoint import DcpCheckpoint, find_dcp
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import MtpLayers
from verbatim.model.loader import LoadedModel, building, read_config
from verbatim.model.patching import exclusive, quiet
from verbatim.model.spec import inner_model
from verbatim.model.unused import QWEN_NUM_LAYERS, mtp_names, mtp_number


@dataclass(frozen=True, slots=True)
class Mtp:
    """Draft with the model's layers for multi-token prediction.

    Their K and V count as KV memory. Their weights stay in memory during sleep, and weight updates don't
    change them: drafts then get worse, but output tokens don't change.

    Attributes:
        model: source of the layers. None: the model's checkpoint; or a folder in Hugging Face's format with
            the same architecture, of which only these layers are read; or, for a live module, transformers'
            `MtpModel` of that module.

    Raises:
        InvalidRequest: the folder does not exist.
    """

    model: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.beside is not None and not self.beside.is_dir():
            raise InvalidRequest(f"Mtp({str(self.model)!r}): must be an existing folder")

    @property
    def beside(self) -> Path | None:
        """The separate folder of the layers, or None."""
        if not isinstance(self.model, str | os.PathLike):
            return None
        return Path(os.path.abspath(os.path.expanduser(self.model)))


def open_mtp(draft: Mtp, decoder: Decoder, loaded: LoadedModel) -> MtpLayers:
    """Open the model's MTP layers, without KV stores; errors are those of `checked_mtp` and `load_mtp`."""
    inner, draft_folder = inner_model(decoder.raw_module), draft.beside
    if draft.model is not None and draft_folder is None:
        return MtpLayers(checked_mtp(draft.model, inner), decoder)
    folder = draft_folder if loaded.folder is None else loaded.folder
    if folder is None:
        raise InvalidRequest(
            "draft='mtp': a live module has no files to read MTP layers from; pass transformers' "
            "MtpModel of it as draft=Mtp(model=...), or name their folder"
        )
    return MtpLayers(load_mtp(inner, folder, draft_folder), decoder)


def checked_mtp(mtp: Any, inner: Any) -> Any:
    """Return `mtp` if it is an `MtpModel` of the transformers model `inner`; else raise InvalidRequest."""
    from transformers.modeling_layers import MtpModel

    if not isinstance(mtp, MtpModel):
        raise InvalidRequest(f"Mtp(model={type(mtp).__name__}): must be transformers' MtpModel")
    if not len(mtp.layers):
        raise InvalidRequest("Mtp(model=...): it has 0 layers; 1 or more are needed")
    # The embedding is a copy if the model's own normalizes its output.
    head, embedding = head_of(inner), inner.get_input_embeddings()
    copied = hasattr(embedding, "embed_norm")
    if mtp.shared_head is not head or not (copied or mtp.embed_tokens is embedding):
        raise InvalidRequest(
            "Mtp(model=...): its embedding and head are not those of the model that it should "
            "draft for; build it from that model, as MtpModel(model, num_mtp_layers), or "
            "MtpModel.from_pretrained(model)"
        )
    return mtp


def load_mtp(inner: Any, folder: Path, draft_folder: Path | None = None) -> Any:
    """Load transformers' `MtpModel` of `inner`.

    Args:
        inner: a transformers model; not changed.
        folder: the folder of the checkpoint of `inner`, in Hugging Face's format or DCP.
        draft_folder: a separate folder with the layers, in Hugging Face's format; None: they are in `folder`.

    Raises:
        NotSupported: the config has no MTP layers, or unsupported ones.
        InvalidRequest: `draft_folder` is invalid, or belongs to another model.
        ModelError: weights are missing, incomplete or have wrong shapes.
    """
    from transformers.modeling_layers import MtpModel

    twin, number = _with_mtp_config(inner, folder, draft_folder)
    folder = draft_folder or folder
    with exclusive, building, _files(twin, folder) as files, quiet():
        try:
            mtp: Any = MtpModel.from_pretrained(_with_weight_source(twin, files)).eval()
            mtp.tie_with_main_model(inner)
        except Exception as error:  # a damaged file leads to arbitrary exceptions
            raise ModelError(
                f"draft='mtp': {folder} does not hold {number} complete MTP layers for "
                f"{type(inner).__name__}: {first_line(error)}"
            ) from error
    for parameter, value in mtp.named_parameters():
        if value.is_meta:
            raise ModelError(f"draft='mtp': {folder} lacks the weights of {parameter}")
    return mtp.to(inner.device) if inner.device.type == "cuda" else mtp


def mtp_size(inner: Any, folder: Path, draft_folder: Path | None = None) -> tuple[int, int]:
    """Return the number and bytes of the MTP layers, without embedding and head, from the config alone.

    Arguments, NotSupported and InvalidRequest are as for `load_mtp`.
    """
    from transformers.modeling_layers import MtpModel

    twin, number = _with_mtp_config(inner, folder, draft_folder)
    with exclusive, building, torch.device("meta"):
        layers = MtpModel(twin, number).layers
    itemsize: int = inner.dtype.itemsize
    return len(layers), sum(p.numel() for p in layers.parameters()) * itemsize


def _with_mtp_config(inner: Any, folder: Path, draft_folder: Path | None) -> tuple[Any, int]:
    """Return a shallow copy of a model with a config that describes its MTP layers, and their number."""
    twin, name = copy.copy(inner), type(inner).__name__
    twin.__dict__["config"], twin.__dict__["_modules"] = (
        copy.deepcopy(inner.config),
        {**inner._modules},
    )
    config = source = twin.config.get_text_config(decoder=True)
    if draft_folder is not None:
        folder, source = draft_folder, _mtp_config_in(config, draft_folder)
        fields = {
            n: v for n, v in source.__dict__.items() if n.startswith(("num_mtp_layers", "mtp_"))
        }
        config.__dict__.update(fields)
    number: Any = mtp_number(source)
    if type(number) is not int or number < 1:
        raise NotSupported(
            f"draft='mtp': {name} has no MTP layers; num_mtp_layers is {number!r} in the config "
            f"of {folder}, and must be 1 or more; if they are in another folder, name it: "
            "draft=Mtp(folder)"
        )
    if QWEN_NUM_LAYERS in config.__dict__:
        config.__dict__.setdefault("num_mtp_layers", number)
        config.__dict__.setdefault("mtp_layer_types", ["full_attention"] * number)
    try:
        twin.config.get_mtp_config()
    except Exception as error:  # such as `layer_types` without `mtp_layer_types`
        raise NotSupported(
            f"draft='mtp': {folder} does not say what {name}'s MTP layers are: {first_line(error)}"
        ) from error
    return twin, number


_SHARED_FIELDS = ("model_type", "hidden_size", "vocab_size", "num_hidden_layers")


def _mtp_config_in(config: Any, folder: Path) -> Any:
    """Return the config of a separate folder of MTP layers, checked against the model's."""
    if not (folder / "config.json").is_file():
        raise InvalidRequest(f"Mtp({str(folder)!r}): it holds no config.json")
    other = read_config(str(folder), {"trust_remote_code": False, "local_files_only": True})
    other = other.get_text_config(decoder=True)
    for name in _SHARED_FIELDS:
        ours, theirs = getattr(config, name, None), getattr(other, name, None)
        if ours != theirs:
            raise InvalidRequest(
                f"Mtp({str(folder)!r}): its {name} is {theirs!r}, but the model's is {ours!r}"
            )
    return other


@contextmanager
def _files(inner: Any, folder: Path) -> Iterator[Path]:
    """Yield a folder from which transformers can read MTP layers.

    It is `folder`, or, for a DCP checkpoint, a temporary one with the layers in safetensors.
    """
    dcp = find_dcp(folder)
    if dcp is None:
        yield folder
        return
    from safetensors.torch import save_file

    checkpoint = DcpCheckpoint(dcp)
    pattern = re.compile("|".join(mtp_names(inner.config)))
    names = checkpoint.names(list(inner.state_dict()))
    with torch.inference_mode(False):
        tensors = {
            short: checkpoint.tensor(name) for short, name in names.items() if pattern.search(short)
        }
    with TemporaryDirectory(prefix="verbatim-mtp-") as place:
        save_file(tensors, Path(place) / "model.safetensors", {"format": "pt"})
        tensors.clear()
        yield Path(place)


def _with_weight_source(twin: Any, folder: Path) -> Any:
    """Adapt a copied model so that transformers finds the weights of its MTP layers, and return it.

    transformers reads the folder named by the config, and loads the names that the model's class ignores.
    Version 5.17 also expects the weight conversions of a loaded model. A tiny head replaces the model's,
    which would count as missing if it is quantized or split over ranks.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    fields, ignored = twin.__dict__, "_keys_to_ignore_on_load_unexpected"
    fields[ignored] = [*(getattr(twin, ignored, None) or []), *mtp_names(twin.config)]
    if not hasattr(twin, "_weight_conversions"):
        fields["_weight_conversions"] = get_model_conversion_mapping(twin)
    twin.config.__dict__.update(_name_or_path=str(folder), dtype=twin.dtype)
    twin._modules["lm_head"] = nn.Linear(1, 1, bias=False)
    return twin
