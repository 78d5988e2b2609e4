"""Untrusted checkpoints: no file outside of the folder is read or quoted, and no code is run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import sweep, toy_tokenizers
from support.checkpoints import hub_snapshot
from support.pairwise import parametrize_combinations
from support.toys import make_toy
from verbatim import LLM, ModelError, NotSupported, Offload, SamplingParams, VerbatimError
from verbatim.text.tokenizer import Tokenizer

SMALL: dict[str, Any] = dict(kv_memory="16MB")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MARK = "qzj" + "9"  # split, as tracebacks quote lines of this file
SECRET = f"root:x:0:0:{MARK}"
PLACEMENTS = [None, Offload(cpu="64MB")]
FILES = """config.json generation_config.json model.safetensors model.safetensors.index.json
    pytorch_model.bin tokenizer.json tokenizer_config.json tokenizer.model vocab.json
    special_tokens_map.json adapter_config.json""".split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    make_toy("llama").save_pretrained(path)
    return path


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def opened(folder: Path, placement: Any = None, **options: Any) -> list[int]:
    with LLM(folder, placement=placement, **SMALL, **options) as llm:
        return llm.generate([3, 4, 5], GREEDY)[0].outputs[0].token_ids


@contextlib.contextmanager
def without_secrets() -> Iterator[None]:
    """Check that neither an error that leaves this block nor its causes quote the secret."""
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
def test_index_that_names_a_file_outside_the_folder_is_rejected(
    folder: Path, where: str, placement: Any
) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "a").mkdir()
    by_index(folder, str(outside) if where == "absolute" else where)
    shutil.move(folder / "model.safetensors", outside)
    refused(folder, "is refused: it names .*outside of its folder", placement)


@pytest.mark.parametrize("name", [5, ["model.safetensors"]])
def test_config_whose_weights_name_is_not_a_string_is_rejected(folder: Path, name: Any) -> None:
    change(folder / "config.json", transformers_weights=name)
    refused(folder, "transformers_weights=.* must be the name of a file")


def test_small_pickle_that_expands_to_a_large_model_is_rejected(folder: Path) -> None:
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    change(folder / "config.json", vocab_size=10**5)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if len(tensor) == rows:  # expanded, with stride 0
            tensors[name] = tensor[:1].clone().expand(10**5, -1)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "describes .* weights, but the checkpoint has")


def test_nested_state_dict_is_rejected_with_its_key(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    torch.save({"epoch": 3, "state_dict": tensors}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, r"pytorch_model\.bin: its weights are nested under 'state_dict'")


def test_index_of_pickles_that_names_a_file_outside_the_folder_is_rejected(folder: Path) -> None:
    outside = folder.parent / "outside.bin"
    by_index(folder, "../outside.bin", "pytorch_model.bin")
    torch.save(load_file(folder / "model.safetensors"), outside)
    (folder / "model.safetensors").unlink()
    refused(folder, "is refused: it names")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_symlinks_as_in_the_hub_cache_are_followed(folder: Path, placement: Any) -> None:
    expected = opened(folder)
    blob = folder.parent / "blobs" / "0123"
    blob.parent.mkdir()
    by_index(folder, "model-1.safetensors")
    shutil.move(folder / "model.safetensors", blob)
    (folder / "model-1.safetensors").symlink_to("../blobs/0123")
    assert opened(folder, placement) == expected


def test_index_of_a_hub_snapshot_that_names_a_file_outside_is_rejected(
    folder: Path, monkeypatch: Any
) -> None:
    snapshot = hub_snapshot(folder.parent, monkeypatch)
    by_index(folder, "../../outside.safetensors")
    shutil.move(folder / "model.safetensors", snapshot.parents[1] / "outside.safetensors")
    shutil.copytree(folder, snapshot)
    refused("some/model", "is refused: it names", tokenizer=toy_tokenizers.byte_level().hf)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", [f"{SECRET}\n", json.dumps({SECRET: SECRET}), json.dumps([SECRET])]
)
@pytest.mark.parametrize("name", FILES)
def test_errors_never_quote_file_contents(folder: Path, name: str, content: str) -> None:
    secret = folder.parent / "passwd"
    # A safetensors file begins with the length of its header.
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
def test_errors_of_weight_updates_sessions_and_dcp_never_quote_files(
    folder: Path, content: str
) -> None:
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
def test_tokenizer_that_names_a_file_outside_the_folder_is_rejected(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
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
def test_config_that_names_kernels_of_the_hub_is_rejected(
    folder: Path, fields: dict[str, Any], placement: Any
) -> None:
    change(folder / "config.json", **fields)
    with pytest.raises(NotSupported, match="is code of a hub repository"):
        opened(folder, placement)


@pytest.mark.parametrize("name", ["flash_attention_2", "eager"])
def test_attention_implementation_in_config_is_ignored(folder: Path, name: str) -> None:
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
def test_absurd_sizes_in_config_raise_model_error(
    folder: Path, fields: dict[str, Any], placement: Any
) -> None:
    change(folder / "config.json", **fields)
    with pytest.raises(ModelError):
        opened(folder, placement)


@pytest.mark.parametrize(
    "fields",
    [
        dict(shape=[-1, -64]),
        dict(shape=[True, 64]),
        dict(shape=[2**32, 2**32], data_offsets=[0, 0]),
        dict(data_offsets=[0.0, 256.0]),
    ],
)
def test_impossible_entries_of_a_safetensors_header_are_rejected(
    folder: Path, fields: dict[str, Any]
) -> None:
    path = folder / "model.safetensors"
    size = struct.unpack("<Q", (data := path.read_bytes())[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["model.norm.weight"] |= fields
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    refused(folder, "damaged or cut short")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("pickled", [False, True])
def test_weights_that_are_not_floating_point_are_rejected(
    folder: Path, dtype: str, pickled: bool, placement: Any
) -> None:
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


@parametrize_combinations(name=["gpt2", "gpt_neo", "openai-gpt"], prefix=["transformer.", ""])
def test_buffers_in_old_checkpoints_are_accepted(name: str, prefix: str, tmp_path: Path) -> None:
    sweep.build(name).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = opened(tmp_path)
    tensors = {key.replace("transformer.", prefix, 1): x for key, x in tensors.items()}
    path = f"{prefix}h.0.attn." + "attention." * (name == "gpt_neo")
    tensors[f"{path}bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    tensors[f"{path}masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert opened(tmp_path) == expected


def test_adapter_folder_is_rejected(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/etc"}))
    refused(folder, "holds an adapter; merge it")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unused_tensor_is_rejected_unless_ignored(folder: Path, placement: Any) -> None:
    expected = opened(folder, placement)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, r"1 tensors are not used.*up_proj\.weight_scale_inv", placement)
    assert opened(folder, placement, unused_weights="ignore") == expected
    refused(folder, r"unused_weights='no': must be one of", placement, unused_weights="no")


def test_unreadable_file_that_is_not_needed_is_ignored(folder: Path) -> None:
    (folder / "README.md").symlink_to("/proc/self/mem")  # reading it fails
    assert len(opened(folder)) == 6


def test_git_lfs_pointer_is_rejected_with_the_reason(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 12345\n"
    (folder / "model.safetensors").write_text(text)
    refused(folder, r"model\.safetensors is a Git LFS pointer.*git lfs pull")
    (folder / "toy.gguf").write_text(text)
    refused(folder / "toy.gguf", "is a Git LFS pointer|needs gguf")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json"])
def test_pipe_in_the_folder_is_rejected_without_waiting_for_a_writer(
    folder: Path, name: str
) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(folder, f"{name} is a pipe")


def test_shards_without_their_index_are_rejected_by_its_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    refused(folder, r"holds no weights.*model\.safetensors\.index\.json")
