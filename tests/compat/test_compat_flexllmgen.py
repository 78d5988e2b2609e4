"""The FlexLLMGen API: its documented calls, and regression tests for defects of the original."""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import re
import runpy
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.pairwise import parametrize_combinations, slow_but
from support.toy_tokenizers import byte_level
from support.toys import make_toy, random_ids
from verbatim import (
    LLM,
    EngineClosed,
    InvalidRequest,
    ModelError,
    NotSupported,
    Offload,
    PromptTooLong,
    RequestFailed,
    SamplingParams,
    TierFailed,
    VerbatimError,
)
from verbatim.compat import flexllmgen
from verbatim.compat.flexllmgen import (
    CompressionConfig,
    ExecutionEnv,
    OptConfig,
    OptLM,
    Policy,
    flex_opt,
    get_opt_config,
)
from verbatim.compat.flexllmgen.config import find_model
from verbatim.compat.flexllmgen.model import Clock, Timings
from verbatim.compat.flexllmgen.policy import options_of
from verbatim.quantization.formats import Quantization

PAD = 1
OPT = dict(pad_token_id=PAD, bos_token_id=2, eos_token_id=2)
ROWS = [random_ids(n, n) for n in (3, 9, 5, 17, 2)]
WIDTH = 17

# The documented example, in which the test replaces the model's name.
SEED = """
import numpy as np
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("facebook/opt-30b", padding_side="left")
tokenizer.add_bos_token = False
prompts = ["Question: What is the capital of France?\\nAnswer:"]
inputs = tokenizer(prompts, padding="max_length", max_length=128)
output_ids = model.generate(
inputs.input_ids,
max_new_tokens=32,
do_sample=True,
temperature=0.7,
stop=tokenizer("\\n").input_ids[0]
)
outputs = tokenizer.batch_decode(output_ids, skip_special_tokens=True)
"""


def policy(batch=2, batches=2, weights=(0, 0), **changes):
    return Policy(batch, batches, *weights, 100, 0, 100, 0, **changes)


