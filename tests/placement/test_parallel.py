"""One model over several ranks: same bits as in one process, and no waiting for a lost rank."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support import toys
from support.lora import save_adapter
from support.parallel_rank import GREEDY, QUANTIZED, ROLLOUT, fingerprint, ids_of
from support.programs import (
    PATIENCE_S,
    run_program,
    run_ranks,
    run_without_kernels,
    state_of,
    until,
)
from support.requests_mixed import all_facts, generated, mixed_requests, resident_facts
from support.toys import Folders
from verbatim import (
    LLM,
    InvalidRequest,
    NotSupported,
    PipelineParallel,
    SamplingParams,
    TensorParallel,
    TierFailed,
    VerbatimError,
    kernels,
    rl,
)
from verbatim.batch import AttentionBatch
from verbatim.errors import ModelChanged
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.attention import paged_attention
from verbatim.model import products
from verbatim.model.shard import bounds_of
from verbatim.placement.distributed import opening as parallel_opening
from verbatim.placement.distributed.columns import split_heads
from verbatim.placement.distributed.hosts import Hosts, LocalHosts
from verbatim.placement.distributed.launcher import HOST
from verbatim.placement.distributed.ranks import Following, RankHost
from verbatim.placement.distributed.served import Served
from verbatim.placement.distributed.tensor import RankGroup

# ---- bit-identical slices


@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_product_columns_are_bit_identical_in_any_slice(
    dtype: torch.dtype, transposed: bool
) -> None:
    noise = torch.Generator().manual_seed(1)
    for num_out, depth in ((60, 64), (200, 1000), (130, 33)):
        weight = torch.randn(num_out, depth, generator=noise).to(dtype)
        bias = torch.randn(num_out, generator=noise).to(dtype)
        for num_rows in (1, 5, 70):
            x = torch.randn(num_rows, depth, generator=noise).to(dtype)

            def product(
                part: slice,
                x: torch.Tensor = x,
                weight: torch.Tensor = weight,
                bias: torch.Tensor = bias,
            ) -> torch.Tensor:
                own = weight[part].clone()
                own = own.t().contiguous().t() if transposed else own
                return products.linear(x, own, bias[part].clone())

            whole = product(slice(None))
            for first, end in ((0, 16), (16, num_out), (7, 9), (0, 31), (num_out - 5, num_out)):
                # Without kernels, torch has other algorithms for few columns.
                if end - first >= 16 or _has_kernels():
                    assert torch.equal(product(slice(first, end)), whole[:, first:end])


def _has_kernels() -> bool:
    from verbatim import kernels

    return kernels.library() is not None


@pytest.mark.usefixtures("backend")
def test_attention_heads_are_bit_identical_in_any_split() -> None:
    noise = torch.Generator().manual_seed(2)
    q = torch.randn(9, 8, 20, generator=noise)
    k, v = (torch.randn(5, 4, 16, 20, generator=noise) for _ in range(2))
    batch = (torch.tensor([0, 8, 9]), torch.tensor([40, 33]), torch.tensor([[1, 2, 3], [4, 2, 1]]))
    rows = AttentionBatch(*(x.to(torch.int32) for x in batch))
    sinks, alibi, bias = (torch.randn(*n, generator=noise) for n in ((9, 8), (8,), (9, 8, 12)))
    every = AttentionOptions(scale=0.2, sinks=sinks, alibi=alibi, bias=bias)

    def attend(heads: slice, kv: slice) -> torch.Tensor:
        options = every.of_heads(heads)
        own_k, own_v = k[:, kv].contiguous(), v[:, kv].contiguous()
        return paged_attention(q[:, heads], own_k, own_v, rows, options)

    whole = attend(slice(None), slice(None))
    for size in (2, 3, 4, 8):
        query, kv = split_heads(8, 4, size)
        for rank in range(size):
            own = slice(query[rank], query[rank + 1])
            assert torch.equal(attend(own, kv[rank]), whole[:, own])


def test_shards_are_whole_units_and_nearly_equal() -> None:
    assert bounds_of(128, 4, 16) == [0, 32, 64, 96, 128]
    assert bounds_of(100, 3, 16) == [0, 32, 64, 100]
    assert bounds_of(6, 4) == [0, 1, 3, 4, 6]
    assert bounds_of(40, 4, 16) is None
    with pytest.raises(NotSupported, match=r"size=3\): a layer has 4 query heads on 2 KV heads"):
        split_heads(4, 2, 3)


# ---- ranks that the user starts


MODELS = [
    (name, dtype)
    for name in ("qwen3", "gpt2", "gpt_oss", "qwen3_moe", "gemma2", "falcon_mqa", "bloom", "phi3")
    for dtype in ("float32", "bfloat16")
] + [("deepseek_v3", "float32"), ("llama", "float32")]
RECURRENT = [(name, "float32") for name in toys.RECURRENT_TOYS]


def run_all(
    world: int, models: list[tuple[str, str]], folder: Path, folders: Folders
) -> dict[str, list[dict[str, Any]]]:
    """Run parallel_rank.py once on all ranks, and return the reports by function and rank."""
    from support.mtp_toys import save_with_mtp, toy

    (folder / "models.json").write_text(json.dumps(models))
    for name in {name for name, _ in models} | {"qwen3_moe"}:
        (folder / name).symlink_to(folders(name))
    for name in ("gemma2", "qwen3_moe"):
        toys.make_toy(name, num_hidden_layers=5).save_pretrained(folder / f"deep-{name}")
    save_with_mtp(toy("deepseek_v3", 1), folder / "mtp")
    save_adapter(folder / "adapter", toys.make_toy("qwen3_moe"))
    save_adapter(folder / "llama-adapter", toys.make_toy("llama"))
    toys.make_toy("llama", seed=9).save_pretrained(folder / "new-llama")
    toys.make_toy("qwen3_moe", seed=9).save_pretrained(folder / "new-qwen3_moe")
    reports = run_ranks(world, folder, "parallel_rank", folder)
    return {name: [report[name] for report in reports] for name in reports[0]}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_give_same_tokens_for_many_models(
    world: int, tmp_path: Path, folders: Folders
) -> None:
    # On four ranks, each model runs in only one dtype, alternating between the two.
    some = [m for i, m in enumerate(MODELS) if i % 4 in (0, 3)]
    models = MODELS + RECURRENT if world == 2 else some + [m for m in MODELS if m[0] == "llama"]
    assert len(models) == len(set(models))
    reports = run_all(world, models, tmp_path, folders)
    check_columns(reports["share_columns"], models, tmp_path, folders)
    check_layers(reports["share_layers"], tmp_path)
    check_experts(reports["share_experts"], tmp_path, folders)


def check_layers(told: list[dict[str, Any]], folder: Path) -> None:
    prompts, params = mixed_requests(12)
    with LLM(folder / "deep-gemma2", dtype="bfloat16") as llm:
        assert {report["gemma2"] for report in told} == {fingerprint(llm.generate(prompts, params))}
    params = [replace(p, record_routing=p.num_beams == 1) for p in params]
    with LLM(folder / "deep-qwen3_moe") as llm:
        assert {report["qwen3_moe"] for report in told} == {
            fingerprint(llm.generate(prompts, params))
        }
    assert told[0]["layers"][-1][1] == 5 and len(told[0]["layers"]) == len(told)
    assert told[0]["last_pid"]  # rank 0 has the last layers


def check_columns(
    told: list[dict[str, Any]], models: list[tuple[str, str]], folder: Path, folders: Folders
) -> None:
    world = len(told)
    prompts, params = mixed_requests(12)
    for name, dtype in models:
        with LLM(folders(name), dtype=dtype) as llm:
            expected = fingerprint(llm.generate(prompts, params))
            if name == "llama":
                scores = llm.score([[5, 6, 7], [8, 9]])
                after = ids_of(llm)
                llm.load_adapter("a", folder / "llama-adapter")
                adapted = ids_of(llm, adapter="a")
                llm.update_weights(folder / "new-llama")
                updated = ids_of(llm)
        assert [report[f"{name} {dtype}"] for report in told] == [expected] * world, name
    for report in told:
        assert report["scores"] == scores and report["after"] == report["awake"] == after
        assert report["adapted"] == adapted != after
        assert report["updated"] == updated != after
        assert report["stream"].startswith(
            "stream: not supported where each rank is a process of yours"
        )
        assert "id 1000000 is outside" in report["refused"]


def check_experts(told: list[dict[str, Any]], folder: Path, folders: Folders) -> None:
    world = len(told)
    prompts, params = mixed_requests(12)
    adapters = {"a": folder / "adapter"}
    with LLM(folders("qwen3_moe"), adapters=adapters) as llm, LLM(folder / "mtp") as second:
        whole_bytes = llm.info()["weight_bytes"]
        for rank, report in enumerate(told):
            own = slice(0, 0) if rank == 0 else slice(rank - 1, None, world - 1)
            results = llm.generate(prompts[own], params[own]) if rank else []
            assert report["mixed"] == fingerprint(results)
            adapted = [replace(p, adapter="a") for p in params[own]]
            results = llm.generate(prompts[own], adapted) if rank else []
            assert report["adapter"] == fingerprint(results)
            results = second.generate(prompts[own], params[own]) if rank else []
            assert report["mtp"] == fingerprint(results)
            assert (report["drafted"] > 0) == (rank > 0)
            assert report["weight_bytes"] < whole_bytes
            assert list(report["refused"]) == ["generate", "chat", "score", "rollout", "tensors"]
            for name, text in report["refused"].items():
                own_error = "NotSupported: " if name == "chat" else "InvalidRequest: "
                assert text.startswith(own_error if rank == 0 else "RequestFailed: rank 0 failed")
            assert report["none"] == (1 if rank else 0)
            assert report["scores"] == (llm.score(prompts[:1]) if rank else [])
    for kind in QUANTIZED:
        new = LLM(folder / "new-qwen3_moe", quantization=kind)
        with LLM(folders("qwen3_moe"), quantization=kind) as llm, new:
            for rank, report in enumerate(told):
                own = slice(0, 0) if rank == 0 else slice(rank - 1, None, world - 1)
                results = llm.generate(prompts[own], params[own]) if rank else []
                assert report[kind] == report[f"{kind} awake"] == fingerprint(results), (kind, rank)
                results = new.generate(prompts[own], params[own]) if rank else []
                assert report[f"{kind} updated"] == fingerprint(results), (kind, rank)
                assert report[f"{kind} bytes"] < llm.info()["quantization"]["bytes_after"]
    assert len({report["forwards"] for report in told}) == 1
    assert len({report["mtp forwards"] for report in told}) == 1

    for rank, report in enumerate(told):
        module = toys.make_toy("qwen3_moe")
        rows = [[5 + rank, 6, 7]] * (rank + 1)
        assert torch.tensor(report["routing"]).shape == (rank + 1, 1, 9, 3, 2)
        if rank == 0:  # noise depends on the rank, and this process can only be rank 0
            found = rl.rollout(module, rows, ROLLOUT, seed=3)
            assert report["rows"] == found.sequences.tolist()
            assert report["routing"] == found.routing.tolist()


# ---- ranks that the LLM starts


def test_started_ranks_generate_and_sleep_and_a_killed_one_is_named(
    folders: Folders, tmp_path: Path
) -> None:
    prompts, params = mixed_requests(12)
    expected = generated(LLM(folders("mixtral")), prompts, params)
    with LLM(folders("mixtral"), placement=TensorParallel(2), max_batch_tokens=32) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
        assert [d.token_ids for d in llm.stream([5, 6], GREEDY)]
        adapter = save_adapter(tmp_path, toys.make_toy("mixtral"), layers="lm_head|q_proj")
        with pytest.raises(NotSupported, match="lm_head is not a linear layer"):
            llm.load_adapter("a", adapter)
        info = llm.info()
        assert info["placement"] == "tensor parallel" and info["ranks"] == 2
        assert sum(info["rank_kv_bytes"]) == info["kv_bytes"]
        assert max(info["rank_weight_bytes"]) < 0.6 * info["weight_bytes"]
        for weights in (False, True):
            llm.sleep(weights)
            llm.wake()
            assert all_facts(llm.generate(prompts[:3], params[:3])) == expected[:3]
        group = llm.engine.runner.group
        process = group.members[0].host
        # A rank killed during a request soon raises an error that names it.
        stream = llm.stream([5, 6, 7], ROLLOUT)
        next(stream)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(TierFailed, match=rf"rank 1 of 2: process {process.pid} .*signal 9"):
            list(stream)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_rank_weights_sleep_unless_updated_and_wake_unless_files_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight update that fails on one rank only ends the LLM: its weights would be mixed."""
    toys.make_toy("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kinds: dict[str, Any] = dict(quantization="int8", placement=TensorParallel(2))
    with LLM(tmp_path, quantization="int8") as llm:
        (expected,) = all_facts(llm.generate([[5, 6]], GREEDY))
    with LLM(tmp_path, **kinds) as llm:
        llm.sleep(weights=True)
        before = file.stat()
        os.utime(file, ns=(0, 0))
        with pytest.raises(ModelChanged, match=r"model\.safetensors changed"):
            llm.wake()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        llm.wake()
        assert all_facts(llm.generate([[5, 6]], GREEDY)) == [expected]
        llm.update_weights(toys.make_toy("llama", seed=1).state_dict())
        with pytest.raises(NotSupported, match="would be lost"):
            llm.sleep(weights=True)
        with monkeypatch.context() as patch:
            patch.setattr("verbatim.weights.update.overwrite", _fail)
            with pytest.raises(MemoryError):
                llm.update_weights(toys.make_toy("llama", seed=2).state_dict())
        with pytest.raises(TierFailed, match=r"rank 0.* has left"):
            llm.generate([[5, 6]], GREEDY)


def _fail(*_: Any) -> None:
    raise MemoryError


def test_rank_that_was_never_connected_is_told_that_rank_0_is_gone() -> None:
    share = Served()
    share.listen(b"key", HOST)
    hosts = Hosts(b"key", [RankHost(1, share.address, b"key")])
    hosts.close()
    hosts.close()
    assert share.messages.get(timeout=30) is None


def test_failed_rank_is_named_in_error() -> None:
    class Failing(Served):
        calls = Served.calls | {"forward"}

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self) -> None:
            raise RuntimeError("out of luck")

        def open(self) -> int:
            return self.number

    stages = [Failing(number) for number in (1, 2)]
    for stage in stages:
        stage.listen(b"key", HOST)
    ranks = [RankHost(rank, stage.address, b"key") for rank, stage in enumerate(stages, start=1)]
    group = RankGroup(Hosts(b"key", ranks), 3, 60.0)
    group.start()
    assert group.call("open") == [1, 2]

    def cut_off() -> None:
        raise TierFailed("rank 0 lost touch with the others")

    with pytest.raises(TierFailed, match=r"^rank [12] of 3: RuntimeError: out of luck"):
        group.call_all("forward", cut_off)
    with pytest.raises(VerbatimError, match=r"RuntimeError: out of luck \(rank 1 of 3, forward\)"):
        group.call("forward")
    stages[1].hang_up()
    with pytest.raises(TierFailed, match="rank 2 of 3: the connection is lost"):
        group.call("open")
    group.close()
    for why in ("has closed its LLM", "is gone"):
        with pytest.raises(TierFailed, match=f"rank 0 {why}"):
            Following(stages[0]).wait()


