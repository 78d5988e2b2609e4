"""A checkpoint larger than its memory: Verbatim and accelerate's disk offload, under one limit.

    python benchmarks/offload.py [--gb 4] [--cap 1GB] [--sequences 64] [--rounds 3] [--folder PATH]
    python benchmarks/offload.py --experts [--cap 900MB] [--sequences 1]

Makes a checkpoint of random weights in Qwen3's shape, or with `--experts` in Qwen3 MoE's: 16 layers of 64
experts, of which each token chooses 8. Then Verbatim runs once as it is and once reading all experts of
every layer; random weights choose all experts about equally often, from which a cache gains least.

Each engine runs in a process of its own, which,
after its imports, joins a control group with the memory limit (as root, with cgroup v1 or v2; otherwise only
the peak is told). Both decode the same prompts; the time of a step is that of the steps behind the first
token. In the same processes, between two generations, the limit is measured: what reading the same
file gives when nothing else runs, and what the matrix products of a step take on weights in memory. A
step can't be faster than the longer of the two. Bytes read are the operating system's.

`--quick` is a small run to see that all is well. Figures of a shared machine: compare ratios.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from verbatim.placement.offload.shape import ModelShape


def shape(gb: float) -> dict[str, Any]:
    """A config of about so many gigabytes in bfloat16."""
    vocab = 151_936 if gb >= 2 else 8_192
    hidden, inter, heads, kv_heads = (2048, 6144, 16, 2) if gb >= 2 else (512, 1536, 8, 2)
    per_layer = 2 * (hidden * (2 * heads + 2 * kv_heads) * 128 + 3 * hidden * inter)
    layers = max(2, round((gb * 1e9 - 4 * vocab * hidden) / per_layer))
    return dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def make_experts(folder: Path, layers: int) -> None:
    """Random weights of a mixture of experts, one tensor for each matrix of each expert."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        moe_intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    noise = (torch.randn(1 << 24) * 0.02).bfloat16()
    for i, parameter in enumerate(model.parameters()):
        if parameter.dim() == 1:
            parameter.data.fill_(1)
        else:
            own = noise.roll(7919 * i).repeat(-(-parameter.numel() // len(noise)))
            parameter.data.view(-1).copy_(own[: parameter.numel()])
    model.save_pretrained(folder, max_shard_size="1GB")
    os.sync()


def make_checkpoint(folder: Path, gb: float) -> None:
    """Random weights in safetensors shards, without ever holding the model."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**shape(gb))
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    noise = (torch.randn(1 << 24) * 0.02).bfloat16()
    shards: list[dict[str, torch.Tensor]] = [{}]
    index: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)

    def flush() -> None:
        name = f"model-{len(shards):05}.safetensors"
        save_file(shards[-1], folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shards[-1], name))
        shards.append({})

    for name, parameter in model.named_parameters():
        count = parameter.numel()
        if parameter.dim() == 1:
            values = torch.ones(count, dtype=torch.bfloat16)
        else:
            values = noise.repeat(-(-count // len(noise)))[:count].clone()
        shards[-1][name] = values.view(parameter.shape)
        if sum(t.nbytes for t in shards[-1].values()) > 1e9:
            flush()
    if shards[-1]:
        flush()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    config.save_pretrained(folder)
    with open(folder / "config.json", "rb") as file:
        os.fsync(file.fileno())
    os.sync()


# ---- in a child


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def bytes_from_disk() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes"):
            return int(line.split()[1])
    return 0


class Group:
    """A control group with a limit on the memory that this process takes while it is in it."""

    def __init__(self, limit: int) -> None:
        root = Path("/sys/fs/cgroup/memory")
        self.how, most = ("cgroup v1", "memory.limit_in_bytes")
        if not root.is_dir():
            root, self.how, most = root.parent, "cgroup v2", "memory.max"
        self._out, self._in = (
            root / "cgroup.procs",
            root / f"offload-{os.getpid()}" / "cgroup.procs",
        )
        try:
            self._in.parent.mkdir()
            (self._in.parent / most).write_text(str(limit))
            self.enter()
        except OSError as error:
            self.how = f"no control group: {error.strerror}"
            self._out = self._in = Path("/dev/null")

    def enter(self) -> None:
        self._in.write_text(str(os.getpid()))

    def leave(self) -> None:
        """What is taken from now on counts elsewhere."""
        self._out.write_text(str(os.getpid()))


def limits(folder: Path, shape: ModelShape, rows: int) -> tuple[float, float]:
    """Bytes a second of direct reads, and seconds of a step's products, with nothing else running."""
    from verbatim.placement.offload import machine
    from verbatim.placement.offload.cost import products_s
    from verbatim.weights.lazy import Stored

    path = max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    size = path.stat().st_size
    machine._found.clear()  # of the plan
    whole = Stored("file", path, 0, size, torch.uint8, (size,))
    found = machine.measure([whole], None, torch.bfloat16)
    used = [unit for unit in shape.units if not unit.gathers]
    return found.read_rate, sum(products_s(shape, unit, rows, found) for unit in used)


def prompts(config: dict[str, Any], count: int, length: int) -> list[list[int]]:
    noise = torch.Generator().manual_seed(7)
    ids: list[list[int]] = torch.randint(
        5, config["vocab_size"], (count, length), generator=noise
    ).tolist()
    return ids


def begin(args: argparse.Namespace) -> tuple[Group, int]:
    """After the imports: the group, and the memory that counts as the baseline."""
    gc.collect()
    group = Group(int(args.limit))
    Path("/proc/self/clear_refs").write_text("5")
    return group, status("VmRSS")


def child_verbatim(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM  # noqa: F401  (as the other has)

    from verbatim import LLM, Offload, SamplingParams
    from verbatim.batch import Batch
    from verbatim.placement.offload.units import Units

    if args.whole:  # experts come with their layers
        Units.split_experts = lambda self: None  # type: ignore[method-assign]
    # All modules and the threads' stacks, which count against nobody's limit.
    with LLM(placement=Offload(gpu="200MB", weights=(0, 0, 100), policy=None)) as small:
        small.generate(["Once"], SamplingParams(max_tokens=2))
    group, base = begin(args)
    start = time.perf_counter()
    llm = LLM(
        args.folder,
        max_length=args.prompt + args.new + 8,
        max_sequences=args.sequences,
        quantization=args.quantization,
        placement=Offload(gpu=args.cap, workload=(args.prompt, args.new), trace=args.trace),
    )
    opened = time.perf_counter() - start
    work = prompts(config, args.sequences, args.prompt)
    runner: Any = llm.engine.runner
    folder = Path(args.folder)
    if args.throttle:
        throttle(args.throttle)
    marks: list[
        tuple[float, int, int]
    ] = []  # when a forward begins, its rows, what was read before
    plain = runner.forward

    def forward(batch: Batch) -> Any:
        read = bytes_from_disk()
        marks.append((time.perf_counter(), batch.num_tokens, batch.num_sequences, read))
        return plain(batch)

    runner.forward = forward  # type: ignore[method-assign]

    def run(count: int) -> float:
        start = time.perf_counter()
        # Drawn and not the likeliest: random weights repeat that, and with it the experts.
        llm.generate(work, SamplingParams(seed=count, max_tokens=count, ignore_eos=True))
        return time.perf_counter() - start

    steps, reads, bandwidths, computes = [], [], [], []
    peak = status("VmHWM")
    for _ in range(args.rounds):
        marks.clear()
        group.leave()
        bandwidth, compute_s = limits(folder, runner.forecast.shape, args.sequences)
        bandwidths.append(args.throttle or bandwidth)
        computes.append(compute_s)
        group.enter()
        Path("/proc/self/clear_refs").write_text("5")  # what the two took is not the model's
        whole = run(1 + args.new)
        peak = max(peak, status("VmHWM"))
        pairs = list(itertools.pairwise(marks))
        decodes = [(a, b) for a, b in pairs if a[1] == a[2] and b[1] == b[2]]
        rows = max(a[1] for a, _ in decodes)  # as many as have room for K and V
        steps += [b[0] - a[0] for a, b in decodes if a[1] == rows]
        reads += [b[3] - a[3] for a, b in decodes if a[1] == rows]
    table = llm.stats()["offload"]
    plan = llm.info()["plan"]
    found = {
        "how": group.how,
        "opened_s": opened,
        "whole_s": whole,
        "rows": rows,
        "step_s": statistics.median(steps),
        "read_per_step": statistics.median(reads),
        "bandwidth": statistics.median(bandwidths),
        "products_s": statistics.median(computes),
        "weights_per_step": table["decode_weights_bytes"]["actual"],
        "experts": llm.info()["experts"],
        "kv_share_on_disk": plan["kv"][2] / 100,
        "peak_over_baseline": peak - base,
        "plan": llm.info()["plan_summary"],
        "predicted_step_s": table["decode_step_s"]["predicted"],
        "actual_step_s": table["decode_step_s"]["actual"],
        "compute_s": table["decode_compute_s"]["actual"],
    }
    llm.close()
    gc.collect()
    found["left_over_baseline"] = status("VmRSS") - base
    return found


def throttle(rate: float) -> None:
    """Let the readers together read no more than `rate` bytes a second."""
    import threading

    from verbatim.weights.files import DirectFile

    plain, lock, free_at = DirectFile.read, threading.Lock(), [time.perf_counter()]

    def read(self: DirectFile, into: memoryview, offset: int, needed: int) -> int:
        done = plain(self, into, offset, needed)
        with lock:
            free_at[0] = max(free_at[0], time.perf_counter() - 0.01) + done / rate
            pause = free_at[0] - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        return done

    DirectFile.read = read  # type: ignore[method-assign]


def child_accelerate(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    import accelerate  # noqa: F401
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    group, base = begin(args)
    device_map: dict[str, str] = {
        "model.embed_tokens": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    }
    for i in range(config["num_hidden_layers"]):
        device_map[f"model.layers.{i}"] = "cpu" if i < args.kept else "disk"
    marks: list[tuple[float, int]] = []

    class Mark(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
            marks.append((time.perf_counter(), bytes_from_disk()))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with tempfile.TemporaryDirectory(dir=Path(args.folder).parent) as spare:
        model = AutoModelForCausalLM.from_pretrained(
            args.folder, device_map=device_map, offload_folder=spare, dtype=torch.bfloat16
        )
        ids = torch.tensor(prompts(config, args.sequences, args.prompt))
        with torch.no_grad():
            model.generate(
                ids,
                max_new_tokens=5,
                min_new_tokens=5,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Mark()]),
            )
        pairs = list(itertools.pairwise(marks))
        return {
            "how": group.how,
            "step_s": statistics.median(b[0] - a[0] for a, b in pairs),
            "read_per_step": statistics.median(b[1] - a[1] for a, b in pairs),
            "peak_over_baseline": status("VmHWM") - base,
        }


# ---- the parent


def child(engine: str, args: argparse.Namespace, **more: Any) -> dict[str, Any] | None:
    for path in Path(args.folder).glob(
        "*.safetensors"
    ):  # what is cached counts against nobody's limit
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    settings = {**vars(args), "engine": engine, **more}
    command = [sys.executable, __file__, "--child", json.dumps(settings, default=str)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        said = run.stderr.strip().splitlines()[-1:] or ["(nothing)"]
        print(f"  {engine} {more} ended with {run.returncode}: {said[0][:200]}")
        return None
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--cap", default="1GB")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=12, help="new tokens")
    parser.add_argument("--throttle", type=float, help="GB/s that Verbatim's readers may read")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="a checkpoint made before by --keep")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint where it is")
    parser.add_argument("--trace", help="write Verbatim's trace here")
    parser.add_argument("--alone", action="store_true", help="without accelerate")
    parser.add_argument("--theirs", help="accelerate's numbers of sequences, as 64,16")
    parser.add_argument("--quantization", help="of Verbatim's weights")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        inner = argparse.Namespace(**json.loads(args.child))
        config = json.loads((Path(inner.folder) / "config.json").read_text())
        run = child_verbatim if inner.engine == "verbatim" else child_accelerate
        print(json.dumps(run(inner, config)))
        return
    if args.quick:
        args.gb, args.cap, args.new, args.rounds, args.sequences = 0.3, "150MB", 4, 1, 8

    from verbatim.checks import memory_bytes

    cap = memory_bytes(args.cap, 1 << 62)
    args.throttle = args.throttle and args.throttle * 1e9
    args.limit = int(cap * 1.15)
    made = args.folder is None
    if made:
        args.folder = tempfile.mkdtemp(prefix="verbatim-checkpoint-")
    folder = Path(args.folder)
    try:
        if not any(folder.glob("*.safetensors")):
            if args.experts:
                make_experts(folder, 4 if args.quick else 16)
            else:
                make_checkpoint(folder, args.gb)
        (report_experts if args.experts else report)(args, folder, cap)
    finally:
        if made and not args.keep:
            shutil.rmtree(folder)


def report_experts(args: argparse.Namespace, folder: Path, cap: int) -> None:
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    print(f"checkpoint {size / 1e9:.2f} GB, cap {cap / 1e9:.2f} GB, {args.sequences} sequences")
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * args.rounds):
        whole = bool(i % 2)
        found = child("verbatim", argparse.Namespace(**{**vars(args), "rounds": 1}), whole=whole)
        if found is None:
            raise SystemExit(1)
        io = found["weights_per_step"] / found["bandwidth"]
        speeds[whole].append(found["rows"] / found["step_s"])
        print(
            f"{'all experts read' if whole else 'chosen experts read'}: step of {found['rows']} rows "
            f"{found['step_s']:.4f} s ({speeds[whole][-1]:.1f} tokens/s), "
            f"{found['read_per_step'] / 1e9:.3f} GB read, which alone takes {io:.4f} s at "
            f"{found['bandwidth'] / 1e9:.2f} GB/s; products {found['products_s']:.4f} s; predicted "
            f"{found['predicted_step_s']:.4f} s; peak {100 * found['peak_over_baseline'] / cap:.0f} % of the "
            f"cap; {found['experts']}"
        )
    ratio = statistics.median(a / b for a, b in zip(speeds[False], speeds[True], strict=True))
    print(f"ratio: {ratio:.2f} times reading all of them")


def report(args: argparse.Namespace, folder: Path, cap: int) -> None:
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    print(f"checkpoint {size / 1e9:.2f} GB, cap {cap / 1e9:.2f} GB, {args.sequences} sequences")
    ours = child("verbatim", args)
    if ours is None:
        raise SystemExit(1)
    io = ours["weights_per_step"] / ours["bandwidth"]
    limit = max(io, ours["products_s"])
    rate = ours["rows"] / ours["step_s"]
    computing = (
        ours["compute_s"] + ours["step_s"] - ours["actual_step_s"]
    )  # outside of the forward, all is
    print(ours["plan"])
    print(
        f"verbatim: step of {ours['rows']} rows {ours['step_s']:.3f} s ({rate:.1f} tokens/s), opened in "
        f"{ours['opened_s']:.1f} s, the last round took {ours['whole_s']:.0f} s; {ours['how']}"
    )
    print(
        f"  limit {limit:.3f} s: reading {ours['weights_per_step'] / 1e9:.2f} GB of weights at "
        f"{ours['bandwidth'] / 1e9:.2f} GB/s takes {io:.3f} s, products {ours['products_s']:.3f} s; "
        f"reached {100 * limit / ours['step_s']:.0f} %. Computing and drawing take {computing:.3f} s in all, "
        f"so the step is {ours['step_s'] / max(io, computing):.2f} times the longer of the two"
    )
    print(
        f"  predicted {ours['predicted_step_s']:.3f} s a forward, actual {ours['actual_step_s']:.3f} s; "
        f"{100 * ours['kv_share_on_disk']:.0f} % of K and V on the disk"
    )
    print(
        f"  read from disk per step {ours['read_per_step'] / 1e9:.2f} GB, peak over the baseline "
        f"{ours['peak_over_baseline'] / 1e9:.3f} GB ({100 * ours['peak_over_baseline'] / cap:.0f} % of the "
        f"cap), left after close {ours['left_over_baseline'] / 1e6:.0f} MB"
    )
    if args.alone:
        return
    best = 0.0
    tried = [args.sequences, args.sequences // 4, args.sequences // 16]
    for sequences in dict.fromkeys(map(int, args.theirs.split(",")) if args.theirs else tried):
        for kept in (0, 3):
            theirs = child("accelerate", args, sequences=max(1, sequences), kept=kept)
            if theirs is None:
                continue
            speed = sequences / theirs["step_s"]
            best = max(best, speed)
            print(
                f"accelerate, {sequences} sequences, {kept} layers in memory: step {theirs['step_s']:.2f} s "
                f"({speed:.2f} tokens/s), {theirs['read_per_step'] / 1e9:.2f} GB a step, peak "
                f"{theirs['peak_over_baseline'] / 1e9:.2f} GB"
            )
    if best:
        print(f"ratio: {rate / best:.2f} times accelerate at its best")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
