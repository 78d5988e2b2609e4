"""Checkpoints of torch.distributed.checkpoint (DCP): reading them safely, and rejecting bad ones."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint.filesystem import SerializationFormat
from typer.testing import CliRunner

from support import kempner_reference, toy_tokenizers, toys
from support.checkpoints import opening_fails
from support.mtp_toys import Toy, random_mtp, save_with_mtp
from support.pairwise import slow_but
from support.programs import run_ranks
from support.stages import staged
from verbatim import (
    LLM,
    InvalidRequest,
    ModelError,
    NotSupported,
    Offload,
    PipelineParallel,
    SamplingParams,
    TensorParallel,
    TierFailed,
)
from verbatim.api.opening import plan_offload
from verbatim.cli.commands import app
from verbatim.draft import Mtp
from verbatim.errors import ModelChanged
from verbatim.model.dcp.checkpoint import DcpCheckpoint, find_dcp
from verbatim.model.kempner.config import ModelConfig
from verbatim.model.kempner.layout import transformers_config
from verbatim.model.loader import ModelSource
from verbatim.placement.options import engine_options

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = Path(__file__).parents[2]
IDS = [3, 7, 1, 44, 9, 9, 0]
FEW = SamplingParams(max_tokens=6, temperature=0, logprobs=0)
Change = Callable[[stored.Metadata], Any]


def save(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    writer = dcp.FileSystemWriter(folder, sync_files=False, **options)
    dcp.save(state, storage_writer=writer)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as KempnerForge saves it after step 5, with optimizer state and `train_state.pt`."""
    state = kempner_reference.make().state_dict()
    moments = {name: {"exp_avg": tensor * 0, "step": 5} for name, tensor in state.items()}
    path = tmp_path / "run" / "step_5"
    save(path, {"model": state, "optimizer": {"state": moments, "lr": 0.1}})
    (path / "train_state.pt").write_bytes(b"never opened")
    return path


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return kempner_reference.write_toml(tmp_path / "x.toml")


def rewrite(folder: Path, change: Change) -> None:
    """Edit the metadata as its owner could: `change` edits it in place, or returns other contents."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(pickle.dumps(metadata if changed is None else changed))


def relocated(key: str, **fields: Any) -> Change:
    """Return a change of where the first chunk of a tensor is stored."""

    def change(metadata: stored.Metadata) -> None:
        index = next(i for i in metadata.storage_data if i.fqn == key)
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    return change


def refusal(folder: Path, toml: Path, change: Change) -> str:
    """Change the metadata, return the error of opening the folder, and restore it."""
    whole = (folder / ".metadata").read_bytes()
    rewrite(folder, change)
    with pytest.raises(ModelError) as refused:
        LLM(folder, config=toml)
    (folder / ".metadata").write_bytes(whole)
    return str(refused.value)


def words(llm: LLM) -> tuple[list[int], list[float]]:
    (result,) = llm.generate(IDS, FEW)
    return result.outputs[0].token_ids, result.outputs[0].logprobs


def expected(**fields: Any) -> tuple[list[int], list[float]]:
    """Return greedy tokens and their log-probs from the reference model."""
    model, ids, best_logprobs = kempner_reference.make(**fields), list(IDS), []
    for _ in range(6):
        logprobs = model(torch.tensor([ids])).detach()[0, -1].log_softmax(-1)
        ids.append(int(logprobs.argmax()))
        best_logprobs.append(float(logprobs.max()))
    return ids[len(IDS) :], best_logprobs


def check_words(folder: Path, config: Any, **fields: Any) -> tuple[list[int], list[float]]:
    """Check that a checkpoint gives the tokens and log-probs of the reference model, and return them."""
    with LLM(folder, config=config) as llm:
        found, (right, near) = words(llm), expected(**fields)
    assert found[0] == right
    assert found[1] == pytest.approx(near, abs=1e-4)
    return found


def check_placements(folder: Path, config: Any, right: Any, **options: Any) -> None:
    """Check that the offloaded and the staged model give the same tokens and log-probs."""
    for placement in (Offload(weights=(0, 0, 100)), Offload(weights=(100, 0, 0)), staged()):
        with LLM(folder, config=config, placement=placement, **options) as llm:
            assert words(llm) == right, placement


NAME = "model.layers.0.attention.q_proj.weight"


# Reading.


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of two processes: tensors are sharded by rows or columns, or replicated."""
    place = tmp_path_factory.mktemp("ranks")
    fields = json.dumps({"vocab_size": 51, "num_experts": 3, "moe_frequency": 2})
    run_ranks(2, place, "save_dcp_rank", place / "step_1", fields)
    yield place / "step_1"
    shutil.rmtree(place)


@pytest.mark.slow
def test_shards_of_two_ranks_are_assembled(two_ranks: Path, tmp_path: Path) -> None:
    fields = dict(vocab_size=51, num_experts=3, moe_frequency=2)
    state, checkpoint = kempner_reference.make(**fields).state_dict(), DcpCheckpoint(two_ranks)
    for name, tensor in state.items():
        assert torch.equal(checkpoint.tensor(f"model.{name}"), tensor), name
    entries = pickle.loads((two_ranks / ".metadata").read_bytes()).state_dict_metadata
    assert {len(entries[f"model.{name}"].chunks) for name in state} == {1, 2}
    assert len(list(two_ranks.glob("*.distcp"))) == 2
    toml = kempner_reference.write_toml(tmp_path / "x.toml", **fields)
    check_placements(two_ranks, toml, check_words(two_ranks, toml, **fields))