@pytest.mark.slow
def test_ctrl_c_leaves_ranks_in_sync(folders: Folders) -> None:
    prompts, params = mixed_requests(6)
    expected = generated(LLM(folders("llama")), prompts, params)
    with LLM(folders("llama"), placement=TensorParallel(2)) as llm:
        decoder = llm.engine.runner.decoder
        run, calls = decoder.run, iter(range(100))

        def pressed(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return run(*args, **kwargs)

        decoder.run = pressed
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)
        assert all_facts(llm.generate(prompts, params)) == expected
        process = llm.engine.runner.group.members[0].host
    assert process.wait(PATIENCE_S)


@pytest.mark.slow
def test_ranks_end_when_their_llm_is_collected_or_killed(folders: Folders) -> None:
    llm = LLM(folders("llama"), placement=TensorParallel(2))
    process = llm.engine.runner.group.members[0].host
    del llm  # without close()
    gc.collect()
    assert process.wait(PATIENCE_S)
    script = (
        "import os, signal, sys; from verbatim import LLM, TensorParallel\n"
        "llm = LLM(sys.argv[1], placement=TensorParallel(2))\n"
        "print(llm.engine.runner.group.members[0].host.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folders("llama"))], capture_output=True, text=True
    )
    until(lambda: state_of(int(done.stdout)) == "Z")


