"""Layers for multi-token prediction (MTP): where a model has them, and how they are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import InvalidRequest, ModelError, NotSupported, first_line
from verbatim.model.anatomy import inner_model
from verbatim.model.borrow import exclusive
from verbatim.model.dcp.filling import names_in
from verbatim.model.dcp.folder import DcpCheckpoint, find_dcp
from verbatim.model.decoder import Decoder
from verbatim.model.hidden import head_of
from verbatim.model.loader import LoadedModel, building, quiet, read_config
from verbatim.model.mtp import MtpLayers


@dataclass(frozen=True, slots=True)
class Mtp:
    """Draft with the layers for multi-token prediction that came with the model.

    What they keep of each token lies beside its K and V, and counts as KV memory. They stay when weights
    sleep, and as they are when weights are updated: drafts get worse then, and no word changes.

    Attributes:
        model: where they are, if not in the model's own checkpoint: a folder in Hugging Face's format of the
            same architecture, of which nothing else is read. Or, of a live module, transformers' `MtpModel`,
            made of that very module. None reads them from the model's checkpoint.

    Raises:
        InvalidRequest: a name of nothing.
    """

    model: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.beside is not None and not self.beside.is_dir():
            raise InvalidRequest(f"Mtp({str(self.model)!r}): must be a folder, and there is none")

    @property
    def beside(self) -> Path | None:
        """The folder that holds the layers, where it is not the model's own."""
        if not isinstance(self.model, str | os.PathLike):
            return None
        return Path(os.path.abspath(os.path.expanduser(self.model)))


def open_mtp(draft: Mtp, decoder: Decoder, loaded: LoadedModel) -> MtpLayers:
    """Open the model's layers for multi-token prediction, without stores yet.

    Raises:
        InvalidRequest, NotSupported, ModelError: it has none, or none that can be run.
    """
    inner, beside = inner_model(decoder.module), draft.beside
    if draft.model is not None and beside is None:
        return MtpLayers(given_mtp(draft.model, inner), decoder)
    folder = loaded.folder if loaded.checkpoint is None else loaded.checkpoint.folder
    folder = beside if folder is None else folder
    if folder is None:
        raise InvalidRequest(
            "draft='mtp': a live module has no files to read MTP layers from; hand them over as "
            "draft=Mtp(model=...), transformers' MtpModel made of it, or name their folder"
        )
    return MtpLayers(load_mtp(inner, folder, beside), decoder)


def given_mtp(mtp: Any, inner: Any) -> Any:
    """The `MtpModel` that somebody hands over for the transformers model `inner`, checked.

    Raises:
        InvalidRequest: it is none, has no layers, or was made for another model.
    """
    from transformers.modeling_layers import MtpModel

    if not isinstance(mtp, MtpModel):
        raise InvalidRequest(f"Mtp(model={type(mtp).__name__}): must be transformers' MtpModel")
    if not len(mtp.layers):
        raise InvalidRequest("Mtp(model=...): it has 0 layers; 1 or more are needed")
    # The embedding is a copy where the original norms what it gives.
    head, embedding = head_of(inner), inner.get_input_embeddings()
    copied = hasattr(embedding, "embed_norm")
    if mtp.shared_head is not head or not (copied or mtp.embed_tokens is embedding):
        raise InvalidRequest(
            "Mtp(model=...): its embedding and head are not those of the model that it is to draft for; "
            "make it of that one, as MtpModel(model, num_mtp_layers), or MtpModel.from_pretrained(model)"
        )
    return mtp


def mtp_names(config: Any) -> tuple[str, ...]:
    """Patterns of the names that MTP layers have in a checkpoint of a model with this config: they count on
    from the last of its own layers. () where it has none.
    """
    config = config.get_text_config(decoder=True)
    number, first = getattr(config, "num_mtp_layers", None), config.num_hidden_layers
    if not _is_number(number):
        return ()
    return tuple(rf"(^|\.)layers\.{n}\." for n in range(first, first + number))


def load_mtp(inner: Any, folder: Path, beside: Path | None = None) -> Any:
    """transformers' `MtpModel` of `inner`, with its weights from the checkpoint that `inner` came from.

    Args:
        inner: a transformers model; left as it is.
        folder: of that checkpoint, in Hugging Face's format or DCP.
        beside: another folder to take them from, in Hugging Face's format, of the same architecture.

    Raises:
        NotSupported: its config names no such layers, or none that can be built.
        InvalidRequest: what lies beside is none, or was made for another model.
        ModelError: their weights are missing, incomplete or of other shapes.
    """
    from transformers.modeling_layers import MtpModel

    with _described(inner, folder, beside) as (told, number), _files(inner, told) as files:
        try:
            with _findable(inner, files), quiet(progress=False):
                mtp: Any = MtpModel.from_pretrained(inner).eval()
        except Exception as error:  # reading and building raise whatever a damaged file leads to
            raise ModelError(
                f"draft='mtp': {told} holds no {number} complete MTP layers for "
                f"{type(inner).__name__}: {first_line(error)}"
            ) from error
    for parameter, value in mtp.named_parameters():
        if value.is_meta:
            raise ModelError(f"draft='mtp': {told} lacks the weights of {parameter}")
    return mtp


