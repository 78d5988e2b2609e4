"""Loading of layers for multi-token prediction (MTP)."""

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
from verbatim.model.dcp.checkpoint import DcpCheckpoint, find_dcp
from verbatim.model.decoder import Decoder
from verbatim.model.hidden import head_of
from verbatim.model.loader import LoadedModel, building, read_config
from verbatim.model.mtp import MtpLayers
from verbatim.model.patching import exclusive, quiet
from verbatim.model.spec import inner_model
from verbatim.model.unused import QWENS_NUMBER, mtp_names, mtp_number


@dataclass(frozen=True, slots=True)
class Mtp:
    """Draft with the model's layers for multi-token prediction.

    Their K and V count as KV memory. Their weights are kept during sleep, and not changed by weight updates:
    drafts then get worse, but tokens do not change.

    Attributes:
        model: their source. None: the model's checkpoint. Or a folder in Hugging Face's format of the same
            architecture, of which nothing else is read. Or, for a live module, transformers' `MtpModel` of
            that module.

    Raises:
        InvalidRequest: the folder does not exist.
    """

    model: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.beside is not None and not self.beside.is_dir():
            raise InvalidRequest(f"Mtp({str(self.model)!r}): must be a folder, and there is none")

    @property
    def beside(self) -> Path | None:
        """The folder of the layers, if it is not the model's."""
        if not isinstance(self.model, str | os.PathLike):
            return None
        return Path(os.path.abspath(os.path.expanduser(self.model)))


def open_mtp(draft: Mtp, decoder: Decoder, loaded: LoadedModel) -> MtpLayers:
    """Open the model's MTP layers, without KV stores.

    Raises:
        InvalidRequest, NotSupported, ModelError: it has none, or unsupported ones.
    """
    inner, beside = inner_model(decoder.held), draft.beside
    if draft.model is not None and beside is None:
        return MtpLayers(given_mtp(draft.model, inner), decoder)
    folder = beside if loaded.folder is None else loaded.folder
    if folder is None:
        raise InvalidRequest(
            "draft='mtp': a live module has no files to read MTP layers from; hand them over as "
            "draft=Mtp(model=...), transformers' MtpModel made of it, or name their folder"
        )
    return MtpLayers(load_mtp(inner, folder, beside), decoder)


def given_mtp(mtp: Any, inner: Any) -> Any:
    """Check a given `MtpModel` for the transformers model `inner`, and return it.

    Raises:
        InvalidRequest: another type, no layers, or of another model.
    """
    from transformers.modeling_layers import MtpModel

    if not isinstance(mtp, MtpModel):
        raise InvalidRequest(f"Mtp(model={type(mtp).__name__}): must be transformers' MtpModel")
    if not len(mtp.layers):
        raise InvalidRequest("Mtp(model=...): it has 0 layers; 1 or more are needed")
    # The embedding is a copy if the original norms its output.
    head, embedding = head_of(inner), inner.get_input_embeddings()
    copied = hasattr(embedding, "embed_norm")
    if mtp.shared_head is not head or not (copied or mtp.embed_tokens is embedding):
        raise InvalidRequest(
            "Mtp(model=...): its embedding and head are not those of the model that it is to draft for; "
            "make it of that one, as MtpModel(model, num_mtp_layers), or MtpModel.from_pretrained(model)"
        )
    return mtp


def load_mtp(inner: Any, folder: Path, beside: Path | None = None) -> Any:
    """Load transformers' `MtpModel` of `inner`, with weights from the checkpoint of `inner`.

    Args:
        inner: a transformers model; not changed.
        folder: the checkpoint's folder, in Hugging Face's format or DCP.
        beside: another folder to load them from, in Hugging Face's format, of the same architecture.

    Raises:
        NotSupported: its config has no such layers, or unsupported ones.
        InvalidRequest: `beside` is invalid, or of another model.
        ModelError: their weights are missing, incomplete or of wrong shapes.
    """
    from transformers.modeling_layers import MtpModel

    twin, number = _described(inner, folder, beside)
    folder = beside or folder
    with exclusive, building, _files(twin, folder) as files, quiet():
        try:
            mtp: Any = MtpModel.from_pretrained(_findable(twin, files)).eval()
            mtp.tie_with_main_model(inner)
        except Exception as error:  # a damaged file leads to arbitrary exceptions
            raise ModelError(
                f"draft='mtp': {folder} holds no {number} complete MTP layers for "
                f"{type(inner).__name__}: {first_line(error)}"
            ) from error
    for parameter, value in mtp.named_parameters():
        if value.is_meta:
            raise ModelError(f"draft='mtp': {folder} lacks the weights of {parameter}")
    return mtp.to(inner.device) if inner.device.type == "cuda" else mtp