def use_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make other ranks use the kernels `name`."""

    def hosts(*args: Any) -> LocalHosts:
        with monkeypatch.context() as patched:
            patched.setenv("VERBATIM_KERNELS", name)
            return LocalHosts(*args)

    monkeypatch.setattr(parallel_opening, "LocalHosts", hosts)


@pytest.mark.slow
@pytest.mark.skipif(len(kernels.available()) < 2, reason="only one instruction set was built")
def test_ranks_with_different_instruction_sets_give_same_tokens(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests(6)
    with LLM(folders("llama"), dtype="bfloat16") as llm:
        expected = fingerprint(llm.generate(*requests))
    use_kernels(monkeypatch, kernels.available()[-1])
    with LLM(folders("llama"), dtype="bfloat16", placement=TensorParallel(2)) as llm:
        assert fingerprint(llm.generate(*requests)) == expected


@pytest.mark.slow
def test_ranks_with_different_kernels_are_rejected(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch, "none")
    with pytest.raises(NotSupported, match=r"rank 1 has the .* 'cpu/torch.*and rank 0 'cpu/kern"):
        LLM(folders("llama"), placement=TensorParallel(2))


@pytest.mark.slow
def test_columns_are_split_without_kernels_and_give_same_tokens(folders: Folders) -> None:
    script = (
        "import sys; from verbatim import LLM, TensorParallel\n"
        "from support.parallel_rank import fingerprint, mixed_requests\n"
        "told, requests = [], mixed_requests(6)\n"
        "for placement in (None, TensorParallel(2)):\n"
        "    with LLM(sys.argv[1], placement=placement) as llm:\n"
        "        told.append(fingerprint(llm.generate(*requests)))\n"
        "        split = llm.info().get('split_linears')\n"
        "assert told[0] == told[1] and split > 0, (told, split)"
    )
    run_without_kernels(script, folders("llama"))


@pytest.mark.slow
def test_layers_that_read_the_weights_of_others_give_same_tokens(folders: Folders) -> None:
    sliced = folders("bloom", slow_but_exact=True, pretraining_tp=2)
    prompts, params = mixed_requests(6)
    with LLM(sliced, placement=TensorParallel(2), kv_memory="1MB") as llm:
        assert all_facts(llm.generate(prompts, params)) == resident_facts(sliced, 6)
        assert llm.info()["split_linears"] > 0


@pytest.mark.slow
def test_torchrun_without_process_group_gives_same_tokens(folders: Folders, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from verbatim import LLM, SamplingParams, TensorParallel\n"
        "with LLM(sys.argv[1], placement=TensorParallel(2)) as llm:\n"
        "    c = llm.generate([5, 6, 7], SamplingParams(max_tokens=6, seed=3))[0].outputs[0]\n"
        "    open(sys.argv[2] + str(id(llm)), 'w').write(repr((c.token_ids, c.logprobs)))\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    run_program(*torchrun, script, folders("llama"), tmp_path / "told", OMP_NUM_THREADS="1")
    with LLM(folders("llama")) as llm:
        c = llm.generate([5, 6, 7], SamplingParams(max_tokens=6, seed=3))[0].outputs[0]
    assert {p.read_text() for p in tmp_path.glob("told*")} == {repr((c.token_ids, c.logprobs))}


# ---- rejected options


def launchers() -> list[str]:
    """Return the pids of launchers that this process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = path.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == os.getpid() and b"launcher" in path.joinpath("cmdline").read_bytes():
                found.append(path.name)
    return found