def config4(**changes):
    return CompressionConfig(
        **{"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False, **changes}
    )


def saved(folder, name, **changes):
    make_toy(name, **changes).save_pretrained(folder)
    return str(folder)


def padded(rows, width, pad):
    return np.array([[pad] * (width - len(row)) + row for row in rows])


def cut_at(row, stop, pad):
    """Return a row of new ids cut after its first stop token and padded."""
    end = row.index(stop) + 1 if stop in row else len(row)
    return row[:end] + [pad] * (len(row) - end)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("opt"), "opt", **OPT)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model without a pad id, as GPT-2: its EOS is used for padding."""
    return saved(tmp_path_factory.mktemp("gpt2"), "gpt2", pad_token_id=None, eos_token_id=0)


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    """A model folder with a tokenizer."""
    root = tmp_path_factory.mktemp("worded")
    hf = copy.deepcopy(byte_level().hf)
    hf.add_special_tokens({"pad_token": "<pad>"})
    hf.save_pretrained(root / "opt-toy")
    sizes = {"vocab_size": len(hf), "pad_token_id": hf.pad_token_id}
    saved(root / "opt-toy", "opt", **OPT | sizes)
    return root / "opt-toy"


def new_ids(model, count=12, **options):
    """Return the new ids of ROWS."""
    return model.generate(ROWS, count, **options)[:, WIDTH:].tolist()


@pytest.fixture(scope="module")
def opened(folder):
    with OptLM(folder, policy=policy()) as model:
        yield model


@pytest.fixture(scope="module")
def greedy(folder):
    """12 greedy tokens of each of ROWS, without offloading."""
    with LLM(folder, kv_memory="4MB") as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        return [r.outputs[0].token_ids for r in llm.generate(ROWS, params)]


# ---- documented calls


def test_documented_example_generates_same_tokens_as_unpadded_prompt(worded):
    with OptLM(str(worded), policy=policy(1, 1)) as model:
        scope = {"model": model}
        torch.manual_seed(3)
        exec(SEED.replace("facebook/opt-30b", str(worded)), scope)
        tokenizer, ids = scope["tokenizer"], scope["output_ids"]
        assert ids.shape == (1, 160) and ids.dtype == np.int32
        assert (ids[0, :128] == scope["inputs"].input_ids[0]).all()
        assert ids[0, 0] == model.pad_token_id
        torch.manual_seed(3)
        bare = tokenizer(scope["prompts"]).input_ids
        stop = tokenizer("\n").input_ids[0]
        alone = model.generate(bare, 32, True, 0.7, stop, seed=3)
        assert (model.generate(bare, 32, True, 0.7, "\n", seed=3) == alone).all()
        with pytest.raises(InvalidRequest, match="stop='the fox': must be one token, not"):
            model.generate(bare, stop="the fox")
        torch.manual_seed(3)
        alone = model.generate(bare, 32, True, 0.7, stop)
    assert len(bare[0]) < 128 and (alone[0, len(bare[0]) :] == ids[0, 128:]).all()
    assert scope["outputs"][0].startswith("Question: What is the capital of France?\nAnswer:")


@pytest.mark.parametrize("name", ["folder", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_padding_to_128_changes_no_token(name, request):
    with OptLM(request.getfixturevalue(name), policy=policy()) as model:
        pad = model.pad_token_id
        assert pad == {"folder": PAD, "gpt2": 0}[name]
        wide = model.generate(padded(ROWS, 128, pad), 16)
        for row, ids in enumerate(ROWS):
            assert (model.generate([ids], 16)[0, len(ids) :] == wide[row, 128:]).all()
        drawn = model.generate(padded(ROWS, 128, pad), 16, do_sample=True, seed=4)
        assert (model.generate(ROWS, 16, True, seed=4)[:, WIDTH:] == drawn[:, 128:]).all()
        assert (drawn[:, 128:] != wide[:, 128:]).any()


@pytest.mark.parametrize("weights", [(0, 0), (30, 40)], ids=["disk", "spread"])
def test_weights_are_read_once_per_step_for_any_number_of_batches(folder, weights):
    read = {}
    for batches, rows in ((1, ROWS[:1]), (4, ROWS[:4])):
        with OptLM(folder, policy=policy(1, batches, weights, overlap=False)) as model:
            runner = model.llm.engine.runner
            forwards, before = runner.num_forwards, runner.trace.nbytes("wait weights")
            model.generate(rows, 6)
            assert runner.num_forwards - forwards == 6
            read[batches] = (runner.trace.nbytes("wait weights") - before) / 6
    assert read[1] == read[4] > 0


def test_cut_gen_len_limits_forwards_and_pads_remaining_columns(opened, greedy):
    forwards = opened.llm.engine.runner.num_forwards
    out = opened.generate(ROWS[:4], 16, cut_gen_len=4)
    assert opened.llm.engine.runner.num_forwards - forwards == 4
    assert out.shape == (4, WIDTH + 16)
    assert out[:, WIDTH : WIDTH + 4].tolist() == [row[:4] for row in greedy[:4]]
    assert (out[:, WIDTH + 4 :] == PAD).all()
    assert len(opened.timings.costs) == 4 and opened.timings.projected_s > opened.timings.total_s
    whole = opened.generate(ROWS, 12, cut_gen_len=99)
    assert (whole[:, :WIDTH] == padded(ROWS, WIDTH, PAD)).all() and whole.flags.owndata
    assert (whole[:, WIDTH:] == greedy).all() and opened.timings.projected_s is None
    opened.generate(ROWS[:2], 9, cut_gen_len=1)  # no decode steps to project from
    assert opened.timings.projected_s == opened.timings.prefill.wall_s
    assert opened.timings.decode.num_steps == 0


def test_breakdown_mode_keeps_tokens_and_reports_load_compute_store_times(opened, greedy):
    before = opened.llm.engine.runner.timings()
    out = opened.generate(ROWS, 12, debug_mode="breakdown")
    assert (out[:, WIDTH:] == greedy).all()
    spent, found = opened.llm.engine.runner.timings(), opened.timings
    for name in ("load_s", "compute_s", "store_s"):
        both = getattr(found.prefill, name) + getattr(found.decode, name)
        assert both == pytest.approx(getattr(spent, name) - getattr(before, name))
    for phase in (found.prefill, found.decode):
        parts = phase.load_s + phase.compute_s + phase.store_s + phase.other_s
        assert parts == pytest.approx(phase.wall_s) and phase.compute_s > 0
    assert found.prefill.num_steps + found.decode.num_steps == len(found.costs)
    assert sum(found.costs) == pytest.approx(found.total_s)
    opened.generate(ROWS, 2)
    assert opened.timings.prefill.load_s is None and opened.timings.prefill.other_s is None


def test_breakdown_mode_without_offload_raises_not_supported(folder):
    message = r"breakdown.*not offloaded.*placement=Offload"
    with LLM(folder, kv_memory="4MB") as llm, pytest.raises(NotSupported, match=message):
        OptLM(llm).generate(ROWS, 2, debug_mode="breakdown")


def test_fewer_batch_mode_runs_first_block_and_projects_total_time(opened, greedy):
    out = opened.generate(ROWS, 12, debug_mode="fewer_batch")
    assert out.shape == (5, WIDTH + 12)
    assert out[:4, WIDTH : WIDTH + 5].tolist() == [row[:5] for row in greedy[:4]]
    assert (out[:4, WIDTH + 5 :] == PAD).all() and (out[4, WIDTH:] == PAD).all()
    found = opened.timings
    assert found.num_rows == 4 and len(found.costs) == 5
    decode = found.decode.wall_s * 11 / 4
    assert found.projected_s == pytest.approx((found.prefill.wall_s + decode) * 5 / 4)
    opened.generate(ROWS[:2], 3, debug_mode="fewer_batch")
    assert opened.timings.projected_s is None and opened.timings.num_rows == 2


# ---- defects of the original


@parametrize_combinations(
    shape=[(4, 1), (2, 2), (1, 4), (2, 1)], cpu=[True, False], overlap=[True, False]
)
def test_policy_and_block_shape_do_not_change_tokens(folder, greedy, shape, cpu, overlap):
    options = dict(overlap=overlap, cpu_cache_compute=cpu, sep_layer=False, pin_weight=False)
    settings = Policy(*shape, 30, 40, 0, 100, 0, 100, **options)
    with OptLM(folder, policy=settings) as model:
        assert new_ids(model) == greedy


def test_stop_token_id_0_ends_rows_and_is_kept(folder):
    rows = ROWS * 6
    with OptLM(folder, policy=policy(15, 2)) as model:
        free = model.generate(rows, 40, True, 1.3, seed=11)[:, WIDTH:].tolist()
        assert sum(0 in row[:-1] for row in free) > 1  # otherwise the stop is not tested
        out = model.generate(rows, 40, True, 1.3, stop=0, seed=11)[:, WIDTH:].tolist()
        assert out == [cut_at(row, 0, PAD) for row in free] != free
        again = model.generate(rows, 40, True, 1.3, np.int64(0), seed=11)
        assert again[:, WIDTH:].tolist() == out


def test_output_width_is_kept_when_all_rows_stop_early(opened, greedy):
    out = opened.generate([ROWS[0]], 12, stop=greedy[0][0])
    assert out.shape == (1, 3 + 12) and out[0, 3:].tolist() == [greedy[0][0]] + [PAD] * 11


def test_offload_folder_is_left_empty(folder, tmp_path, greedy):
    env = ExecutionEnv.create(tmp_path / "new" / "folder")
    assert env.disk.path == tmp_path / "new" / "folder"
    model = OptLM(folder, env, None, Policy(2, 2, 0, 0, 0, 0, 0, 0))
    assert model.llm.engine.runner.offload.disk == env.disk.path
    assert new_ids(model) == greedy
    assert list(env.disk.path.iterdir()) == []  # also while the model is open
    env.close_copy_threads()
    env.close_copy_threads()
    assert list(env.disk.path.iterdir()) == []
    with pytest.raises(EngineClosed):
        model.generate(ROWS, 2)


def test_execution_env_accepts_device_classes_of_original(folder, tmp_path, greedy):
    gpu, cpu = flex_opt.TorchDevice("cuda:0"), flex_opt.TorchDevice("cpu")
    disk = flex_opt.TorchDisk(str(tmp_path))
    mixed = flex_opt.TorchMixedDevice([gpu, cpu, disk])
    env = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=mixed)
    assert (gpu.name, cpu.name, disk.path) == ("gpu", "cpu", tmp_path)
    with flex_opt.OptLM(folder, env, None, policy(overlap=False)) as model:
        assert new_ids(model) == greedy
    with pytest.raises(InvalidRequest, match="name='mps'"):
        flex_opt.TorchDevice("mps")


def test_unusable_offload_dir_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="file' is a file"):
        ExecutionEnv.create(str(tmp_path / "file"))
    with pytest.raises(TierFailed, match="disk tier: can't make the folder"):
        ExecutionEnv.create(tmp_path / "file" / "below")
    assert ExecutionEnv.create(tmp_path).mixed.name == "mixed"
    for wrong in (None, "", 3):
        with pytest.raises(InvalidRequest, match="offload_dir="):
            ExecutionEnv.create(wrong)


# ---- randomness, masks


def test_temperature_0_is_greedy_and_temperature_without_sampling_is_ignored(opened, greedy):
    state = torch.get_rng_state()
    assert new_ids(opened, do_sample=True, temperature=0) == greedy
    assert new_ids(opened, temperature=1.7) == greedy
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn


def test_list_and_read_only_masks_agree_and_single_pad_row_is_a_prompt(gpt2):
    with OptLM(gpt2, policy=policy()) as model:
        masked = model.generate([[0, *ROWS[1]]], 6, attention_mask=[[1] * 10])
        mask = np.array([[0, *[1] * 10]])
        mask.flags.writeable = False
        again = model.generate(np.array([[0, 0, *ROWS[1]]]), 6, attention_mask=mask)
        assert (again[:, 11:] == masked[:, 10:]).all()
        empty = model.generate([[5], [0]], 6)[1]  # its one token is the pad
        assert (empty == model.generate([[0]], 6, attention_mask=[[1]])[0]).all()


def test_pad_token_id_comes_from_config_tokenizer_or_eos(folder):
    hf = copy.deepcopy(byte_level().hf)
    with LLM(make_toy("gpt2", pad_token_id=None, eos_token_id=5), tokenizer=hf) as llm:
        assert OptLM(llm).pad_token_id == 5
        hf.pad_token = "<unk>"
        assert OptLM(llm).pad_token_id == hf.pad_token_id != 5
    numbers = dict(num_hidden_layers=3, hidden_size=64, n_head=4, ffn_embed_dim=96)
    config = OptConfig(name=folder, vocab_size=128, max_seq_len=256, pad_token_id=9, **numbers)
    with OptLM(config, policy=policy()) as model:
        assert model.pad_token_id == 9 and model.config is config
        assert model.generate([[4, 5], [6]], 1)[1, 0] == 9


# ---- invalid input


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([], "has no rows"),
        (np.zeros((0, 4), int), "has no rows"),
        (np.zeros((2, 0), int), r"inputs\[0\] is empty"),
        ([[3], []], r"inputs\[1\] is empty"),
        ([3, 4], r"inputs\[0\]=3: must be a list"),
        (np.array([3, 4]), r"\[2\].*\[batch, prompt_len\]"),
        (np.zeros((1, 2, 3), int), r"\[1, 2, 3\].*\[batch, prompt_len\]"),
        ([[[3]]], r"inputs\[0\]=\[3\]: must be an integer"),
        (np.ones((1, 3)), "float64"),
        (torch.ones(1, 3, dtype=torch.bool), "bool"),
        (torch.ones(1, 3, dtype=torch.int64, device="meta"), "int64"),
        ([[3, 4.0]], r"inputs\[0\]=4.0"),
        ([[3, True]], r"inputs\[0\]=True"),
        ([[3, -1]], r"inputs\[0\]=-1"),
        ([[3], [4, 128]], r"inputs\[1\] holds id 128, which is outside 0 to 127"),
        ([[2**40]], r"inputs\[0\]=1099511627776: must be an integer, 0 to 2147483647"),
        ("words", "inputs is str"),
        (["words"], r"inputs\[0\]='words'"),
        (None, "inputs is NoneType"),
        ({0: [3]}, "inputs is dict"),
    ],
    ids=lambda value: value.replace("\\", "") if isinstance(value, str) else "x",
)
def test_invalid_inputs_are_rejected_before_any_forward(opened, inputs, said):
    forwards = opened.llm.engine.runner.num_forwards
    with pytest.raises(InvalidRequest, match=said):
        opened.generate(inputs, 2)
    assert opened.llm.engine.runner.num_forwards == forwards


@pytest.mark.parametrize(
    "arguments",
    [
        dict(max_new_tokens=-1),
        dict(max_new_tokens=True),
        dict(do_sample=1),
        dict(temperature=-0.1),
        dict(temperature=float("inf"), do_sample=True),
        dict(stop=[3]),
        dict(stop=-1),
        dict(stop=128),
        dict(stop="\n"),
        dict(debug_mode="x"),
        dict(debug_mode=True),
        dict(debug_mode=["breakdown"]),
        dict(cut_gen_len=0),
        dict(verbose=-1),
        dict(seed=-1),
        dict(attention_mask=[[1, 1]]),
        dict(attention_mask=[[1, 2, 1]]),
        dict(attention_mask=[[1, 1, 0]]),
        dict(attention_mask=[[1, 0, 1]]),
        dict(attention_mask=[[0, 0, 0]]),
        dict(attention_mask=[[1], [1, 1]]),
        dict(attention_mask="mask"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(opened, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        opened.generate([[3, 4, 5]], **arguments)


def test_prompt_over_length_limit_is_rejected_and_pads_do_not_count(opened):
    limit = opened.llm.max_length
    with pytest.raises(PromptTooLong, match=str(limit)):
        opened.generate([ROWS[1]], limit - 8)
    wide = opened.generate(padded([ROWS[1]], limit + 20, PAD), 2)
    assert wide.shape == (1, limit + 22)
    assert (wide[0, -2:] == opened.generate([ROWS[1]], 2)[0, -2:]).all()


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint16, np.int64], ids=lambda k: k.__name__)
def test_all_integer_types_are_accepted(opened, kind):
    plain = opened.generate([[3, 4, 5]], 4)
    assert (opened.generate(np.array([[3, 4, 5]], kind), kind(4)) == plain).all()
    assert (opened.generate([np.array([3, 4, 5], kind)], 4) == plain).all()
    assert (opened.generate(([kind(3), 4, 5],), 4) == plain).all()
    assert (opened.generate(torch.tensor([[3, 4, 5]]), 4) == plain).all()


def test_zero_new_tokens_return_padded_inputs(opened):
    out = opened.generate(ROWS, 0)
    assert (out == padded(ROWS, WIDTH, PAD)).all() and opened.timings == Timings()
    with pytest.raises(InvalidRequest, match="128"):
        opened.generate([[128]], 0)


# ---- policies


def test_policy_maps_to_offload_placement():
    settings = Policy(4, 8, 10, 20, 30, 40, 50, 0, overlap=False, cpu_cache_compute=True)
    assert (settings.w_disk_percent, settings.cache_disk_percent) == (70, 30)
    assert settings.act_disk_percent == 50
    shares = dict(weights=(10, 20, 70), kv=(30, 40, 30), activations=(50, 0, 50))
    order = dict(batch_size=4, micro_batches=8, overlap=False, cpu_cache_compute=True)
    placement = Offload(disk="/fast", policy=None, **shares, **order)
    sizes = {"max_sequences": 32, "max_batch_tokens": 32 * 512}
    assert options_of(settings, Path("/fast")) == {"placement": placement, **sizes}
    assert options_of(None, None) == {"placement": Offload()}


def test_block_of_300_rows_runs_in_one_forward_per_step(folder):
    with OptLM(folder, policy=policy(100, 3)) as model:
        out = model.generate([ROWS[4]] * 300, 3)
        assert model.llm.engine.runner.num_forwards == 3 and model.num_gpu_batches == 3
        assert (out == out[0]).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(gpu_batch_size=0), "gpu_batch_size=0"),
        (dict(num_gpu_batches=2.0), "num_gpu_batches=2.0"),
        (dict(num_gpu_batches=True), "num_gpu_batches=True"),
        (dict(w_gpu_percent=-1), "w_gpu_percent=-1"),
        (dict(w_cpu_percent=101), "w_cpu_percent=101"),
        (dict(w_gpu_percent=60, w_cpu_percent=50), "cent=60 and w_cpu_percent=50.* at most 100"),
        (dict(cache_gpu_percent=float("nan")), "cache_gpu_percent=nan"),
        (dict(cache_cpu_percent="40"), "cache_cpu_percent='40'"),
        (dict(act_gpu_percent=True), "act_gpu_percent=True"),
        (dict(act_cpu_percent=None), "act_cpu_percent=None"),
        (dict(overlap=1), "overlap=1"),
        (dict(sep_layer=None), "sep_layer=None"),
        (dict(pin_weight="yes"), "pin_weight='yes'"),
        (dict(cpu_cache_compute=0), "cpu_cache_compute=0"),
        (dict(attn_sparsity=0), "attn_sparsity=0"),
        (dict(attn_sparsity=1.1), "attn_sparsity=1.1"),
        (dict(attn_sparsity=0.1), r"attn_sparsity=0.1.*attention_top_k"),
        (dict(attn_sparsity=True), "attn_sparsity=True"),
        (dict(compress_weight=None), "compress_weight=None"),
        (dict(comp_weight_config=4), "comp_weight_config=4"),
        (dict(comp_cache_config=None), "comp_cache_config=None"),
    ],
    ids=lambda value: str(value).replace("\\", "") if isinstance(value, dict) else "said",
)
def test_invalid_policies_are_rejected(changes, said):
    defaults = dict(zip(inspect.signature(Policy).parameters, (2, 2, *(0,) * 6), strict=False))
    with pytest.raises(ValueError, match=said):
        Policy(**{**defaults, **changes})


def test_4_bit_cache_with_group_size_64_runs_in_groups_of_32_and_warns(folder):
    halves = config4(group_size=64, group_dim=2)
    with pytest.warns(UserWarning, match="group_size=64 is split into groups of 32"):
        wide = policy(compress_cache=True, comp_cache_config=halves)
    assert options_of(wide, None)["kv_dtype"] == "int4"
    same = policy(compress_cache=True)
    with OptLM(folder, policy=wide) as model, OptLM(folder, policy=same) as other:
        assert new_ids(model) == new_ids(other)


@pytest.mark.parametrize("debug", ["", "--debug-mode breakdown", "--cut-gen-len 3"])
def test_benchmark_runs_with_its_command_line_flags(tmp_path, capsys, debug):
    folder = saved(tmp_path / "model", "opt", vocab_size=340, **OPT)
    byte_level().hf.save_pretrained(folder)
    parser = argparse.ArgumentParser()
    flexllmgen.add_parser_arguments(parser)
    log = tmp_path / "x.log"
    flags = f"--model {folder} --offload-dir {tmp_path} --percent 0 100 100 0 100 0 {debug} --overlap no"
    flags += f" --gpu-batch-size 2 --prompt-len 40 --gen-len 6 --log-file {log}"
    timings = flexllmgen.run_flexllmgen(parser.parse_args(flags.split()))
    ran = 3 if "cut" in debug else 6
    assert (timings.num_rows, len(timings.costs)) == (2, ran)
    out = capsys.readouterr().out
    assert out.startswith("0: The longest river") and out.endswith(log.read_text())
    assert [line.split(":")[0] for line in log.read_text().splitlines()] == [
        "model size", "prefill latency", "decode latency", "total latency"
    ] + ["projected for the whole"] * (ran == 3)  # fmt: skip
    assert parser.parse_args([]).percent == [100, 0, 100, 0, 100, 0]
    with pytest.raises(SystemExit):
        parser.parse_args(["--overlap", "perhaps"])
    with pytest.raises(InvalidRequest, match="six numbers"):
        flexllmgen.run_flexllmgen(parser.parse_args([*flags.split(), "--percent", "100"]))


def test_benchmark_command_reports_errors_in_one_line(monkeypatch, capsys, tmp_path):
    flags = f"x --model {tmp_path}/none --offload-dir {tmp_path}"
    monkeypatch.setattr(sys, "argv", flags.split())
    with pytest.raises(SystemExit) as end:
        runpy.run_module("verbatim.compat.flexllmgen", run_name="__main__")
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/none" in line


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("weight", dict(num_bits=3), "num_bits=3: must be 4 or 8"),
        ("weight", dict(group_size=48), "group_size=48: must be 32 or 64 or 128"),
        ("weight", dict(group_dim=2), "group_dim=2"),
        ("weight", dict(symmetric=True), "symmetric=True"),
        ("cache", dict(group_dim=2, num_bits=16), "num_bits=16: must be 4 or 8"),
        ("cache", dict(group_dim=2, group_size=16), "group_size=16: must be 32 or 64 for 4"),
        ("cache", dict(group_dim=2, num_bits=8, group_size=32), "group_size=32: must be 64 or 128"),
        ("cache", dict(group_dim=0, group_size=32), "group_dim=0"),
        ("cache", dict(group_dim=2, group_size=32, symmetric=True), "symmetric=True"),
    ],
    ids=lambda value: str(value) if isinstance(value, str | dict) else "x",
)
def test_unsupported_compression_is_rejected_only_where_enabled(kind, changes, said):
    field = f"comp_{kind}_config"
    config = config4(**changes)
    with pytest.raises(ValueError, match=f"{field}.{said}"):
        policy(**{f"compress_{kind}": True, field: config})
    policy(**{f"compress_{kind}": False, field: config})
    off = policy(**{f"compress_{kind}": True, field: config4(**changes, enabled=False)})
    assert options_of(off, None) == options_of(policy(), None)


def test_invalid_compression_configs_are_rejected():
    wrong = dict(num_bits="4", group_size=0, group_dim=-1, symmetric=0, enabled=1)
    for name, value in wrong.items():
        with pytest.raises(InvalidRequest, match=name):
            config4(**{name: value})


def test_compression_maps_to_quantization_and_kv_dtype():
    weights = dict(compress_weight=True, comp_weight_config=config4(num_bits=8, group_size=128))
    cache = dict(compress_cache=True, comp_cache_config=config4(group_size=32, group_dim=2))
    found = options_of(policy(**weights, **cache), None)
    assert found["quantization"] == Quantization(bits=8, group_size=128)
    assert found["kv_dtype"] == "int4"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert options_of(policy(compress_weight=True), None)["quantization"] == Quantization(4, 64)
        assert options_of(policy(compress_cache=True), None)["kv_dtype"] == "int4"
        policy(comp_weight_config=config4(group_dim=0))  # not used
    with pytest.warns(UserWarning, match=r"weight_config.group_dim=0 is treated as 1") as caught:
        policy(compress_weight=True, comp_weight_config=config4(group_dim=0))
    assert len(caught) == 1


@pytest.mark.parametrize("weights", slow_but([False], [False, True]), ids=["cache", "weights"])
def test_compression_generates_same_tokens_as_equivalent_llm(folder, weights):
    settings = policy(compress_weight=weights, compress_cache=not weights)
    same = dict(quantization="int4") if weights else dict(kv_dtype="int4")
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(folder, placement=Offload(weights=(0, 0, 100)), kv_memory="4MB", **same) as llm:
        wanted = [r.outputs[0].token_ids for r in llm.generate(ROWS, params)]
    with OptLM(folder, policy=settings) as model:
        assert new_ids(model) == wanted
        info = model.llm.info()
        assert info["kv_dtype"] == ("float32" if weights else "int4")
        assert (info["quantization"] or {}).get("format") == ("int4-g64-head8" if weights else None)


def test_opt_lm_runs_on_llm_with_attention_top_k(folder):
    placement = Offload(weights=(0, 0, 100), attention_top_k=64, policy=None)
    with LLM(folder, placement=placement, kv_memory="4MB") as llm:
        assert OptLM(llm).generate(ROWS, 4).shape == (5, WIDTH + 4)


# ---- finding the model


def test_model_name_lookup_order(tmp_path, folder):
    root = tmp_path / "weights"
    whole, short = root / "facebook" / "opt-125m", root / "opt-125m"
    for place in (root, whole, short):
        place.mkdir(parents=True, exist_ok=True)
    assert find_model("facebook/opt-125m", root) == "facebook/opt-125m"  # the hub's
    assert find_model("opt-125m", str(root)) == "facebook/opt-125m"
    assert find_model(get_opt_config("facebook/OPT-125m"), root) == "facebook/opt-125m"
    assert find_model("org/model", tmp_path / "nowhere") == "org/model"
    (root / "config.json").write_text("{}")
    assert find_model("facebook/opt-125m", root) == str(root)
    (short / "config.json").write_text("{}")
    assert find_model("facebook/opt-125m", root) == str(short)
    (whole / "config.json").write_text("{}")
    assert find_model("facebook/opt-125m", root) == str(whole)
    assert find_model("opt-125m", root) == str(short)
    assert find_model(folder, None) == folder
    assert find_model("org/model", None) == "org/model"
    assert find_model("opt-30b", None) == "facebook/opt-30b"


def test_invalid_model_paths_are_rejected(tmp_path, folder):
    with pytest.raises(ModelError, match=r"no model 'mine' in .*nowhere, which doesn't exist"):
        find_model("mine", tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="is not used: config="):
        find_model(folder, tmp_path)
    with pytest.raises(NotSupported, match="dummy weights"):
        find_model("opt-30b", "_DUMMY_")
    with pytest.raises(InvalidRequest, match="path=3"):
        find_model("opt-30b", 3)
    with pytest.raises(InvalidRequest, match="config=''"):
        find_model("", None)
    (tmp_path / "opt-30b-np").mkdir()
    with pytest.raises(NotSupported, match="opt-30b-np holds numpy files"):
        find_model("opt-30b", tmp_path)
    with pytest.raises(VerbatimError, match="nowhere"):
        OptLM(str(tmp_path / "nowhere"))


def test_config_that_does_not_match_model_is_rejected(folder, tmp_path):
    (tmp_path / "opt-125m").symlink_to(folder)
    with pytest.raises(InvalidRequest, match=r"opt-125m has num_hidden_layers=12, but .* has 3"):
        OptLM("facebook/opt-125m", path=tmp_path, policy=policy())
    toy = dict(num_hidden_layers=3, hidden_size=64, n_head=4)
    config = get_opt_config("opt-125m", **toy, ffn_embed_dim=96, max_seq_len=256)
    with pytest.raises(InvalidRequest, match=r"vocab_size=50272, but .* has 128"):
        OptLM(config, path=tmp_path, policy=policy())
    config = get_opt_config("opt-125m", **toy, ffn_embed_dim=96, max_seq_len=256, vocab_size=128)
    with OptLM(config, path=tmp_path, policy=policy()) as model:
        assert model.generate([[3]], 1).shape == (1, 2)


def test_get_opt_config_returns_config_by_name():
    big = get_opt_config("facebook/opt-iml-max-30b")
    assert (big.name, big.num_hidden_layers, big.n_head) == ("opt-iml-max-30b", 48, 56)
    assert (big.hidden_size, big.input_dim, big.ffn_embed_dim) == (7168, 7168, 28672)
    assert get_opt_config("galactica-30b").vocab_size == 50_000
    small = get_opt_config("opt-125m")
    assert small == OptConfig() and small.model_bytes() == 2 * 125_239_296
    assert small.hidden_bytes(4, 512) == 4 * 512 * 768 * 2
    assert small.cache_bytes(4, 512) == 2 * 12 * small.hidden_bytes(4, 512)
    with pytest.raises(ValueError, match="there is no OPT model 'opt-31b'; known are opt-125m"):
        get_opt_config("opt-31b")
    with pytest.raises(InvalidRequest, match="name=3"):
        get_opt_config(3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(config=None), "config=None"),
        (dict(config=3), "config=3"),
        (dict(env="/tmp"), "env='/tmp': must be ExecutionEnv or None"),
        (dict(policy=(20, 80)), r"policy=\(20, 80\): must be Policy or None"),
        (dict(path=3), "path=3"),
    ],
    ids=str,
)
def test_invalid_constructor_arguments_are_rejected(folder, arguments, said):
    with pytest.raises(InvalidRequest, match=said):
        OptLM(**{"config": folder, **arguments})


# ---- open engines, and closing


def test_closing_opt_lm_leaves_given_llm_open(folder, greedy):
    with LLM(folder, kv_memory="4MB") as llm:
        with OptLM(llm) as model:
            assert model.llm is llm and model.num_gpu_batches is None
            assert new_ids(model) == greedy
        with pytest.raises(EngineClosed, match="OptLM was closed"):
            model.generate(ROWS, 2)
        assert llm.generate([ROWS[0]], SamplingParams(max_tokens=1))
        for name, value in (("env", ExecutionEnv()), ("path", folder), ("policy", policy())):
            with pytest.raises(InvalidRequest, match=f"{name}=.*the config is an LLM"):
                OptLM(llm, **{name: value})


def test_opt_lms_of_one_live_module_share_an_engine():
    module = make_toy("opt", **OPT)
    model = OptLM(module)
    assert OptLM(module).llm is model.llm
    model.close()
    assert OptLM(module).generate(ROWS, 1).shape == (5, WIDTH + 1)
    with pytest.raises(InvalidRequest, match=r"policy=.*OPTForCausalLM"):
        OptLM(module, policy=policy())


def readers():
    return sum(thread.name.startswith("verbatim-weights") for thread in threading.enumerate())


def test_engine_is_closed_by_delete_all_weights_and_garbage_collection(folder):
    gc.collect()  # threads left by other tests
    before = readers()
    model = OptLM(folder, policy=policy())
    assert readers() > before
    model.delete_all_weights()
    model.delete_all_weights()
    assert readers() == before
    with pytest.raises(EngineClosed):
        model.generate(ROWS, 1)
    model = OptLM(folder, policy=policy())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and readers() == before


def test_without_policy_default_offload_is_used(folder, greedy):
    with OptLM(folder) as model:
        assert new_ids(model) == greedy
        assert model.llm.engine.runner.offload == Offload()
        assert model.config.num_hidden_layers == 3


def test_row_aborted_from_outside_raises_request_failed(folder, monkeypatch):
    with OptLM(folder, policy=policy()) as model:
        lap = Clock.lap

        def lap_and_abort(clock):
            model.llm.pause("abort")
            model.llm.resume()
            return lap(clock)

        monkeypatch.setattr(Clock, "lap", lap_and_abort)
        with pytest.raises(RequestFailed, match=r"row 0 was ended by close\(\)"):
            model.generate(ROWS[:2], 6)


@pytest.mark.slow
def test_program_exits_cleanly_without_close(folder):
    script = f"""
