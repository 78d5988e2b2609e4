"""`python -m benchmarks.peers`: the table of all systems."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.peers.report import write_markdown
from benchmarks.peers.run import SYSTEMS, Plan, Run
from benchmarks.peers.setup import ENVIRONMENT
from benchmarks.peers.shape import FORMATS, KV_BYTES
from benchmarks.peers.table import rows_of, text
from benchmarks.peers.weights import SHAPES


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Verbatim, transformers, llama.cpp and OpenVINO on the same random weights, in turns.",
    )
    add = parser.add_argument
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    add("--rows", type=int, nargs="*", default=[1, 8, 32])
    add("--prompts", type=int, nargs="+", default=[128, 1024], help="tokens before decode")
    add("--prefills", type=int, nargs="*", default=[512, 2048], help="tokens of a timed prompt")
    add("--rounds", type=int, default=3, help="turns of every system in a cell")
    add("--steps", type=int, default=12, help="decode steps of a turn, at most")
    add("--seconds", type=float, default=3.0, help="of a turn's steps; three are made in any case")
    add("--kv", choices=KV_BYTES, default="16bit", help="16bit: bf16, of llama.cpp f16")
    add("--head-bits", type=int, choices=[8, 4], default=8, help="of the head, in int4")
    add("--shape", choices=SHAPES, default="0.6b")
    add("--layers", type=int, help="fewer than the shape's")
    add("--threads", type=int, default=2)
    add(
        "--weights",
        type=Path,
        help="folder for the weights, kept and used again; else a temporary one",
    )
    add("--env", type=Path, default=ENVIRONMENT, help="the peers' environment, made by .setup")
    add("--json", type=Path, metavar="FILE", help="every time that was measured")
    add("--markdown", type=Path, metavar="FILE", help="the table for the documentation")
    add("--quick", action="store_true", help="one round of few steps: minutes, and rough")
    return parser


def main() -> None:
    parser = arguments()
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.seconds = 1, 6, 1.0
    for name in ("rounds", "steps", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    plan = Plan(
        systems=options.systems,
        formats=options.formats,
        rows=options.rows,
        prompts=options.prompts,
        prefills=options.prefills,
        rounds=options.rounds,
        steps=options.steps,
        seconds=options.seconds,
        kv=options.kv,
        head_bits=options.head_bits,
        threads=options.threads,
    )
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        run = Run(plan, options.weights or Path(temporary), options.env)
        run.prepare(options.shape, options.layers)
        run.measure()
    print("\n" + text(rows_of(run.measured, run.systems)))
    for line in run.remarks:
        print(line)
    if options.json:
        options.json.write_text(json.dumps(run.as_json(), indent=1) + "\n")
    if options.markdown:
        write_markdown(run, options.markdown)


if __name__ == "__main__":
    main()
