"""Checkpoint folders from somebody who means harm: refused by name, before files outside of them are read,
code runs or memory is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import make_toy

from verbatim import LLM, Offload
from verbatim.errors import ModelError, UnsupportedModel, VerbatimError

SMALL: dict[str, Any] = dict(kv_memory="4MB")
TOO_LARGE = "parameters, and the files|weights are m|can't be loaded"
SECRET = "a line that no message shows"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_toy("llama").save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("placement", [None, Offload()], ids=["resident", "offload"])
@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "{}/outside.safetensors", "..", "a/b"]
)
def test_an_index_names_files_of_its_own_folder_only(
    folder: Path, target: str, placement: Offload | None
) -> None:
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    first = next(iter(weights))
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes((folder / weights[first]).read_bytes())
    name = target.format(folder.parent)
    moved = {key: name if file == weights[first] else file for key, file in weights.items()}
    edit(folder, index.name, weight_map=moved)
    with pytest.raises(ModelError, match="must be a file in the same folder"):
        LLM(folder, placement=placement, **SMALL)


def test_an_index_of_pickled_weights_is_held_to_the_same(folder: Path) -> None:
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../outside.bin"}}))
    with pytest.raises(ModelError, match=r"\.\./outside\.bin"):
        LLM(folder, **SMALL)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "*.safetensors"])
def test_no_error_shows_what_a_file_holds(folder: Path, name: str) -> None:
    """A link may lead anywhere."""
    path = next(folder.glob(name))
    secret = folder.parent / "secret"
    secret.write_text(SECRET + "\n" + SECRET)
    path.unlink()
    path.symlink_to(secret)
    for placement in (None, Offload()):
        with pytest.raises(VerbatimError) as caught:
            LLM(folder, placement=placement, **SMALL)
        error: BaseException | None = caught.value
        while error is not None:
            assert SECRET not in str(error)
            error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation": "kernels-community/vllm-flash-attn3"},
        {"attn_implementation": "kernels-community/metal-flash-sdpa:attention"},
        {"_experts_implementation": "someone/experts"},
        {"attn_implementation": {"": "a/b"}},
        {"text_config": {"_attn_implementation": "a/b@main"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("placement", [None, Offload()], ids=["resident", "offload"])
def test_a_config_that_would_load_code_is_refused(
    folder: Path, changes: dict[str, Any], placement: Offload | None
) -> None:
    edit(folder, "config.json", **changes)
    with pytest.raises(UnsupportedModel, match="which loads code"):
        LLM(folder, placement=placement, **SMALL)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000; must be 0 to 10000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"num_hidden_layers": 5000}, TOO_LARGE),
        ({"vocab_size": 10**9}, TOO_LARGE),
        ({"intermediate_size": 10**9}, TOO_LARGE),
        ({"hidden_size": 2**40}, TOO_LARGE),
        ({"text_config": {"num_experts": 10**9}}, "num_experts=1000000000"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("placement", [None, Offload()], ids=["resident", "offload"])
def test_a_config_of_more_than_the_files_hold_is_refused(
    folder: Path, changes: dict[str, Any], said: str, placement: Offload | None
) -> None:
    edit(folder, "config.json", **changes)
    with pytest.raises(ModelError, match=said):
        LLM(folder, placement=placement, **SMALL)


@pytest.mark.parametrize("placement", [None, Offload()], ids=["resident", "offload"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool], ids=str)
def test_integers_in_place_of_weights_are_refused(
    folder: Path, dtype: torch.dtype, placement: Offload | None
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][name]
    tensors = load_file(shard)
    save_file(tensors | {name: tensors[name].to(dtype)}, shard, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} is stored as .*floating-point"):
        LLM(folder, placement=placement, **SMALL)
