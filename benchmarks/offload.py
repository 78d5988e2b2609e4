"""A checkpoint larger than its memory: Verbatim and accelerate's disk offload, under one limit.

    python benchmarks/offload.py [--gb 4] [--cap 1GB] [--sequences 64] [--rounds 3] [--folder PATH]
    python benchmarks/offload.py --experts [--cap 900MB] [--sequences 1]

Creates a checkpoint of random weights in Qwen3's shape, or with `--experts` in Qwen3 MoE's: 16 layers of 64
experts, of which each token chooses 8. With `--experts`, Verbatim runs alternately as usual and reading all
experts of every layer. Random weights choose all experts about equally often, the worst case for a cache.

Each engine runs in a new process, which, after its imports, joins a control group with the memory limit (as
root, with cgroup v1 or v2; otherwise only the peak is reported). Both decode the same prompts; the time of a
step is that of the steps after the first token. A step takes at least as long as its reads and as its matrix
products. Both are measured in the same processes between two generations: reads from the same file while
nothing else runs, products on weights in memory. "Busy" is the share of a step that the reads, or all
computation (products, attention, norms, sampling), would take alone. Computation is timed within the step,
so this shows waiting and overhead, not slow computation. Bytes read are the operating system's figures.

`--quick` is a small run for a test. On a shared machine, compare ratios.
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
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

_CACHED = 1 << 24  # random numbers, from which all weights are copied


def dense_config(gb: float) -> Any:
    """Return a config of about `gb` gigabytes in bfloat16."""
    from transformers import Qwen3Config

    vocab = 151_936 if gb >= 2 else 8_192
    hidden, inter, heads, kv_heads = (2048, 6144, 16, 2) if gb >= 2 else (512, 1536, 8, 2)
    per_layer = 2 * (hidden * (2 * heads + 2 * kv_heads) * 128 + 3 * hidden * inter)
    return Qwen3Config(  # type: ignore[call-arg]
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=max(2, round((gb * 1e9 - 4 * vocab * hidden) / per_layer)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def experts_config(layers: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(  # type: ignore[call-arg]
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


def make_checkpoint(folder: Path, config: Any) -> None:
    """Save random weights in safetensors shards."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    noise = (torch.randn(_CACHED) * 0.02).bfloat16()
    for i, parameter in enumerate(model.parameters()):
        if parameter.dim() == 1:
            parameter.data.fill_(1)
            continue
        flat, shifted = parameter.data.view(-1), noise.roll(7919 * i)
        for piece in flat.split(_CACHED):
            piece.copy_(shifted[: len(piece)])
    model.save_pretrained(folder, max_shard_size="1GB")
    os.sync()


# ---- in a child


