"""A checkpoint is data: what it names lies in its folder, and nothing in it is run."""

from __future__ import annotations

import contextlib
import json
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import toy_tokenizers
from support.checkpoints import hub_snapshot
from support.toys import make_toy
from verbatim import LLM, ModelError, NotSupported, Offload, SamplingParams, VerbatimError
from verbatim.text.tokenizer import Tokenizer

SMALL: dict[str, Any] = dict(kv_memory="16MB")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MARK = "qzj" + "9"  # apart, as tracebacks quote lines of this file
SECRET = f"root:x:0:0:{MARK}"
PLACEMENTS = [None, Offload(cpu="64MB")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    make_toy("llama").save_pretrained(made)
    return made


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def opened(folder: Path, placement: Any = None, **options: Any) -> list[int]:
    with LLM(folder, placement=placement, **SMALL, **options) as llm:
        return llm.generate([3, 4, 5], GREEDY)[0].outputs[0].token_ids


@contextlib.contextmanager
def without_secrets() -> Iterator[None]:
    """Check that neither an error that leaves this block nor what it was made of quotes the secret."""
    try:
        yield
    except VerbatimError as error:
        if MARK in "".join(traceback.format_exception(error)):
            pytest.fail(f"quotes the file: {error}")
        raise


def refused(folder: Path, match: str, placement: Any = None, **options: Any) -> None:
    with pytest.raises(VerbatimError, match=match), without_secrets():
        opened(folder, placement, **options)


def by_index(folder: Path, name: str, kind: str = "model.safetensors") -> None:
    names = load_file(folder / "model.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, name)}
    (folder / f"{kind}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "where", ["../outside.safetensors", "absolute", "a/../../outside.safetensors"]
)
def test_an_index_names_no_file_outside(folder: Path, where: str, placement: Any) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "a").mkdir()
    by_index(folder, str(outside) if where == "absolute" else where)
    shutil.move(folder / "model.safetensors", outside)
    refused(folder, "is refused: it names .*outside of its folder", placement)


@pytest.mark.parametrize("name", [5, ["model.safetensors"]])
def test_a_config_names_its_weights_by_a_text(folder: Path, name: Any) -> None:
    change(folder / "config.json", transformers_weights=name)
    refused(folder, "transformers_weights=.* must be the name of a file")


def test_a_small_pickle_holds_no_large_model(folder: Path) -> None:
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    change(folder / "config.json", vocab_size=10**5)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if len(tensor) == rows:  # with a stride of 0
            tensors[name] = tensor[:1].clone().expand(10**5, -1)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "describes .* weights, and the checkpoint has")


def test_a_state_dict_inside_of_another_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    torch.save({"epoch": 3, "state_dict": tensors}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, r"pytorch_model\.bin: its weights lie under 'state_dict'")


def test_an_index_of_pickles_names_no_file_outside(folder: Path) -> None:
    outside = folder.parent / "outside.bin"
    by_index(folder, "../outside.bin", "pytorch_model.bin")
    torch.save(load_file(folder / "model.safetensors"), outside)
    (folder / "model.safetensors").unlink()
    refused(folder, "is refused: it names")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_links_as_in_the_hubs_cache_are_followed(folder: Path, placement: Any) -> None:
    expected = opened(folder)
    blob = folder.parent / "blobs" / "0123"
    blob.parent.mkdir()
    by_index(folder, "model-1.safetensors")
    shutil.move(folder / "model.safetensors", blob)
    (folder / "model-1.safetensors").symlink_to("../blobs/0123")
    assert opened(folder, placement) == expected


def test_a_snapshot_of_the_hub_is_checked_too(folder: Path, monkeypatch: Any) -> None:
    snapshot = hub_snapshot(folder.parent, monkeypatch)
    by_index(folder, "../../outside.safetensors")
    shutil.move(folder / "model.safetensors", snapshot.parents[1] / "outside.safetensors")
    shutil.copytree(folder, snapshot)
    refused("some/model", "is refused: it names", tokenizer=toy_tokenizers.byte_level().hf)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", [f"{SECRET}\n", json.dumps({SECRET: SECRET}), json.dumps([SECRET])]
)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "special_tokens_map.json",
        "adapter_config.json",
    ],
)
def test_no_error_quotes_a_file(folder: Path, name: str, content: str) -> None:
    secret = folder.parent / "passwd"
    # What a safetensors file begins with is the length of its header.
    header = len(content).to_bytes(8, "little") if name == "model.safetensors" else b""
    secret.write_bytes(header + content.encode())
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    for placement in PLACEMENTS:
        with contextlib.suppress(VerbatimError), without_secrets():
            opened(folder, placement)


