"""The command `scripts/generate.py`: generates for one prompt, or interactively."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verbatim.cli.options import MODEL, open_llm, seeded
from verbatim.cli.terminal import WrongUsage, exit_status, interruptible, note, one_line
from verbatim.compat.kempnerforge.config import parse
from verbatim.compat.kempnerforge.filters import filters
from verbatim.errors import EngineClosed, InvalidRequest, ModelError, VerbatimError
from verbatim.model.kempner.config import KempnerConfig
from verbatim.params import SamplingParams

if TYPE_CHECKING:
    from verbatim.llm import LLM


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status; errors are one line on stderr."""
    return exit_status(_run, arguments)


def _run(arguments: Sequence[str]) -> None:
    flags, overrides = parse(arguments)
    config = KempnerConfig.read(flags.config, overrides)
    params = _params(flags, config)
    _check(flags, config)
    values = dict.fromkeys(option.name for option in MODEL)
    settings = {"model": config.load_path, "config": config}
    wide = flags.dtype == "float16"
    if wide:
        note("--dtype float16: computed in float32, which holds every float16")
    dtype = "float32" if wide else flags.dtype
    settings |= {"dtype": dtype, "device": flags.device}
    with open_llm(values | settings) as llm:
        admission = llm.engine.admission
        if admission.max_length == config.model.max_seq_len:
            admission.limit_source = "max_seq_len of [model]"
        _print(f"Loaded checkpoint: {config.load_path}")
        size = llm.info()["parameters"] / 1e6
        device = "cpu" if flags.device == "auto" else flags.device
        _print(f"Model: {size:.0f}M params on {device} ({dtype})")
        if flags.prompt:
            _answer(llm, flags.prompt, params)
        if flags.interactive:
            _converse(llm, params)


def _params(flags: argparse.Namespace, config: KempnerConfig) -> SamplingParams:
    """Return the flags as sampling parameters."""
    return SamplingParams(
        max_tokens=flags.max_tokens,
        seed=flags.seed,
        **filters(flags.temperature, flags.top_k, flags.top_p, config.model.vocab_size),
    )


def _check(flags: argparse.Namespace, config: KempnerConfig) -> None:
    """Refuse invalid flags before anything is opened."""
    if flags.dtype not in ("bfloat16", "float16", "float32"):
        raise InvalidRequest(f"--dtype {flags.dtype}: must be bfloat16, float16 or float32")
    if not flags.prompt and not flags.interactive:
        raise InvalidRequest("there is no prompt: give --prompt or --interactive")
    if config.load_path is None:
        raise InvalidRequest(
            "there is no checkpoint: give --checkpoint.load_path (random weights have nothing to say)"
        )
    if not os.path.exists(os.path.expanduser(config.load_path)):
        raise ModelError(f"checkpoint path does not exist: {config.load_path}")
    if config.tokenizer_path is None:
        raise InvalidRequest(
            "there is no tokenizer: give --data.tokenizer_path, a folder or hub id"
        )


def _answer(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Continue a prompt, and print both. Ctrl-C ends it early and keeps the text so far."""
    params = seeded(params)
    text, count = "", 0
    with interruptible(llm.stream(prompt, params)) as deltas:
        for delta in deltas:
            text += delta.text
            count += len(delta.token_ids)
    _print(f"\n--- Prompt ---\n{prompt}")
    _print(f"\n--- Generated ({count} tokens) ---\n{text}\n")
    if params.temperature > 0:
        note(f"(seed {params.seed})")


def _converse(llm: LLM, params: SamplingParams) -> None:
    """Read prompts from stdin, one a line, until its end or Ctrl-C; print errors and continue."""
    if sys.stdin is None:
        raise WrongUsage("stdin is closed: there are no prompts to read")
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401  (gives `input` history and editing)
        except ImportError:
            pass
    _print("Interactive mode: type a prompt and press Enter. Ctrl-C to exit.\n")
    while True:
        try:
            prompt = input(">>> ")
        except (EOFError, KeyboardInterrupt):
            _print("\nExiting.")
            return
        except UnicodeDecodeError:
            raise InvalidRequest("stdin is not UTF-8 text") from None
        if not prompt.strip():
            continue
        try:
            _answer(llm, prompt, params)
        except EngineClosed:
            raise
        except VerbatimError as error:
            note(one_line(error))


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