from verbatim.compat.flexllmgen import OptLM, Policy
model = OptLM({folder!r}, policy=Policy(2, 2, 0, 0, 0, 0, 0, 0))
print(model.generate([[3, 4]], 2).shape)
"""
    line = [sys.executable, "-P", "-W", "error", "-c", script]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 4)\n", "")


# ---- timings and log output


def row(tokens, computed):
    sequence = SimpleNamespace(output_ids=[0] * tokens, num_computed=computed)
    return SimpleNamespace(sequences=[sequence])


def test_step_counts_as_prefill_while_any_prompt_is_computed(monkeypatch):
    now, spent = [0.0], [(0.0, 0.0, 0.0)]
    monkeypatch.setattr("verbatim.compat.flexllmgen.model.perf_counter", lambda: now[0])
    requests = [row(0, 0), row(0, 0)]
    clock = Clock(requests, lambda: spent[0])

    def lap(seconds, *rows):
        now[0] += seconds
        spent[0] = tuple(
            s + seconds * share for s, share in zip(spent[0], (0.5, 0.3, 0.1), strict=True)
        )
        requests[:] = [row(*each) for each in rows]
        return clock.lap()

    assert lap(1.0, (1, 8), (0, 4)) == 1  # first token of row 0, a prompt chunk of row 1
    assert lap(2.0, (2, 9), (0, 8)) == 1  # rest of row 1's prompt, while row 0 decodes
    assert lap(4.0, (3, 10), (1, 12)) == 2
    assert lap(8.0, (4, 11), (2, 13)) == 2
    assert lap(16.0, (4, 0), (3, 14)) == 1  # row 0 was preempted
    assert lap(32.0, (4, 11), (3, 14)) == 0  # row 0 is recomputed, without a new token
    found = clock.timings
    assert found.costs == [1.0, 2.0, 4.0, 8.0, 48.0]
    assert (found.prefill.num_steps, found.prefill.wall_s) == (3, 7.0)
    assert (found.decode.num_steps, found.decode.wall_s) == (2, 56.0)
    assert (found.decode.load_s, found.prefill.compute_s) == pytest.approx((28.0, 2.1))
    assert found.prefill.other_s == pytest.approx(0.7)
    found.project(4, 9, 5)
    assert found.projected_s == pytest.approx((7.0 + 56.0 * 2) * 2)


def test_log_output_at_each_verbosity_level(opened, capfd):
    opened.generate(ROWS, 3)
    assert capfd.readouterr() == ("", "")
    opened.generate(ROWS[:4], 3, debug_mode="breakdown")
    assert len(capfd.readouterr().err.splitlines()) == 2
    opened.generate(ROWS[:4], 3, verbose=1, debug_mode="breakdown")
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 3
    assert "4 rows of up to 17 tokens, 3 new ones each; blocks of 2 x 2; weights 0/0/1" in lines[0]
    assert re.search(r"prefill: [\d.]+ s in 1 steps \(load .*compute .*store .*other ", lines[1])
    assert re.search(r"decode: [\d.]+ s in 2 steps \(load", lines[2])
    opened.generate(ROWS, 9, verbose=2, debug_mode="fewer_batch")
    lines = capfd.readouterr().err.splitlines()
    assert "4 of 5 rows" in lines[0] and len(lines) == 1 + 5 + 2 + 1
    assert re.search(r"step 5: [\d.]+ s, 4 tokens$", lines[5]) and "an estimate" in lines[-1]