@pytest.mark.slow
def test_rejected_pipeline_leaves_no_launcher(folders: Folders) -> None:
    with LLM(folders("llama"), placement=PipelineParallel(2)) as llm:
        assert llm.generate([[5, 6]], GREEDY) and len(launchers()) == 1
    with pytest.raises(InvalidRequest, match=r"stages=9: the model can be cut into"):
        LLM(folders("llama"), placement=PipelineParallel(9))
    assert launchers() == []
    with pytest.raises(NotSupported, match="LlamaForCausalLM has no MTP layers"):
        LLM(folders("llama"), placement=TensorParallel(2), draft="mtp")


def test_invalid_parallel_placements_are_rejected(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verbatim import ExpertParallel

    for options, error, match in (
        (dict(size=0), InvalidRequest, "size=0"),
        (dict(size=2, exact=False), NotSupported, "exact=False: not supported"),
        (dict(size=2, timeout_s=-1), InvalidRequest, "timeout_s=-1"),
    ):
        with pytest.raises(error, match=match):
            TensorParallel(**options)
    folder = folders("llama")
    with pytest.raises(InvalidRequest, match=r"torch\.distributed is not initialised"):
        LLM(folder, placement=ExpertParallel())
    with pytest.raises(NotSupported, match="a live module is in memory"):
        LLM(toys.make_toy("llama"), placement=TensorParallel(2))
    for name in ("RANK=0", "WORLD_SIZE=3", "MASTER_ADDR=x", "MASTER_PORT=1"):
        monkeypatch.setenv(*name.split("="))
    with pytest.raises(InvalidRequest, match=r"size=2: must equal the 3 ranks"):
        LLM(folder, placement=TensorParallel(2))