def test_pipeline_stage_folders_are_merged(tmp_path: Path, toml: Path) -> None:
    state = kempner_reference.make().state_dict()
    last = ("layers.1", "norm", "output_head")
    for stage in (0, 1):
        part = {k: v for k, v in state.items() if k.startswith(last) == bool(stage)}
        save(tmp_path / f"step_1/pp{stage}", {"model": part, "optimizer": {"lr": 0.1}})
    check_placements(tmp_path / "step_1", toml, check_words(tmp_path / "step_1", toml))
    shutil.copytree(tmp_path / "step_1/pp1", tmp_path / "step_1/pp2")
    opening_fails(ModelError, "both pp1 and pp2 hold model", tmp_path / "step_1", config=toml)
    shutil.rmtree(tmp_path / "step_1/pp1")
    opening_fails(ModelError, "has a stage pp2 but no pp1", tmp_path / "step_1", config=toml)
    (tmp_path / "step_1/pp1").mkdir()
    opening_fails(ModelError, r"pp1 holds no \.metadata", tmp_path / "step_1", config=toml)


def test_latest_link_is_followed(folder: Path, toml: Path) -> None:
    (folder.parent / "latest").symlink_to("step_5")
    for path in (folder.parent, folder.parent / "latest", str(folder)):
        with LLM(path, config=toml) as llm:
            assert llm.name == str(folder.resolve())
    (folder.parent / "latest").unlink()
    (folder.parent / "latest").symlink_to("step_6")
    for path in (folder.parent, folder.parent / "latest"):
        with pytest.raises(ModelError, match="latest links to 'step_6', which does not exist"):
            LLM(path, config=toml)
    (folder.parent / "step_6").mkdir()
    opening_fails(ModelError, r"step_6, which holds no \.metadata", folder.parent, config=toml)


def test_only_model_tensors_are_read(folder: Path, toml: Path, tmp_path: Path) -> None:
    state = {
        "model": kempner_reference.make().state_dict(),
        "optimizer": {"m": torch.ones(9), "lr": 0.1},
    }
    apart = save(tmp_path / "apart", state, single_file_per_rank=False)
    written = pickle.loads((apart / ".metadata").read_bytes()).storage_data
    for index, place in written.items():
        if index.fqn.startswith("optimizer"):
            (apart / place.relative_path).unlink()
    check_words(apart, toml)


def test_wake_rereads_same_bits_and_detects_changed_files(
    folder: Path, toml: Path, tmp_path: Path
) -> None:
    with LLM(folder, config=toml) as llm:
        before = words(llm)
        llm.sleep(weights=True)
        llm.wake()
        assert words(llm) == before
        llm.sleep(weights=True)
        other = save(tmp_path / "other", {"model": kempner_reference.make(seed=1).state_dict()})
        shutil.copy(other / "__0_0.distcp", folder)
        with pytest.raises(ModelChanged, match="changed since the model was opened"):
            llm.wake()


