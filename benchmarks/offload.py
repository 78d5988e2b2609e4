"""A checkpoint larger than its memory: Verbatim and accelerate's disk offload, under one limit.

    python benchmarks/offload.py [--gb 4] [--cap 1GB] [--sequences 64] [--rounds 3] [--folder PATH]
    python benchmarks/offload.py --experts [--cap 900MB] [--sequences 1]

Makes a checkpoint of random weights in Qwen3's shape, or with `--experts` in Qwen3 MoE's: 16 layers of 64
experts, of which each token chooses 8. Then Verbatim runs in turns as it is and reading all experts of
every layer; random weights choose all experts about equally often, from which a cache gains least.

Each engine runs in a process of its own, which, after its imports, joins a control group with the memory
limit (as root, with cgroup v1 or v2; otherwise only the peak is told). Both decode the same prompts; the
time of a step is that of the steps behind the first token. A step takes at least as long as its reading and
as its products. Both are measured in the same processes between two generations: reading by what the same
file gives when nothing else runs, products on weights in memory. "Busy" is the share of a step that reading,
or all that it computes (products, attention, norms, the draw) would take alone. As the latter is timed in
the step itself, this shows waiting and overhead, not slow computing. Bytes read are the operating system's.

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
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

_CACHED = 1 << 24  # random numbers, of which all weights are made


def dense_config(gb: float) -> Any:
    """Return a config of about so many gigabytes in bfloat16."""
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
        flat, own = parameter.data.view(-1), noise.roll(7919 * i)
        for piece in flat.split(_CACHED):
            piece.copy_(own[: len(piece)])
    model.save_pretrained(folder, max_shard_size="1GB")
    os.sync()


# ---- in a child


def status(name: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class Group:
    """A control group with a limit on the memory that this process takes while it is in it.

    Attributes:
        base: memory of the process when it was made, after the imports.
    """

    def __init__(self, limit: int) -> None:
        gc.collect()
        root = Path("/sys/fs/cgroup/memory")
        self.how, most = "cgroup v1", "memory.limit_in_bytes"
        if not root.is_dir():
            root, self.how, most = root.parent, "cgroup v2", "memory.max"
        inside = root / f"offload-{os.getpid()}"
        self._out, self._in = root / "cgroup.procs", inside / "cgroup.procs"
        try:
            inside.mkdir()
            (inside / most).write_text(str(limit))
            self.enter()
        except OSError as error:
            self.how = f"no control group: {error.strerror}"
            self._out = self._in = Path("/dev/null")
            self.enter()
        self.base = status("VmRSS")

    def enter(self) -> None:
        """Count memory from here on, and the peak anew."""
        self._in.write_text(str(os.getpid()))
        Path("/proc/self/clear_refs").write_text("5")

    def leave(self) -> None:
        """Count what is taken from here on elsewhere."""
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
    machine._found.clear()  # of the plan
    whole = Stored("file", path, 0, size, torch.uint8, (size,))
    found = machine.measure([whole], None, torch.bfloat16)
    forecast = replace(runner.forecast, machine=found)
    used = [unit for unit in forecast.shape.units if not unit.gathers]
    return found.read_rate, sum(forecast.products_s(unit, rows) for unit in used)


def prompts(args: argparse.Namespace) -> list[list[int]]:
    vocab = json.loads((Path(args.folder) / "config.json").read_text())["vocab_size"]
    noise = torch.Generator().manual_seed(7)
    ids: list[list[int]] = torch.randint(
        5, vocab, (args.sequences, args.prompt), generator=noise
    ).tolist()
    return ids


def child_verbatim(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM  # noqa: F401  (as the other has)

    from verbatim import LLM, Offload, SamplingParams
    from verbatim.batch import Batch
    from verbatim.placement.offload.units import Units

    if args.whole:  # experts come with their layers
        Units.split_experts = lambda self: None  # type: ignore[method-assign]
    # All modules and the threads' stacks, which count against nobody's limit.
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
    found: dict[str, Any] = {"how": group.how, "opened_s": time.perf_counter() - start}
    runner: Any = llm.engine.runner
    # When a forward begins, what was read and computed before, its rows if each is of another sequence.
    marks: list[tuple[float, int, float, int]] = []
    plain = runner.forward

    def forward(batch: Batch) -> Any:
        rows = batch.num_tokens if batch.num_tokens == batch.num_sequences else 0
        computed_s = runner.timings().compute_s + runner._measured.sample_s
        marks.append((time.perf_counter(), bytes_from_disk(), computed_s, rows))
        return plain(batch)

    runner.forward = forward
    steps: list[tuple[int, float, int, float]] = []  # rows, seconds, bytes, seconds of computing
    measured, peak = [], group.peak
    # Drawn and not the likeliest: random weights repeat that, and with it the experts.
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
    rows = max(step[0] for step in steps)  # as many as have room for K and V
    full = [step[1:] for step in steps if step[0] == rows]
    step_s, read_per_step, computing_s = (median(column) for column in zip(*full, strict=True))
    table, info = llm.stats()["offload"], llm.info()
    found |= {
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
    return found | {"left": status("VmRSS") - group.base}


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

    where = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    layers = AutoConfig.from_pretrained(args.folder).num_hidden_layers
    where |= {f"model.layers.{i}": "cpu" if i < args.kept else "disk" for i in range(layers)}
    with tempfile.TemporaryDirectory(dir=Path(args.folder).parent) as spare, torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            args.folder,
            device_map={**where, "lm_head": "disk"},
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
    """Run an engine; return None, and say so, where it fails."""
    for path in Path(args.folder).glob("*.safetensors"):
        with path.open("rb") as file:  # what is cached counts against nobody's limit
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
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

    from verbatim.checks import memory_bytes

    cap = memory_bytes(args.cap, 1 << 62)
    args.limit, made = int(cap * 1.15), args.folder is None
    folder = Path(tempfile.mkdtemp(prefix="verbatim-checkpoint-") if made else args.folder)
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
        if made and not args.keep:
            shutil.rmtree(folder)


def run_verbatim(args: argparse.Namespace, cap: int, *, whole: bool = False) -> float:
    """Run Verbatim, print what it took, and return its tokens/s; `whole`: reading all experts."""
    found = child("verbatim", args, whole=whole)
    if found is None:
        raise SystemExit(1)
    step, rate = found["step_s"], found["rows"] / found["step_s"]
    io_s, products_s = found["weights_per_step"] / found["bandwidth"], found["products_s"]
    limit, busy = max(io_s, products_s), max(io_s, found["computing_s"])
    print(
        f"{found['plan']}\n"
        f"verbatim: step of {found['rows']} rows {step:.3f} s ({rate:.1f} tokens/s), opened in "
        f"{found['opened_s']:.1f} s; {found['how']}; {found['experts']}\n"
        f"  limit {limit:.3f} s: reading {found['weights_per_step'] / 1e9:.2f} GB of weights at "
        f"{found['bandwidth'] / 1e9:.2f} GB/s takes {io_s:.3f} s, products {products_s:.3f} s; "
        f"reached {100 * limit / step:.0f} %; busy {100 * busy / step:.0f} %: computing takes "
        f"{found['computing_s']:.3f} s\n"
        f"  predicted {found['predicted_s']:.3f} s a forward, actual {found['actual_s']:.3f} s; "
        f"{found['kv_share_on_disk']:.0f} % of K and V on the disk\n"
        f"  read from disk per step {found['read_per_step'] / 1e9:.2f} GB, peak over the baseline "
        f"{found['peak'] / 1e9:.3f} GB ({100 * found['peak'] / cap:.0f} % of the cap), left after close "
        f"{found['left'] / 1e6:.0f} MB"
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