def mtp_bytes(inner: Any, folder: Path, beside: Path | None = None) -> int:
    """What the weights of these layers take, embedding and head left out; arguments as of `load_mtp`.

    Raises:
        NotSupported, InvalidRequest: as `load_mtp`. Their files are not looked into.
    """
    from transformers.modeling_layers import MtpModel

    with _described(inner, folder, beside) as (_, number), torch.device("meta"):
        layers = MtpModel(inner, number).layers
    itemsize: int = inner.dtype.itemsize
    return sum(p.numel() for p in layers.parameters()) * itemsize


@contextmanager
def _described(inner: Any, folder: Path, beside: Path | None) -> Iterator[tuple[Path, int]]:
    """Let a model's config say what its MTP layers are; where they lie, and how many there are.

    Nobody runs the model meanwhile: its config is another one.
    """
    name, config = type(inner).__name__, inner.config.get_text_config(decoder=True)
    told = config
    if beside is not None:
        told, folder = _config_beside(config, beside), beside
    number: Any = getattr(told, "num_mtp_layers", None)
    if not _is_number(number):
        raise NotSupported(
            f"draft='mtp': {name} has no MTP layers; num_mtp_layers is {number!r} "
            f"in the config of {folder}, and must be 1 or more; where they lie in another folder, name it: "
            "draft=Mtp(folder)"
        )
    with exclusive, building, _as_told(config, told):
        try:
            inner.config.get_mtp_config()
        except Exception as error:  # `layer_types` without `mtp_layer_types`, say
            raise NotSupported(
                f"draft='mtp': {folder} does not say what {name}'s MTP layers are: {first_line(error)}"
            ) from error
        yield folder, number


def _is_number(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


_ALIKE = ("model_type", "hidden_size", "vocab_size", "num_hidden_layers")


def _config_beside(config: Any, folder: Path) -> Any:
    """What a folder says of its MTP layers, for a model of `config`."""
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
def _as_told(config: Any, told: Any) -> Iterator[None]:
    """Let a config say of MTP layers what another one says."""
    own = config.__dict__
    said = {n: v for n, v in told.__dict__.items() if n == "num_mtp_layers" or n.startswith("mtp_")}
    before = {name: own[name] for name in said if name in own}
    try:
        for name, value in said.items():
            setattr(config, name, value)
        yield
    finally:
        for name in said:
            own.pop(name, None)
        own.update(before)


@contextmanager
def _files(inner: Any, folder: Path) -> Iterator[Path]:
    """Where transformers can read MTP layers: the folder itself, or, of a DCP checkpoint, one in which they
    are written for a moment, in safetensors; the model's own layers are not.
    """
    dcp = find_dcp(folder)
    if dcp is None:
        yield folder
        return
    from safetensors.torch import save_file

    checkpoint, tensors = DcpCheckpoint(dcp), dict[str, Tensor]()
    pattern = re.compile("|".join(mtp_names(inner.config)))
    found = names_in(checkpoint, list(inner.state_dict()))
    chosen = {short: name for short, name in found.items() if pattern.search(short)}
    checkpoint.check(chosen.values())
    with torch.inference_mode(False):
        for short, name in chosen.items():
            tensors[short] = torch.empty(checkpoint.size(name), dtype=checkpoint.dtype(name))
            checkpoint.read(name, tensors[short])
    with TemporaryDirectory(prefix="verbatim-mtp-") as place:
        save_file(tensors, Path(place) / "model.safetensors", {"format": "pt"})
        tensors.clear()
        yield Path(place)


@contextmanager
def _findable(inner: Any, folder: Path) -> Iterator[None]:
    """Let transformers find the weights: it reads the folder that the config names, and takes for weights of
    MTP layers what the model's class ignores. Many classes ignore nothing. Older versions (5.17) also
    expect to find how weights are renamed at a model that they have loaded, and this one may have been built.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    own, ignored = inner.__dict__, "_keys_to_ignore_on_load_unexpected"
    had, before = ignored in own, own.get(ignored)
    path, dtype = inner.config.name_or_path, inner.config.dtype
    known = getattr(inner, ignored, None) or []
    built = not hasattr(inner, "_weight_conversions")
    if built:
        inner._weight_conversions = get_model_conversion_mapping(inner)
    try:
        setattr(inner, ignored, [*known, *mtp_names(inner.config)])
        inner.config.name_or_path, inner.config.dtype = str(folder), inner.dtype
        yield
    finally:
        if built:
            del inner._weight_conversions
        inner.config.name_or_path, inner.config.dtype = path, dtype
        if had:
            own[ignored] = before
        else:
            delattr(inner, ignored)