def test_tokenizer_and_eos_come_from_toml(folder: Path, tmp_path: Path) -> None:
    tokenizer = toy_tokenizers.byte_level().hf
    tokenizer.save_pretrained(tmp_path / "tok")
    size = len(tokenizer)
    folder = save(tmp_path / "big", {"model": kempner_reference.make(vocab_size=size).state_dict()})
    extra = f"[data]\ntokenizer_path = '{tmp_path / 'tok'}'"
    toml = kempner_reference.write_toml(tmp_path / "big.toml", extra, vocab_size=size)
    with LLM(folder, config=toml) as llm:
        assert llm.info()["eos_ids"] == [tokenizer.eos_token_id]
        (result,) = llm.generate("the quick", SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
        assert len(result.outputs[0].token_ids) == 2
    with LLM(
        folder, config=kempner_reference.write_toml(tmp_path / "n.toml", vocab_size=size)
    ) as llm:
        assert llm.info()["eos_ids"] == []
        with pytest.raises(InvalidRequest, match="tokenizer"):
            llm.generate("the quick")


def test_generate_command_accepts_checkpoint_and_toml(
    folder: Path, toml: Path, tmp_path: Path
) -> None:
    def run(*options: str) -> Any:
        ids = ["--ids", " ".join(map(str, IDS)), "--max-tokens", "6", "--temperature", "0"]
        return CliRunner().invoke(app, ["generate", "--model", str(folder), *ids, *options])

    done = run("--config", str(toml), "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["token_ids"] == expected()[0]
    (tmp_path / "bad.toml").write_text("[model")
    for options, named in (
        ([], "holds no config"),
        (["--config", str(tmp_path / "bad.toml")], "is not TOML"),
        (["--config", str(tmp_path / "none.toml")], "can't read"),
        (["--config", "a/b/c"], "not a hub id"),
    ):
        done = run(*options)
        assert (done.exit_code, done.stdout) == (1, "")
        assert named in done.stderr.splitlines()[-1]


# transformers configs.


@pytest.mark.parametrize("wrap", ["", "model.", "app.model."])
@pytest.mark.parametrize("inside", ["", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_tensor_names_are_found_under_common_wrappers(
    tmp_path: Path, wrap: str, inside: str, name: str
) -> None:
    module = toys.make_toy(name)
    state = {f"{wrap}{inside}{key}": value for key, value in module.state_dict().items()}
    folder = save(tmp_path / "step", {**state, "optimizer.m": torch.ones(3), "step": 7})
    with LLM(folder, config=module.config) as llm, LLM(module) as live:
        assert words(llm) == words(live)


def test_config_may_be_a_folder_or_a_file(tmp_path: Path) -> None:
    module = toys.make_toy("qwen3", dtype=torch.bfloat16)
    module.generation_config.eos_token_id = [5, 6]
    module.save_pretrained(tmp_path / "hf")
    with LLM(tmp_path / "hf") as llm:
        right = words(llm)
    folder = save(tmp_path / "step", {"model": module.state_dict()})
    for config in (tmp_path / "hf", str(tmp_path / "hf/config.json")):
        with LLM(folder, config=config) as llm:
            assert llm.info()["dtype"] == "bfloat16"
            assert llm.info()["eos_ids"] == [5, 6]
            assert words(llm) == right  # the same bits as from the folder


def test_tied_lm_head_may_be_missing_but_must_be_equal(tmp_path: Path) -> None:
    module = toys.make_toy("llama", tie_word_embeddings=True)
    state = module.state_dict()
    with LLM(module) as live:
        right = words(live)
    for number, left_out in enumerate((None, "lm_head.weight", "model.embed_tokens.weight")):
        kept = {k: v for k, v in state.items() if k != left_out}
        with LLM(save(tmp_path / str(number), {"model": kept}), config=module.config) as llm:
            assert words(llm) == right
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    folder = save(tmp_path / "unequal", {"model": state})
    for placement in (None, Offload(weights=(0, 0, 100))):
        with pytest.raises(ModelError, match=r"lm_head\.weight is shared .* differ"):
            LLM(folder, config=module.config, placement=placement)
    folder = save(tmp_path / "step", {"model": kempner_reference.make().state_dict()})
    toml = kempner_reference.write_toml(tmp_path / "x.toml", tie_embeddings=True)
    opening_fails(ModelError, r"output_head\.proj\.weight is shared .* differ", folder, config=toml)


# Placements.


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": dict(qk_norm=True),
    "ernie": dict(num_experts=3, moe_frequency=2),
    "packed": dict(num_experts=3, moe_packed_experts=True, moe_router="sigmoid_topk"),
    "starcoder": dict(norm_type="layernorm", activation="gelu"),
}
FAST = {("packed", "auto")}


@pytest.mark.parametrize(
    ("kind", "dtype"), slow_but(FAST, itertools.product(KINDS, ("auto", "bfloat16")))
)
def test_every_placement_gives_same_tokens(kind: str, dtype: str, tmp_path: Path) -> None:
    fields = KINDS[kind]
    folder = save(tmp_path / "step", {"model": kempner_reference.make(**fields).state_dict()})
    toml = kempner_reference.write_toml(tmp_path / "x.toml", **fields)
    with LLM(folder, config=toml, dtype=dtype) as llm:
        right = words(llm)
    check_placements(folder, toml, right, dtype=dtype)


@pytest.mark.slow
def test_pipeline_and_tensor_parallel_ranks_give_same_tokens(
    two_ranks: Path, tmp_path: Path
) -> None:
    fields = dict(vocab_size=51, num_experts=3, moe_frequency=2)
    toml = kempner_reference.write_toml(tmp_path / "x.toml", **fields)
    with LLM(two_ranks, config=toml) as llm:
        right = words(llm)
    for placement in (PipelineParallel(2), TensorParallel(2)):
        with LLM(two_ranks, config=toml, placement=placement) as llm:
            assert words(llm) == right


def test_transformers_config_is_passed_to_stages(tmp_path: Path) -> None:
    """The checkpoint also stores a tied tensor twice, and one tensor with transposed strides."""
    module = toys.make_toy("llama", tie_word_embeddings=True)
    state = module.state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    state[name] = state[name].t().contiguous().t()
    save(tmp_path / "step", {"model": state})
    (tmp_path / "latest").symlink_to("step")
    with LLM(module) as live:
        right = words(live)
    check_placements(tmp_path, module.config, right)


@pytest.mark.parametrize("quantization", slow_but(["int4"], ["int8", "int4"]))
def test_offloaded_quantized_checkpoint_gives_same_tokens(
    tmp_path: Path, quantization: str
) -> None:
    module = toys.make_toy("llama", hidden_size=64, intermediate_size=128)
    folder = save(tmp_path / "step", {"model": module.state_dict()})
    found = []
    for placement in (None, Offload(weights=(0, 0, 100))):
        settings = dict(config=module.config, quantization=quantization, placement=placement)
        with LLM(folder, **settings) as llm:
            found.append(words(llm))
            if placement is None:
                llm.sleep(weights=True)
                llm.wake()
                assert words(llm) == found[0]
    assert found[0] == found[1]


@pytest.mark.slow
def test_mtp_layers_in_another_folder_draft_for_kempner_checkpoint(tmp_path: Path) -> None:
    """KempnerForge trains no MTP layers so far; separately saved ones draft in memory and in stages."""
    fields = dict(kempner_reference.FIELDS)
    folder = save(tmp_path / "step", {"model": kempner_reference.make().state_dict()})
    toml = kempner_reference.write_toml(tmp_path / "x.toml")
    config = transformers_config(ModelConfig(**fields))
    config.num_mtp_layers = 1
    main = transformers.AutoModelForCausalLM.from_config(config)
    beside = tmp_path / "beside"
    save_with_mtp(Toy(main, random_mtp(main, 1)), beside)
    with LLM(folder, config=toml) as llm:
        right = words(llm)
    drafted = []
    for placement in (None, staged()):
        draft: dict[str, Any] = dict(draft=Mtp(beside), num_draft_tokens=2)
        with LLM(folder, config=toml, placement=placement, **draft) as llm:
            assert words(llm) == right
            stats = llm.stats()["draft"]
            drafted.append((stats["drafted"], stats["accepted"], stats["errors"]))
            assert llm.info()["mtp_layers"] == 1
    assert drafted[0] == drafted[1] and drafted[0][0] > 0 and drafted[0][2] == 0
    for placement in (None, staged()):
        with pytest.raises(NotSupported, match=r"num_mtp_layers is None in the config of .*/step"):
            LLM(folder, config=toml, draft="mtp", placement=placement)
    other = kempner_reference.write_toml(tmp_path / "y.toml", vocab_size=49)
    smaller = save(tmp_path / "o", {"model": kempner_reference.make(vocab_size=49).state_dict()})
    with pytest.raises(InvalidRequest, match="its vocab_size is 50, but the model's is 49"):
        LLM(smaller, config=other, draft=Mtp(beside))
    with pytest.raises(InvalidRequest, match=r"nowhere'.: must be an existing folder"):
        Mtp(tmp_path / "nowhere")
    opening_fails(InvalidRequest, "holds no config", folder, config=toml, draft=Mtp(tmp_path))
    with pytest.raises(NotSupported, match="name their folder"):
        LLM(folder, config=toml, draft=Mtp(random_mtp(main, 1)), placement=staged())


def test_changed_file_is_named_in_error(folder: Path, toml: Path) -> None:
    data, away = folder / "__0_0.distcp", Offload(weights=(0, 0, 100))
    with LLM(folder, config=toml, placement=away) as llm:
        words(llm)
        os.utime(data, (1, 1))
        with pytest.raises(TierFailed, match=r"__0_0\.distcp changed since"):
            words(llm)


# Rejected checkpoints.


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_non_floating_point_weights_are_rejected(tmp_path: Path, dtype: torch.dtype) -> None:
    module = toys.make_toy("llama")
    state = {**module.state_dict(), "model.norm.weight": torch.ones(64).to(dtype)}
    with pytest.raises(ModelError, match=r"model\.norm\.weight is .*must be floating-point"):
        LLM(save(tmp_path / "step", state), config=module.config)


def test_config_much_larger_than_checkpoint_is_rejected(tmp_path: Path) -> None:
    module = toys.make_toy("llama")
    folder = save(tmp_path / "step", module.state_dict())
    module.config.vocab_size = 10**9
    with pytest.raises(ModelError, match=r"describes [\d,]+ weights, but the .* has [\d,]+ bytes"):
        LLM(folder, config=module.config)


def test_large_stride_0_tensor_in_small_file_is_rejected(tmp_path: Path) -> None:
    module, name, rows = toys.make_toy("llama"), "model.embed_tokens.weight", 10**6
    tensor = module.state_dict()[name]
    folder = save(tmp_path / "step", module.state_dict())
    payload = saved(tensor[:1].expand(rows, -1))  # with a stride of 0
    (folder / "__9_9.distcp").write_bytes(payload)

    def grow(metadata: stored.Metadata) -> None:
        relocated(name, relative_path="__9_9.distcp", offset=0, length=len(payload))(metadata)
        size = torch.Size((rows, tensor.shape[1]))
        entry = metadata.state_dict_metadata[name]
        entry.size, entry.chunks = size, [stored.ChunkStorageMetadata(torch.Size((0, 0)), size)]

    rewrite(folder, grow)
    module.config.vocab_size = rows
    opening_fails(ModelError, "weights, but the checkpoint has", folder, config=module.config)


def test_config_is_required_for_dcp_and_rejected_otherwise(
    folder: Path, toml: Path, tmp_path: Path
) -> None:
    opening_fails(InvalidRequest, r"holds no config: config= must be .*\.toml", folder)
    with pytest.raises(ModelError, match="no model can be built from the config"):
        LLM(folder, config=transformers.T5Config())
    for other in (5, {}, {"model_type": "llama"}, {"kempner": {}}):
        with pytest.raises(InvalidRequest, match=rf"config={re.escape(str(other))}: must be"):
            LLM(folder, config=other)
    for nothing in (tmp_path / "x.yaml", "", "a/b/c", "x\0"):
        with pytest.raises(InvalidRequest, match="does not exist and is not a hub id; must be"):
            LLM(folder, config=nothing)
    module = toys.make_toy("llama")
    module.save_pretrained(tmp_path / "hf")
    for model in (None, tmp_path / "hf", module):
        with pytest.raises(InvalidRequest, match=r"only for a torch\.distributed\.checkpoint"):
            LLM(model, config=toml)
    opening_fails(ModelError, r"holds no config\.json", folder.parent)
    module.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    opening_fails(NotSupported, "quantization_config", folder, config=module.config)


def test_tensors_not_matching_config_are_named_in_error(folder: Path, tmp_path: Path) -> None:
    def refusal(**fields: Any) -> str:
        with pytest.raises(ModelError) as refused:
            LLM(folder, config=kempner_reference.write_toml(tmp_path / "y.toml", **fields))
        return str(refused.value)

    assert "lacks 9 of 30 tensors, such as layers.2.attention.k_proj" in refusal(n_layers=3)
    unused = "9 tensors are not used by the model of its config, such as model.layers.1.attention"
    assert unused in refusal(n_layers=1)
    toml = kempner_reference.write_toml(tmp_path / "y.toml", n_layers=1)
    LLM(folder, config=toml, unused_weights="ignore").close()
    assert "[48, 32], but [64, 32] by the config" in refusal(ffn_hidden_dim=64)
    assert "lacks 4 of 25 tensors" in refusal(qk_norm=True)
    with pytest.raises(ModelError, match="holds none of the model's tensors"):
        LLM(folder, config=toys.make_toy("gpt2").config)


@pytest.mark.parametrize("size", [1, 8])
def test_router_bias_size_must_match_config(tmp_path: Path, size: int) -> None:
    fields: dict[str, Any] = dict(num_experts=4, moe_top_k=2, moe_router="sigmoid_topk")
    state = kempner_reference.make(**fields).state_dict()
    name = "layers.0.mlp.router.expert_bias"
    folder = save(tmp_path / "step", {"model": state | {name: torch.zeros(size)}})
    toml = kempner_reference.write_toml(tmp_path / "x.toml", **fields)
    with pytest.raises(ModelError, match=rf"{name} is \[{size}\], but \[4\] by the config"):
        LLM(folder, config=toml)


def test_damaged_files_are_named_in_error(folder: Path, toml: Path) -> None:
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 8])
    with pytest.raises(ModelError, match=r"__0_0\.distcp is cut short: it has \d+ bytes, and"):
        LLM(folder, config=toml)
    data.write_bytes(bytes(len(whole)))
    opening_fails(ModelError, r"__0_0\.distcp: model\..* is not a tensor", folder, config=toml)
    data.unlink()
    opening_fails(ModelError, r"__0_0\.distcp is missing", folder, config=toml)
    others = pickle.dumps([1]), pickle.dumps(5)
    for damage in (b"", b"\x80\x04", b"garbage", b"\x80\x04\x85.", *others):
        (folder / ".metadata").write_bytes(damage)
        opening_fails(ModelError, r"\.metadata", folder, config=toml)


def test_safetensors_format_of_dcp_is_rejected(tmp_path: Path, toml: Path) -> None:
    state = {"model": kempner_reference.make().state_dict()}
    folder = save(tmp_path / "s", state, serialization_format=SerializationFormat.SAFETENSORS)
    opening_fails(ModelError, "is not a tensor as", folder, config=toml)


def test_chunks_must_cover_tensor_exactly_once(folder: Path, toml: Path) -> None:
    def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Change:
        def change(metadata: stored.Metadata) -> None:
            place = next(p for i, p in metadata.storage_data.items() if i.fqn == NAME)
            entry = metadata.state_dict_metadata[NAME]
            entry.chunks = []
            for offsets, sizes in boxes:
                entry.chunks.append(
                    stored.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                )
                metadata.storage_data[stored.MetadataIndex(NAME, offsets)] = place

        return change

    overlap, missing = f"chunks of {NAME} overlap", f"chunks of {NAME} are missing"
    for boxes, message in (
        ([((0, 0), (20, 32)), ((16, 0), (16, 32))], overlap),
        ([((0, 0), (32, 32)), ((0, 0), (32, 32))], overlap),
        ([((0, 0), (16, 32))], missing),
        ([((0, 0), (16, 32)), ((20, 0), (12, 32))], missing),
        (
            [((0, 0), (16, 32)), ((8, 0), (8, 32)), ((24, 0), (8, 32))],
            "overlap or do not form a grid",
        ),
        ([], missing),
        ([((1, 0), (32, 32))], "a chunk of [32, 32] begins at [1, 0]"),
        ([((0,), (32,))], "a chunk of [32] begins at [0]"),
    ):
        assert message in refusal(folder, toml, chunks(*boxes))


def test_empty_shards_are_ignored(folder: Path, toml: Path) -> None:
    def add_empty(metadata: stored.Metadata) -> None:
        empty = stored.ChunkStorageMetadata(torch.Size((32, 0)), torch.Size((0, 32)))
        metadata.state_dict_metadata[NAME].chunks += [empty, empty]

    rewrite(folder, add_empty)
    check_words(folder, toml)


def test_paths_outside_folder_are_rejected(folder: Path, toml: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "__0_0.distcp", tmp_path / "outside.distcp")
    absolute = str(tmp_path / "outside.distcp")
    beside = "../../outside.distcp", "../step_5/__0_0.distcp", "sub/../__0_0.distcp"
    for path in (absolute, *beside):
        assert "outside of its folder" in refusal(folder, toml, relocated(NAME, relative_path=path))
    for path in ("sub/none", "a\0b", ".", "x" * 5000):
        refusal(folder, toml, relocated(NAME, relative_path=path))


def test_files_may_be_symlinks_as_in_hub_cache(folder: Path, toml: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots/abc"
    snapshot.mkdir(parents=True)
    for number, name in enumerate((".metadata", "__0_0.distcp")):
        (folder / name).rename(tmp_path / f"blobs/{number}")
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    check_words(snapshot, toml)
    (snapshot / "__0_0.distcp").unlink()
    for elsewhere in ("/dev/zero", ".", "nowhere"):
        (snapshot / "__0_0.distcp").symlink_to(elsewhere)
        opening_fails(ModelError, r"__0_0\.distcp is missing", snapshot, config=toml)
        (snapshot / "__0_0.distcp").unlink()


def test_invalid_storage_entries_are_rejected(folder: Path, toml: Path) -> None:
    for fields, named in (
        (dict(length=2**30), "chunk of [32, 32]: at most"),
        (dict(offset=-1), "-1"),
        (dict(offset=2**2000), "has the invalid location"),
        (dict(length=2**63), str(2**63)),
        (dict(offset=10**12), "is cut short"),
        (dict(relative_path=5), "has the invalid location 5"),
        (dict(transform_descriptors=["zstd"]), "zstd"),
    ):
        assert named in refusal(folder, toml, relocated(NAME, **fields))
    deep = [()]
    for _ in range(300):  # as deep as pickle can write
        deep = [(deep[0],)]
    for name in ("relative_path", "transform_descriptors", "offset", "length"):
        message = refusal(folder, toml, relocated(NAME, **{name: deep[0]}))
        assert "(((" in message and len(message) < 500


def test_malformed_metadata_is_rejected(folder: Path, toml: Path) -> None:
    def set_(name: str, value: Any) -> Change:
        return lambda metadata: setattr(metadata.state_dict_metadata[NAME], name, value)

    def unhashable(metadata: stored.Metadata) -> None:
        next(i for i in metadata.storage_data if i.fqn == NAME).__dict__["fqn"] = ["a"]

    changes: list[Change] = [
        set_("size", (32, -32)),
        set_("size", "32"),
        set_("size", (True, 32)),
        set_("chunks", None),
        set_("chunks", [5]),
        set_("properties", 5),
        lambda metadata: metadata.storage_data.clear(),
        lambda metadata: setattr(metadata, "storage_data", None),
        lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
        lambda metadata: metadata.state_dict_metadata.update({3: stored.BytesStorageMetadata()}),
        lambda metadata: metadata.state_dict_metadata.update({NAME: 3}),
        lambda metadata: metadata.storage_data.update({"x": 3}),
        lambda metadata: metadata.state_dict_metadata.update({"x" * 20_000: None}),
        set_("size", (1,) * 70),
        set_("size", 2**2000),
        lambda metadata: metadata.state_dict_metadata,
    ]
    for change in changes:
        message = refusal(folder, toml, change)
        assert ".metadata" in message or "lacks" in message
    assert "has no storage entry for its chunk" in refusal(folder, toml, unhashable)


_PEAK = """
import resource, sys
from pathlib import Path
from verbatim.errors import ModelError
from verbatim.model.dcp.checkpoint import DcpCheckpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in map(Path, sys.argv[1:]):
    try:
        DcpCheckpoint(path)
    except ModelError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
_SIZE = b"ctorch\nSize\n"
_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"


@pytest.mark.slow
def test_hostile_metadata_neither_crashes_nor_exhausts_memory(tmp_path: Path) -> None:
    def number(value: int, width: int) -> bytes:
        return value.to_bytes(width, "little")

    numbers = b"(" + b"K\x01" * 200_000
    files = [
        b"})" + b"\x85" * 2_000_000 + b"Ns.",  # a deeply nested key, which C hashes recursively
        b"})" + b"\x85" * 2_000_000 + b".",
        b"Nr" + number(100_000_000, 4) + b".",  # an index of the memo
        b"\x96" + number(2**30, 8) + b".",  # a bytearray, all zeros
        b"\x8e" + number(2**62, 8) + b".",
        b"\x95" + number(2**40, 8) + b".",
        b"]" + numbers + b"eq\x00" + (_SIZE + b"h\x00\x85R") * 2_000 + b".",  # each makes a copy
        numbers + b"tq\x00" + (_CLASS + b"h\x00\x81") * 2_000 + b".",
        numbers + b"tq\x00" + (_SIZE + b"h\x00\x85R") * 2_000 + b".",
        b"I" + b"9" * 1_000_000 + b"\n.",
    ]
    for i, data in enumerate(files):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / ".metadata").write_bytes(b"\x80\x05" + data)
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, *sorted(tmp_path.glob("[0-9]"))],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *refusals, peak_kb = done.stdout.splitlines()
    assert len(refusals) == len(files), done.stdout
    assert int(peak_kb) < 400_000


# Code that must not run.


class _Runs:
    """An object that is unpickled as a call."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


class _Wakes(stored.TensorProperties):
    """A subclass of a harmless class that runs its own code when its state is set."""

    def __setstate__(self, state: Any) -> None:
        Path(state["marker"]).touch()

    def __getstate__(self) -> Any:
        return {"marker": self.marker}


def attacks(marker: Path) -> dict[str, Change]:
    touch = _Runs(os.system, f"touch {marker}")
    wakes = _Wakes()
    wakes.marker = str(marker)

    def hidden_in(name: str, value: Any) -> Change:
        return lambda metadata: setattr(metadata, name, value)

    def properties(metadata: stored.Metadata) -> None:
        metadata.state_dict_metadata[NAME].properties = wakes

    return {
        "alone": lambda metadata: touch,
        "in what the planner noted": hidden_in("planner_data", {"a": (touch,)}),
        "in the name of the folder": hidden_in("storage_meta", stored.StorageMeta(touch)),
        "eval": hidden_in("version", _Runs(eval, f"open({str(marker)!r}, 'w')")),
        "a class of torch": hidden_in("version", _Runs(torch.load, str(marker))),
        "a subclass": properties,
    }


@pytest.mark.parametrize("name", attacks(Path()))
def test_malicious_metadata_is_rejected_without_running_code(
    folder: Path, toml: Path, tmp_path: Path, name: str
) -> None:
    marker = tmp_path / "marker"
    rewrite(folder, attacks(marker)[name])
    with pytest.raises(ModelError, match=r"\.metadata is refused: it refers .*nothing was exec"):
        LLM(folder, config=toml)
    assert not marker.exists()


def test_enum_pickled_with_getattr_is_accepted(folder: Path, toml: Path) -> None:
    with LLM(folder, config=toml) as llm:
        expected = words(llm)
    kind = stored.TensorProperties().__getstate__()[3].__class__  # as Python 3.11.2 does it
    rewrite(
        folder, lambda m: setattr(m, "version", _Runs(getattr, kind, "TORCH_CONTIGUOUS_FORMAT"))
    )
    assert b"getattr" in (folder / ".metadata").read_bytes()
    with LLM(folder, config=toml) as llm:
        assert words(llm) == expected


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.metadata", "dataclass"),
        ("torch", "load"),
        ("torch", "float32.__class__"),
        ("pathlib", "os"),
    ],
)
def test_metadata_with_names_outside_allowlist_is_rejected(
    tmp_path: Path, module: str, name: str
) -> None:
    text = b"".join(b"\x8c" + bytes([len(s)]) + s.encode() for s in (module, name))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + text + b"\x93.")
    with pytest.raises(ModelError, match="which DCP does not need"):
        DcpCheckpoint(tmp_path)


