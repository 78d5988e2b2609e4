"""FlexLLMGen's benchmark and its arguments: `python -m verbatim.compat.flexllmgen`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from verbatim.compat.flexllmgen.model import OptLM, Timings
from verbatim.compat.flexllmgen.policy import ExecutionEnv, Policy
from verbatim.errors import InvalidRequest

_PROMPT = "The longest river of Africa is the Nile. "
_WARMUP = 32  # tokens
_GB = 2**30


@dataclass(frozen=True)
class Task:
    """The arguments of one `generate`, under FlexLLMGen's names."""

    inputs: Any
    prompt_len: int
    gen_len: int
    cut_gen_len: int | None
    do_sample: bool
    temperature: float
    stop: int | None


def str2bool(text: str | bool) -> bool:
    """Return a boolean flag's value: yes, true, t, y and 1, or no, false, f, n and 0."""
    words = dict.fromkeys(("yes", "true", "t", "y", "1"), True)
    words |= dict.fromkeys(("no", "false", "f", "n", "0"), False)
    value = words.get(str(text).lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return value


def add_parser_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of FlexLLMGen's commands, with its defaults, to `parser`."""
    add = parser.add_argument
    add("--model", default="facebook/opt-6.7b", help="a folder, a hub id, or the name of an OPT")
    add("--path", default=None, help="the folder of the model, or its parent")
    add("--offload-dir", default="~/flexllmgen_offload_dir", help="the folder of the disk tier")
    for name, default in {"prompt-len": 512, "gen-len": 32, "gpu-batch-size": 4}.items():
        add(f"--{name}", type=int, default=default)
    add("--num-gpu-batches", type=int, default=1)
    add("--cut-gen-len", type=int)
    add("--debug-mode", choices=["fewer_batch", "breakdown"])
    add("--percent", nargs="+", type=int, default=[100, 0, 100, 0, 100, 0], help="of a Policy")
    for name in ("sep-layer", "pin-weight", "overlap"):
        add(f"--{name}", type=str2bool, nargs="?", const=True, default=True)
    for name in ("cpu-cache-compute", "compress-weight", "compress-cache", "no-log"):
        add(f"--{name}", action="store_true")
    add("--attn-sparsity", type=float, default=1.0)
    add("--log-file", default="auto")
    add("--verbose", type=int, default=2)


def run_flexllmgen(args: argparse.Namespace) -> Timings:
    """Run one block of rows after a warmup, print its figures, and return its timings.

    Every prompt is the same sentence, repeated to exactly `prompt_len` tokens.

    Args:
        args: flags of `add_parser_arguments`. The figures go to stdout if `verbose` is at least 1, with the
            text of the first and the last row if it is at least 2. They are appended to `log_file` unless
            `no_log`; "auto" is a file in the working directory, named after the sizes.

    Raises:
        InvalidRequest, NotSupported: a flag out of range or unsupported, or a model without tokenizer.
        ModelError: there is no such model.
    """
    if len(args.percent) != 6:
        raise InvalidRequest(f"--percent {args.percent}: must be six numbers")
    sizes: list[Any] = [args.gpu_batch_size, args.num_gpu_batches, *args.percent]
    names = [field.name for field in fields(Policy)[len(sizes) :] if hasattr(args, field.name)]
    policy = Policy(*sizes, **{name: getattr(args, name) for name in names})
    env = ExecutionEnv.create(args.offload_dir)
    with OptLM(args.model, env, args.path, policy) as model:
        tokenizer = model.llm.tokenizer
        if tokenizer is None:
            raise InvalidRequest(f"--model {args.model}: the benchmark needs the model's tokenizer")
        ids = tokenizer.encode(_PROMPT)
        prompt = (ids * (1 + args.prompt_len // len(ids)))[: args.prompt_len]
        rows = [prompt] * (policy.gpu_batch_size * policy.num_gpu_batches)
        model.generate([row[:_WARMUP] for row in rows], 1)
        out = model.generate(
            rows,
            args.gen_len,
            debug_mode=args.debug_mode,
            cut_gen_len=args.cut_gen_len,
            verbose=args.verbose,
        )
        info, timings = model.llm.info(), model.timings
        texts = [tokenizer.hf.decode(row, skip_special_tokens=True) for row in out[[0, -1]]]
    kv_bytes = info["kv_bytes_per_token"] * len(rows) * (args.prompt_len + args.gen_len)
    line = f"model size: {info['weight_bytes'] / _GB:.3f} GB\tcache size: {kv_bytes / _GB:.3f} GB"
    figures = "\n".join([line, *_speeds(timings, args.prompt_len), *timings.lines()[2:]])
    if args.verbose >= 2:
        sys.stdout.write("".join(f"{number}: {text}\n" for number, text in enumerate(texts)))
    if args.verbose:
        sys.stdout.write(f"{figures}\n")
    if not args.no_log:
        name = f"fo-{Path(args.model).name}-gbs{args.gpu_batch_size}-ngbs{args.num_gpu_batches}"
        name += f"-prompt{args.prompt_len}-gen{args.gen_len}.log"
        with Path(name if args.log_file == "auto" else args.log_file).open("a") as log:
            log.write(f"{figures}\n")
    return timings


def _speeds(timings: Timings, prompt_len: int) -> list[str]:
    """Return lines with the latency and throughput of prefill, decode, and both together."""
    rows, steps = timings.num_rows, len(timings.costs)
    parts = {
        "prefill": (timings.prefill.wall_s, rows * prompt_len),
        "decode": (timings.decode.wall_s, rows * (steps - 1)),
        "total": (timings.total_s, rows * steps),
    }
    return [
        f"{name} latency: {seconds:.3f} s\t{name} throughput: {tokens / max(seconds, 1e-9):.3f} token/s"
        for name, (seconds, tokens) in parts.items()
    ]