def mtp_size(inner: Any, folder: Path, beside: Path | None = None) -> tuple[int, int]:
    """Return the number and bytes of these layers, without embedding and head; arguments as in `load_mtp`.

    Raises:
        NotSupported, InvalidRequest: as `load_mtp`. Files of weights are not read.
    """
    from transformers.modeling_layers import MtpModel

    twin, number = _described(inner, folder, beside)
    with exclusive, building, torch.device("meta"):
        layers = MtpModel(twin, number).layers
    itemsize: int = inner.dtype.itemsize
    return len(layers), sum(p.numel() for p in layers.parameters()) * itemsize


def _described(inner: Any, folder: Path, beside: Path | None) -> tuple[Any, int]:
    """Return a shallow copy of a model whose config describes its MTP layers, and their number."""
    twin, name = copy.copy(inner), type(inner).__name__
    twin.__dict__["config"], twin.__dict__["_modules"] = (
        copy.deepcopy(inner.config),
        {**inner._modules},
    )
    config = told = twin.config.get_text_config(decoder=True)
    if beside is not None:
        folder, told = beside, _config_beside(config, beside)
        said = {n: v for n, v in told.__dict__.items() if n.startswith(("num_mtp_layers", "mtp_"))}
        config.__dict__.update(said)
    number: Any = mtp_number(told)
    if type(number) is not int or number < 1:
        raise NotSupported(
            f"draft='mtp': {name} has no MTP layers; num_mtp_layers is {number!r} "
            f"in the config of {folder}, and must be 1 or more; where they lie in another folder, name it: "
            "draft=Mtp(folder)"
        )
    if QWENS_NUMBER in config.__dict__:
        config.__dict__.setdefault("num_mtp_layers", number)
        config.__dict__.setdefault("mtp_layer_types", ["full_attention"] * number)
    try:
        twin.config.get_mtp_config()
    except Exception as error:  # `layer_types` without `mtp_layer_types`, say
        raise NotSupported(
            f"draft='mtp': {folder} does not say what {name}'s MTP layers are: {first_line(error)}"
        ) from error
    return twin, number


_ALIKE = ("model_type", "hidden_size", "vocab_size", "num_hidden_layers")


def _config_beside(config: Any, folder: Path) -> Any:
    """Return the config of another folder's MTP layers, checked against the model's."""
    if not (folder / "config.json").is_file():
        raise InvalidRequest(f"Mtp({str(folder)!r}): it holds no config.json")
    found = read_config(str(folder), {"trust_remote_code": False, "local_files_only": True})
    found = found.get_text_config(decoder=True)
    for name in _ALIKE:
        mine, theirs = getattr(config, name, None), getattr(found, name, None)
        if mine != theirs:
            raise InvalidRequest(
                f"Mtp({str(folder)!r}): its {name} is {theirs!r}, and the model's {mine!r}"
            )
    return found


@contextmanager
def _files(inner: Any, folder: Path) -> Iterator[Path]:
    """Yield a folder from which transformers can read MTP layers.

    It is the folder itself, or, for a DCP checkpoint, a temporary one with these layers in safetensors.
    """
    dcp = find_dcp(folder)
    if dcp is None:
        yield folder
        return
    from safetensors.torch import save_file

    checkpoint = DcpCheckpoint(dcp)
    pattern = re.compile("|".join(mtp_names(inner.config)))
    found = checkpoint.names(list(inner.state_dict()))
    with torch.inference_mode(False):
        tensors = {
            short: checkpoint.tensor(name) for short, name in found.items() if pattern.search(short)
        }
    with TemporaryDirectory(prefix="verbatim-mtp-") as place:
        save_file(tensors, Path(place) / "model.safetensors", {"format": "pt"})
        tensors.clear()
        yield Path(place)


def _findable(twin: Any, folder: Path) -> Any:
    """Let transformers find the weights of the MTP layers of a copied model, and return it.

    It reads the folder named by the config, and takes the names that the model's class ignores; many
    classes ignore none. Older versions (5.17) also expect the weight conversions of a loaded model, which
    a built one lacks. A head that is quantized, or split over ranks, would be
    missing weights: a small one takes its place.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    fields, ignored = twin.__dict__, "_keys_to_ignore_on_load_unexpected"
    fields[ignored] = [*(getattr(twin, ignored, None) or []), *mtp_names(twin.config)]
    if not hasattr(twin, "_weight_conversions"):
        fields["_weight_conversions"] = get_model_conversion_mapping(twin)
    twin.config.__dict__.update(_name_or_path=str(folder), dtype=twin.dtype)
    twin._modules["lm_head"] = nn.Linear(1, 1, bias=False)
    return twin