@pytest.mark.parametrize("content", [SECRET, json.dumps({SECRET: SECRET}), json.dumps([SECRET])])
def test_new_weights_and_sessions_quote_no_file(folder: Path, content: str) -> None:
    odd = folder.parent / "odd.safetensors"
    odd.write_bytes(len(content).to_bytes(8, "little") + content.encode())
    with LLM(folder, **SMALL) as llm:
        with pytest.raises(ModelError), without_secrets():
            llm.update_weights(odd)
        with pytest.raises(VerbatimError), without_secrets():
            llm.session(load=odd)
    (folder.parent / "dcp").mkdir()
    (folder.parent / "dcp" / ".metadata").write_text(content)
    with pytest.raises(ModelError, match=r"opcode|can't be read"), without_secrets():
        opened(folder.parent / "dcp", config=folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_file": "/etc/passwd"},
        {"fast_tokenizer_files": ["../tokenizer.1.json"]},
        {"tokenizer_file": "../tokenizer.json"},
    ],
)
def test_a_tokenizer_names_no_file_outside(tmp_path: Path, fields: dict[str, Any]) -> None:
    toy_tokenizers.byte_level().hf.save_pretrained(tmp_path)
    Tokenizer.open(tmp_path)
    change(tmp_path / "tokenizer_config.json", **fields)
    with pytest.raises(ModelError, match="outside of its folder"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation": "kernels-community/flash-attn"},
        {"attn_implementation": "kernels-community/flash-attn@v1:run"},
        {"attn_implementation": {"": "sdpa", "text_config": "some/kernel"}},
        {"experts_implementation": "some/kernel"},
        {"text_config": {"vision_config": {"_attn_implementation": "paged|some/kernel"}}},
    ],
)
def test_a_config_loads_no_code(folder: Path, fields: dict[str, Any], placement: Any) -> None:
    change(folder / "config.json", **fields)
    with pytest.raises(NotSupported, match="is code of a hub repository"):
        opened(folder, placement)


@pytest.mark.parametrize("name", ["flash_attention_2", "eager"])
def test_the_engine_chooses_the_attention(folder: Path, name: str) -> None:
    expected = opened(folder)
    change(folder / "config.json", _attn_implementation=name)
    assert opened(folder) == expected


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"hidden_size": 2**20},
        {"vocab_size": 10**9},
        {"intermediate_size": 10**9},
        {"intermediate_size": -5},
        {"num_attention_heads": 10**6},
        {"num_key_value_heads": -2},
    ],
)
def test_absurd_sizes_are_refused_before_memory_is_asked_for(
    folder: Path, fields: dict[str, Any], placement: Any
) -> None:
    change(folder / "config.json", **fields)
    with pytest.raises(ModelError):
        opened(folder, placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("pickled", [False, True])
def test_integers_are_no_weights(folder: Path, dtype: str, pickled: bool, placement: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64).to(getattr(torch, dtype))
    if not pickled:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    elif placement is None:
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        pytest.skip("placements read safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is .*must be floating-point"):
        opened(folder, placement)


def test_integers_of_buffers_are_no_weights(tmp_path: Path) -> None:
    make_toy("gpt2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert opened(tmp_path)


def test_an_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/etc"}))
    refused(folder, "holds an adapter; merge it")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_tensor_that_nothing_uses_is_an_error_by_name(folder: Path, placement: Any) -> None:
    expected = opened(folder, placement)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, r"1 tensors are not used.*up_proj\.weight_scale_inv", placement)
    assert opened(folder, placement, unused_weights="ignore") == expected
    refused(folder, r"unused_weights='no': must be one of", placement, unused_weights="no")


def test_a_git_lfs_pointer_is_named(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 12345\n"
    (folder / "model.safetensors").write_text(text)
    refused(folder, r"model\.safetensors is a Git LFS pointer.*git lfs pull")
    (folder / "toy.gguf").write_text(text)
    refused(folder / "toy.gguf", "is a Git LFS pointer|needs gguf")