def status(name: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class Group:
    """A control group that limits the memory which this process allocates while it is in it.

    Attributes:
        base: resident memory of the process at creation, after the imports.
    """

    def __init__(self, limit: int) -> None:
        gc.collect()
        root = Path("/sys/fs/cgroup/memory")
        self.how, limit_file = "cgroup v1", "memory.limit_in_bytes"
        if not root.is_dir():
            root, self.how, limit_file = root.parent, "cgroup v2", "memory.max"
        group = root / f"offload-{os.getpid()}"
        self._out, self._in = root / "cgroup.procs", group / "cgroup.procs"
        try:
            group.mkdir()
            (group / limit_file).write_text(str(limit))
            self.enter()
        except OSError as error:
            self.how = f"no control group: {error.strerror}"
            self._out = self._in = Path("/dev/null")
            self.enter()
        self.base = status("VmRSS")

    def enter(self) -> None:
        """Join the group, and reset the peak."""
        self._in.write_text(str(os.getpid()))
        Path("/proc/self/clear_refs").write_text("5")

    def leave(self) -> None:
        """Leave the group: later allocations do not count."""
        self._out.write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        return status("VmHWM") - self.base


def limits(folder: Path, runner: Any, rows: int) -> tuple[float, float]:
    """Return bytes/s of direct reads, and seconds of a step's products, with nothing else running."""
    from verbatim.placement.offload import machine
    from verbatim.weights.lazy import Stored

    path = max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    size = path.stat().st_size
    machine._measured.clear()  # figures of the plan
    whole = Stored("file", path, 0, size, torch.uint8, (size,))
    packing = runner.weights.units.packing
    measured = machine.measure([whole], None, torch.bfloat16, packing=packing)
    forecast = replace(runner.forecast, machine=measured)
    used = [unit for unit in forecast.shape.units if not unit.gathers]
    return measured.read_rate, sum(forecast.products_s(unit, rows) for unit in used)


def prompts(args: argparse.Namespace) -> list[list[int]]:
    vocab = json.loads((Path(args.folder) / "config.json").read_text())["vocab_size"]
    noise = torch.Generator().manual_seed(7)
    ids: list[list[int]] = torch.randint(
        5, vocab, (args.sequences, args.prompt), generator=noise
    ).tolist()
    return ids


def child_verbatim(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM  # noqa: F401  (as in the other child)

    from verbatim import LLM, Offload, SamplingParams
    from verbatim.batch import Batch
    from verbatim.placement.offload.units import Units

    if args.whole:  # experts are read with their layers
        Units.split_experts = lambda self: None  # type: ignore[method-assign]
    # Loads all modules and starts the threads, so that these do not count against the limit.
    with LLM(placement=Offload(gpu="200MB", weights=(0, 0, 100), policy=None)) as small:
        small.generate(["Once"], SamplingParams(max_tokens=2))
    group, start = Group(args.limit), time.perf_counter()
    llm = LLM(
        args.folder,
        max_length=args.prompt + args.new + 8,
        max_sequences=args.sequences,
        quantization=args.quantization,
        placement=Offload(gpu=args.cap, workload=(args.prompt, args.new), trace=args.trace),
    )
    results: dict[str, Any] = {"how": group.how, "opened_s": time.perf_counter() - start}
    runner: Any = llm.engine.runner
    # Of each forward: begin, bytes read and seconds computed before, rows if it is a decode step (or 0).
    marks: list[tuple[float, int, float, int]] = []
    original = runner.forward

    def forward(batch: Batch) -> Any:
        rows = batch.num_tokens if batch.num_tokens == batch.num_sequences else 0
        computed_s = runner.timings().compute_s + runner._measured.sample_s
        marks.append((time.perf_counter(), bytes_from_disk(), computed_s, rows))
        return original(batch)

    runner.forward = forward
    steps: list[tuple[int, float, int, float]] = []  # rows, seconds, bytes, seconds of computing
    measured, peak = [], group.peak
    # Sampled: greedy decoding of random weights repeats one id, and with it the experts.
    params = SamplingParams(seed=1, max_tokens=1 + args.new, ignore_eos=True)
    for _ in range(args.rounds):
        group.leave()
        measured.append(limits(Path(args.folder), runner, args.sequences))
        group.enter()
        marks.clear()
        llm.generate(prompts(args), params)
        peak = max(peak, group.peak)
        pairs = itertools.pairwise(marks)
        steps += [
            (rows, b[0] - a[0], b[1] - a[1], b[2] - a[2])
            for (*a, rows), (*b, later) in pairs
            if rows and later
        ]
    rows = max(step[0] for step in steps)  # as many as fit the KV cache
    full = [step[1:] for step in steps if step[0] == rows]
    step_s, read_per_step, computing_s = (median(column) for column in zip(*full, strict=True))
    table, info = llm.stats()["offload"], llm.info()
    results |= {
        "rows": rows,
        "step_s": step_s,
        "read_per_step": read_per_step,
        "computing_s": computing_s,
        "bandwidth": median(rate for rate, _ in measured),
        "products_s": median(seconds for _, seconds in measured),
        "weights_per_step": table["decode_weights_bytes"]["actual"],
        "experts": info["experts"],
        "kv_share_on_disk": info["plan"]["kv"][2],
        "peak": peak,
        "plan": info["plan_summary"],
        "predicted_s": table["decode_step_s"]["predicted"],
        "actual_s": table["decode_step_s"]["actual"],
    }
    llm.close()
    gc.collect()
    return results | {"left": status("VmRSS") - group.base}


def child_accelerate(args: argparse.Namespace) -> dict[str, Any]:
    import accelerate  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteriaList
    from transformers import StoppingCriteria as Criteria

    group = Group(args.limit)
    marks: list[tuple[float, int]] = []

    class Mark(Criteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
            marks.append((time.perf_counter(), bytes_from_disk()))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    devices = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    layers = AutoConfig.from_pretrained(args.folder).num_hidden_layers
    devices |= {f"model.layers.{i}": "cpu" if i < args.kept else "disk" for i in range(layers)}
    with tempfile.TemporaryDirectory(dir=Path(args.folder).parent) as spare, torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            args.folder,
            device_map={**devices, "lm_head": "disk"},
            offload_folder=spare,
            dtype=torch.bfloat16,
        )
        model.generate(
            torch.tensor(prompts(args)),
            max_new_tokens=5,
            min_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Mark()]),
        )
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]
        seconds, nbytes = (median(column) for column in zip(*steps, strict=True))
        return {"step_s": seconds, "read_per_step": nbytes, "peak": group.peak}


# ---- the parent