@pytest.mark.parametrize("state", ["}\x8c\x01xK\x01s", "N}\x8c\x01xK\x01s\x86"])
@pytest.mark.parametrize(
    "name", ["torch.distributed.checkpoint.metadata\nMetadata", "torch\nSize", "torch\nfloat32"]
)
def test_metadata_cannot_set_class_attributes(tmp_path: Path, name: str, state: str) -> None:
    # BUILD on a named object itself, rather than on an instance, would set attributes of a class.
    data = b"\x80\x04c" + name.encode() + b"\n" + state.encode("latin-1") + b"b."
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ModelError):
        DcpCheckpoint(tmp_path)
    assert not hasattr(tuple, "x")
    assert not hasattr(stored.Metadata, "x")


def test_class_names_of_other_python_and_torch_versions_are_accepted(
    folder: Path, toml: Path
) -> None:
    data = pickle.dumps(pickle.loads((folder / ".metadata").read_bytes()), protocol=2)
    for old, new in (
        (b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath"),
        (
            b"ctorch.distributed.checkpoint.metadata\nTensorProperties",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties",
        ),
        (
            b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING",
        ),
    ):
        assert old in data
        data = data.replace(old, new)
    (folder / ".metadata").write_bytes(data)
    check_words(folder, toml)


def test_malicious_tensor_data_is_rejected_without_running_code(
    folder: Path, toml: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    evil = _Runs(os.system, f"touch {marker}")
    for write in (lambda f: torch.save(evil, f), lambda f: pickle.dump(evil, f, protocol=2)):
        with open(folder / "__9_9.distcp", "wb") as file:
            write(file)
        size = (folder / "__9_9.distcp").stat().st_size
        rewrite(folder, relocated(NAME, relative_path="__9_9.distcp", offset=0, length=size))
        opening_fails(ModelError, r"__9_9\.distcp: .* (posix|other contents)", folder, config=toml)
    assert not marker.exists()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def zipped(*entries: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return file.getvalue()


def entries_of(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return {name: file.read(name) for name in file.namelist()}


RIGHT = torch.arange(1024.0).view(32, 32)
NAMED = entries_of(saved(RIGHT))
_BYTEARRAY = b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x40\x85R."


def grown(name: bytes, size: bytes) -> bytes:
    """Return `RIGHT` as saved, but with a described size that exceeds its data."""
    described = NAMED["archive/data.pkl"]
    assert described.count(name) == 1
    return zipped(*(NAMED | {"archive/data.pkl": described.replace(name, size)}).items())


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (saved(RIGHT[:8].clone()), r"float32 \[8, 32\], but \.metadata has .*float32 \[32, 32\]"),
        (saved(torch.zeros(40, 40)), r"float32 \[40, 40\], but \.metadata"),
        (saved(RIGHT.bool()), "bool"),
        (saved(RIGHT.long()), "int64"),
        (saved(RIGHT.to(torch.complex64)), "complex64"),
        (saved(RIGHT.bfloat16()), "bfloat16"),
        (saved(RIGHT.to_sparse()), "_rebuild_sparse_tensor"),
        (saved(RIGHT.to("meta")), "_rebuild_meta_tensor"),
        (saved([RIGHT]), "other contents"),
        (saved({"a": RIGHT}), "other contents"),
        (saved(torch._neg_view(RIGHT)), "negated or conjugated"),
        (saved(RIGHT).replace(b"little", b"bigger"), "byte order"),
        (saved(RIGHT).replace(b"K\x00K K \x86", b"K\x01K K \x86"), "incomplete"),
        (saved(5), "other contents"),
        (grown(b"K K \x86", b"K\x40K \x86"), r"but \.metadata"),
        (zipped(*NAMED.items(), method=zipfile.ZIP_DEFLATED), "compressed"),
        (zipped(("archive/data.pkl", _BYTEARRAY)), "bytearray"),
        (zipped(*NAMED.items(), ("b/data.pkl", _BYTEARRAY)), "other contents"),
        (b"more" + saved(RIGHT), "other contents"),
        (b"", "other contents"),
    ],
)
def test_data_other_than_the_described_tensor_is_rejected(
    folder: Path, toml: Path, payload: bytes, why: str
) -> None:
    (folder / "__9_9.distcp").write_bytes(payload)
    rewrite(folder, relocated(NAME, relative_path="__9_9.distcp", offset=0, length=len(payload)))
    with pytest.raises(ModelError, match=rf"__9_9\.distcp: {NAME} is not a tensor .*{why}"):
        LLM(folder, config=toml)


@pytest.mark.parametrize(
    "tensor",
    [
        RIGHT,
        RIGHT.t(),
        torch.empty(0, 3),
        torch.nn.Parameter(RIGHT),
        RIGHT.bfloat16(),
        RIGHT.half(),
        RIGHT.double(),
        torch.tensor(3.0),
        torch.ones(4, 4).to(torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("checksums", [True, False])
def test_tensor_variants_saved_by_torch_are_read(
    tmp_path: Path, tensor: torch.Tensor, checksums: bool
) -> None:
    try:
        torch.serialization.set_crc32_options(checksums)
        folder = save(tmp_path / "step", {"before": RIGHT, "it": tensor, "z": RIGHT})
    finally:
        torch.serialization.set_crc32_options(True)
    read = DcpCheckpoint(folder).tensor("it")
    assert read.is_contiguous() and torch.equal(read.float(), tensor.detach().float())


def test_training_state_is_never_unpickled(folder: Path, toml: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save(_Runs(os.system, f"touch {marker}"), folder / "train_state.pt")

    def poison(metadata: stored.Metadata) -> None:  # nor as bytes saved beside the tensors
        index = next(i for i in metadata.storage_data if i.fqn == "optimizer.lr")
        size = (folder / "train_state.pt").stat().st_size
        place = replace(
            metadata.storage_data[index], relative_path="train_state.pt", offset=0, length=size
        )
        metadata.storage_data[index] = place

    rewrite(folder, poison)
    check_words(folder, toml)
    assert not marker.exists()


def test_offload_is_planned_for_dcp_folder(folder: Path, toml: Path) -> None:
    forecast = plan_offload(
        ModelSource(folder, config=toml), Offload(policy=None), engine_options()
    )
    assert forecast.plan.weights[2] == 0  # it fits in memory


def test_overlong_and_invalid_names_are_not_checkpoints(tmp_path: Path) -> None:
    for name in ("a" * 300, "x" * 5000, "a\0b", str(tmp_path / ("a" * 300))):
        assert find_dcp(name) is None
        with pytest.raises(ModelError):
            LLM(name)


def test_unreadable_folder_is_named_in_error(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    opening_fails(ModelError, "can't be read: Permission denied", tmp_path)


def test_find_dcp_finds_only_checkpoint_folders(tmp_path: Path, folder: Path) -> None:
    assert find_dcp(tmp_path) is None
    assert find_dcp("org/name") is None
    assert find_dcp(folder) == folder.resolve()
    (tmp_path / "pp1").mkdir()
    assert find_dcp(tmp_path) == tmp_path.resolve()
