"""KempnerForge's `scripts/generate.py`: generate for one prompt, or interactively."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from verbatim.cli.options import MODEL, open_llm, seeded
from verbatim.cli.terminal import WrongUsage, exit_status, note, one_line, read_stream
from verbatim.compat.kempnerforge.filters import filters
from verbatim.errors import EngineClosed, InvalidRequest, ModelError, VerbatimError
from verbatim.model.kempner.config import KempnerConfig, ModelConfig
from verbatim.params import SamplingParams

if TYPE_CHECKING:
    from verbatim.api.llm import LLM

# Fields that stay text: a folder may be named "5".
_PATHS = {("data", "tokenizer_path"), ("checkpoint", "load_path")}
# Flags that are true without a value, and take one only after "=".
_BOOLEANS = {
    ("model", field.name) for field in dataclasses.fields(ModelConfig) if field.type == "bool"
} | {("model", "moe_gradient_scale")}  # a training field, not in ModelConfig
_WORDS = {"true": True, "yes": True, "false": False, "no": False}
_PROG = "python -m verbatim.compat.kempnerforge"

Overrides = dict[str, dict[str, Any]]


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status; errors are one line on stderr."""
    return exit_status(_run, arguments)


def _run(arguments: Sequence[str]) -> None:
    flags, overrides = parse(arguments)
    config = KempnerConfig.read(flags.config, overrides)
    _check(flags, config)
    sampling = filters(flags.temperature, flags.top_k, flags.top_p)
    params = SamplingParams(max_tokens=flags.max_tokens, seed=flags.seed, **sampling)
    values = dict.fromkeys(option.name for option in MODEL)
    settings = {"model": config.load_path, "config": config}
    is_float16 = flags.dtype == "float16"
    if is_float16:
        note("--dtype float16: computed in float32, which holds every float16")
    dtype = "float32" if is_float16 else flags.dtype
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


def _check(flags: argparse.Namespace, config: KempnerConfig) -> None:
    """Reject invalid flags before anything is opened."""
    if flags.dtype not in ("bfloat16", "float16", "float32"):
        raise InvalidRequest(f"--dtype {flags.dtype}: must be bfloat16, float16 or float32")
    if not flags.prompt and not flags.interactive:
        raise InvalidRequest("there is no prompt: give --prompt or --interactive")
    if config.load_path is None:
        raise InvalidRequest(
            "there is no checkpoint: give --checkpoint.load_path (random weights generate noise)"
        )
    if not os.path.exists(os.path.expanduser(config.load_path)):
        raise ModelError(f"checkpoint path does not exist: {config.load_path}")
    if config.tokenizer_path is None:
        raise InvalidRequest(
            "there is no tokenizer: give --data.tokenizer_path, a folder or hub id"
        )


def _answer(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Continue a prompt, and print both. Ctrl-C stops generation and keeps the text so far."""
    params = seeded(params)
    texts, count, _ = read_stream(llm.stream(prompt, params))
    _print(f"\n--- Prompt ---\n{prompt}")
    _print(f"\n--- Generated ({count} tokens) ---\n{texts[0]}\n")
    if params.temperature > 0:
        note(f"(seed {params.seed})")


def _converse(llm: LLM, params: SamplingParams) -> None:
    """Answer prompts from stdin, one per line, until EOF or Ctrl-C; print errors and continue."""
    if sys.stdin is None:
        raise WrongUsage("stdin is closed: there are no prompts to read")
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (gives `input` history and editing)
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


# ---- the arguments: flags and overrides of the TOML, in any order


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongUsage(f"{message} (see --help)")


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Overrides]:
    """Return the flags, and the overrides by section and field.

    Raises:
        WrongUsage: an unknown flag, a missing or invalid value, or an override that generation does
            not use.
    """
    parser = _parser()
    # Flags that take a value; the value is never parsed as an override.
    valued = {flag for a in parser._actions if a.nargs is None for flag in a.option_strings}
    rest: list[str] = []
    overrides: Overrides = {}
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if argument in valued and queue:
            # Joined, so that a prompt may begin with a dash.
            rest.append(f"{argument}={queue.pop(0)}")
        elif argument.startswith("--") and "." in argument.partition("=")[0]:
            name, equals, value = argument[2:].partition("=")
            section, _, field = name.partition(".")
            if not equals and (section, field) not in _BOOLEANS:
                if not queue or queue[0].startswith("--"):
                    raise WrongUsage(f"--{name} needs a value")
                equals, value = "=", queue.pop(0)
            _override(overrides, section, field, value if equals else None)
        else:
            rest.append(argument)
    return parser.parse_args(rest), overrides


def _override(overrides: Overrides, section: str, field: str, text: str | None) -> None:
    name, is_path = f"{section}.{field}", (section, field) in _PATHS
    if section != "model" and not is_path:
        raise WrongUsage(
            f"--{name} does not affect generation; only --model.*, --data.tokenizer_path and "
            "--checkpoint.load_path do"
        )
    if is_path and not text:
        raise WrongUsage(f"--{name} needs a value")
    value = True if text is None else text if is_path else _value(text)
    overrides.setdefault(section, {})[field] = value


def _value(text: str) -> Any:
    """Parse a number, true, false or None; return other text unchanged."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROG,
        allow_abbrev=False,
        description="Generate text from a KempnerForge checkpoint.",
        epilog="--section.field=VALUE or --section.field VALUE overrides the config: "
        "--checkpoint.load_path (a step_N, or the folder with its link latest), "
        "--data.tokenizer_path, and --model.*; a boolean field alone is true; its VALUE, if any, "
        "must follow =.",
    )
    add = parser.add_argument
    add("config", help="the TOML the model was trained with")
    add("--prompt", default="", metavar="TEXT", help="the text to continue")
    add("--max_tokens", type=int, default=128, metavar="N", help="new tokens; default: 128")
    add("--temperature", type=float, default=1.0, metavar="T", help="default: 1.0; 0 is greedy")
    add("--top_k", type=int, default=0, metavar="K", help="default: 0, which keeps all")
    add("--top_p", type=float, default=1.0, metavar="P", help="default: 1.0, which keeps all")
    add("--seed", type=int, default=None, metavar="N", help="default: random")
    add("--interactive", action="store_true", help="read prompts from stdin, one per line")
    add("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N")
    add(
        "--dtype",
        default="bfloat16",
        metavar="D",
        help="bfloat16 (the default), float32, or float16 (in float32)",
    )
    return parser
