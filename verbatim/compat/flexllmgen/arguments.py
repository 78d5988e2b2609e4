"""The arguments of FlexLLMGen's commands."""

from __future__ import annotations

import argparse


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