def child(engine: str, args: argparse.Namespace, **more: Any) -> dict[str, Any] | None:
    """Run an engine in a child process; report a failure and return None."""
    for path in Path(args.folder).glob("*.safetensors"):
        with path.open("rb") as file:  # the page cache does not count against the limit
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    settings = {**vars(args), "engine": engine, **more}
    command = [sys.executable, __file__, "--child", json.dumps(settings, default=str)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        message = run.stderr.strip().splitlines()[-1:] or ["(nothing)"]
        print(f"  {engine} {more} ended with {run.returncode}: {message[0][:200]}")
        return None
    results: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--cap", default="1GB")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=12, help="new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="a checkpoint made before by --keep")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint where it is")
    parser.add_argument("--trace", help="write Verbatim's trace here")
    parser.add_argument("--alone", action="store_true", help="without accelerate")
    parser.add_argument("--quantization", help="of Verbatim's weights")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        inner = argparse.Namespace(**json.loads(args.child))
        run = child_verbatim if inner.engine == "verbatim" else child_accelerate
        print(json.dumps(run(inner)))
        return
    if args.quick:
        args.gb, args.cap, args.new, args.rounds, args.sequences = 0.3, "150MB", 4, 1, 8

    from verbatim.common.checks import memory_bytes

    cap = memory_bytes(args.cap, 1 << 62)
    args.limit, is_temporary = int(cap * 1.15), args.folder is None
    folder = Path(tempfile.mkdtemp(prefix="verbatim-checkpoint-") if is_temporary else args.folder)
    args.folder = str(folder)
    try:
        if not any(folder.glob("*.safetensors")):
            layers = 4 if args.quick else 16
            make_checkpoint(
                folder, experts_config(layers) if args.experts else dense_config(args.gb)
            )
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
        print(f"checkpoint {size / 1e9:.2f} GB, cap {args.cap}, {args.sequences} sequences")
        if args.experts:
            report_experts(args, cap)
        else:
            report(args, cap)
    finally:
        if is_temporary and not args.keep:
            shutil.rmtree(folder)


def run_verbatim(args: argparse.Namespace, cap: int, *, whole: bool = False) -> float:
    """Run Verbatim, print its figures, and return its tokens/s. `whole`: all experts are read."""
    results = child("verbatim", args, whole=whole)
    if results is None:
        raise SystemExit(1)
    step, rate = results["step_s"], results["rows"] / results["step_s"]
    io_s, products_s = results["weights_per_step"] / results["bandwidth"], results["products_s"]
    limit, busy = max(io_s, products_s), max(io_s, results["computing_s"])
    print(
        f"{results['plan']}\n"
        f"verbatim: step of {results['rows']} rows {step:.3f} s ({rate:.1f} tokens/s), opened in "
        f"{results['opened_s']:.1f} s; {results['how']}; {results['experts']}\n"
        f"  limit {limit:.3f} s: reading {results['weights_per_step'] / 1e9:.2f} GB of weights at "
        f"{results['bandwidth'] / 1e9:.2f} GB/s takes {io_s:.3f} s, products {products_s:.3f} s; "
        f"reached {100 * limit / step:.0f} %; busy {100 * busy / step:.0f} %: computing takes "
        f"{results['computing_s']:.3f} s\n"
        f"  predicted {results['predicted_s']:.3f} s a forward, actual {results['actual_s']:.3f} s; "
        f"{results['kv_share_on_disk']:.0f} % of K and V on the disk\n"
        f"  read from disk per step {results['read_per_step'] / 1e9:.2f} GB, peak over the baseline "
        f"{results['peak'] / 1e9:.3f} GB ({100 * results['peak'] / cap:.0f} % of the cap), left after close "
        f"{results['left'] / 1e6:.0f} MB"
    )
    return float(rate)


def report_experts(args: argparse.Namespace, cap: int) -> None:
    rounds, ratios = args.rounds, []
    args.rounds = 1  # in each process
    for _ in range(rounds):
        print("chosen experts are read:")
        chosen = run_verbatim(args, cap)
        print("all experts are read:")
        ratios.append(chosen / run_verbatim(args, cap, whole=True))
    print(f"ratio: {median(ratios):.2f} times reading all of them")


def report(args: argparse.Namespace, cap: int) -> None:
    rate, best = run_verbatim(args, cap), 0.0
    if args.alone:
        return
    for kept in (0, 3):
        theirs = child("accelerate", args, kept=kept)
        if theirs is None:
            continue
        speed = args.sequences / theirs["step_s"]
        best = max(best, speed)
        print(
            f"accelerate, {kept} layers in memory: step {theirs['step_s']:.2f} s ({speed:.2f} tokens/s), "
            f"{theirs['read_per_step'] / 1e9:.2f} GB a step, peak {theirs['peak'] / 1e9:.2f} GB"
        )
    if best:
        print(f"ratio: {rate / best:.2f} times accelerate at its best")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
