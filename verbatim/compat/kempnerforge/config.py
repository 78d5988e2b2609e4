"""The command's arguments: flags and overrides of the TOML, in any order."""

from __future__ import annotations

import argparse
import ast
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from verbatim.cli.terminal import WrongUsage
from verbatim.model.kempner.config import ModelConfig

# Values kept as text: a folder may be called "5".
_PATHS = {("data", "tokenizer_path"), ("checkpoint", "load_path")}
# Flags that are true without a value, and take one only after "=".
_BOOLEANS = {
    ("model", field.name) for field in dataclasses.fields(ModelConfig) if field.type == "bool"
} | {("model", "moe_gradient_scale")}  # a training field, not in ModelConfig
_WORDS = {"true": True, "yes": True, "false": False, "no": False}
_PROG = "python -m verbatim.compat.kempnerforge"

Overrides = dict[str, dict[str, Any]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongUsage(f"{message} (--help lists what there is)")


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Overrides]:
    """Return the flags, and the overrides by section and field.

    Raises:
        WrongUsage: an unknown flag, a missing or invalid value, or an override that generation does
            not use.
    """
    parser = _parser()
    # The value of such a flag is never an override, whatever it looks like.
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
            f"--{name} has no part in generation; --model.*, --data.tokenizer_path and "
            "--checkpoint.load_path have"
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
        epilog="--section.field=VALUE or --section.field VALUE goes before what the config says: "
        "--checkpoint.load_path (a step_N, or the folder with its link latest), "
        "--data.tokenizer_path, and --model.*; a boolean field alone is true, and takes no VALUE but "
        "after =.",
    )
    add = parser.add_argument
    add("config", help="the TOML the model was trained with")
    add("--prompt", default="", metavar="TEXT", help="the text to continue")
    add("--max_tokens", type=int, default=128, metavar="N", help="new tokens; default: 128")
    add("--temperature", type=float, default=1.0, metavar="T", help="default: 1.0; 0 is greedy")
    add("--top_k", type=int, default=0, metavar="K", help="default: 0, which keeps all")
    add("--top_p", type=float, default=1.0, metavar="P", help="default: 1.0, which keeps all")
    add("--seed", type=int, default=None, metavar="N", help="a fresh one if left out")
    add("--interactive", action="store_true", help="ask for prompts, one a line")
    add("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N")
    add(
        "--dtype",
        default="bfloat16",
        metavar="D",
        help="bfloat16 (the default), float32, or float16 (in float32)",
    )
    return parser
