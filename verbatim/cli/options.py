"""The options that several commands share: one table from which their help, types and checks follow.

An option has its Python name with dashes. None, or an empty list, means that it wasn't given; the
defaults stay where they are defined, in `SamplingParams` and `LLM`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from verbatim.cli.terminal import WrongUsage
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams

if TYPE_CHECKING:
    from verbatim.llm import LLM
    from verbatim.placement.cluster.choice import Cluster
    from verbatim.placement.offload.choice import Offload

DEFAULT_MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option: its Python name, the type typer parses, the panel of the help it stands in.

    `read` makes the Python value of what typer parsed, where that is not the value itself. A switch that
    is `on` unless it is turned off has a flag for that.
    """

    name: str
    type: Any
    panel: str
    help: str
    metavar: str | None = None
    read: Callable[[Any], Any] | None = None
    on: bool = False

    @property
    def flags(self) -> str:
        dashed = "--" + self.name.replace("_", "-")
        default_true = self.type is bool and getattr(_defaults(), self.name, self.on) is True
        return f"{dashed}/--no-{dashed[2:]}" if default_true else dashed

    def parameter(self, defaults: SamplingParams | None) -> inspect.Parameter:
        """The keyword parameter that typer reads; `defaults` are shown in the help."""
        shown = getattr(defaults, self.name, None)
        plain = isinstance(shown, int | float | str) and not isinstance(shown, bool)
        info = typer.Option(
            self.flags,
            help=f"{self.help} Default: {shown}." if plain else self.help,
            rich_help_panel=self.panel,
            metavar=self.metavar,
            show_default=False,
        )
        kind = self.type if self.type in (list[int], list[str]) else self.type | None
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind, info],
        )


def _defaults() -> SamplingParams:
    return SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)


def read_text(name: str, read: Callable[[], bytes]) -> str:
    """The text of a file. The line end that closes a text file is not part of it."""
    try:
        text = read().decode()
    except OSError as error:
        raise InvalidRequest(f"can't read {name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InvalidRequest(
            f"{name} is not UTF-8 text: byte 0x{byte:02x} at offset {error.start}"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def _text_or_file(text: str) -> str:
    return read_text(text, Path(text[1:]).read_bytes) if text.startswith("@") else text


def _biases(entries: list[str]) -> dict[int, float]:
    return dict(_bias(entry) for entry in entries)


def _bias(entry: str) -> tuple[int, float]:
    token_id, equals, value = entry.partition("=")
    try:
        if not equals:
            raise ValueError
        return int(token_id), float(value)
    except ValueError:
        raise WrongUsage(f"--logit-bias {entry!r}: must be ID=VALUE, as 42=-1.5") from None


def _early_stopping(text: str) -> bool | str:
    meanings: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text.lower() not in meanings:
        raise WrongUsage(f"--early-stopping {text!r}: must be true, false or never")
    return meanings[text.lower()]


_DRAWING, _PENALTIES, _STOPPING, _REPORT = "Sampling", "Penalties and bans", "Ending", "Reports"
_STRUCTURE, _BEAMS = "Structure of the completion (one of these)", "Beam search"

SAMPLING = (
    Option("temperature", float, _DRAWING, "Divide the logits by this; 0 takes the largest."),
    Option("top_k", int, _DRAWING, "Keep the k likeliest tokens; 0 keeps all."),
    Option("top_p", float, _DRAWING, "Keep the fewest tokens with this much probability."),
    Option("min_p", float, _DRAWING, "Drop tokens below this share of the likeliest one."),
    Option(
        "typical_p", float, _DRAWING, "Keep the most typical tokens with this much probability."
    ),
    Option("seed", int, _DRAWING, "Seed of the noise; a fresh one otherwise, which is reported."),
    Option("repetition_penalty", float, _PENALTIES, "Weaken ids seen in prompt or completion."),
    Option("presence_penalty", float, _PENALTIES, "Subtract once from ids in the completion."),
    Option("frequency_penalty", float, _PENALTIES, "Subtract per occurrence in the completion."),
    Option("logit_bias", list[str], _PENALTIES, "Add VALUE to an id's logit.", "ID=VALUE", _biases),
    Option("bad_words", list[str], _PENALTIES, "A string never to generate.", "TEXT"),
    Option("allowed_token_ids", list[int], _PENALTIES, "The only ids that may be drawn.", "ID"),
    Option("max_tokens", int, _STOPPING, "At most this many new tokens."),
    Option("min_tokens", int, _STOPPING, "No end before this many tokens."),
    Option("stop", list[str], _STOPPING, "A string that ends the completion.", "TEXT"),
    Option("stop_token_ids", list[int], _STOPPING, "An id that ends the completion.", "ID"),
    Option("include_stop_str_in_output", bool, _STOPPING, "Leave the stop string in the text."),
    Option("ignore_eos", bool, _STOPPING, "Go on past the end of sequence."),
    Option("timeout_s", float, _STOPPING, "End it as it is after this many seconds.", "SECONDS"),
    Option(
        "json_schema",
        str,
        _STRUCTURE,
        "A JSON document of this schema.",
        "JSON|@FILE",
        _text_or_file,
    ),
    Option("any_whitespace", bool, _STRUCTURE, "Let the JSON document be indented."),
    Option("regex", str, _STRUCTURE, "A text that matches as a whole.", "PATTERN"),
    Option(
        "grammar", str, _STRUCTURE, "A text of this Lark grammar.", "GRAMMAR|@FILE", _text_or_file
    ),
    Option("choice", list[str], _STRUCTURE, "One of these texts.", "TEXT"),
    Option("skip_special_tokens", bool, _REPORT, "Leave special tokens out of the text."),
)

# Those of `verbatim generate` alone: a chat shows one answer as it grows.
GENERATE_ONLY = (
    Option("n", int, _DRAWING, "Completions of the prompt."),
    Option(
        "num_beams",
        int,
        _BEAMS,
        "Search with this many beams instead of sampling; print the n best.",
    ),
    Option("length_penalty", float, _BEAMS, "Scores are divided by the length to this power."),
    Option(
        "early_stopping",
        str,
        _BEAMS,
        "When it ends: true (enough are found), false (a better one is unlikely), never (none can be).",
        "true|false|never",
        _early_stopping,
    ),
    Option("logprobs", int, _REPORT, "With --json: the log-probs of the top N of each step."),
    Option("prompt_logprobs", int, _REPORT, "With --json: log-probs of the prompt, and the top N."),
    Option("record_routing", bool, _REPORT, "With --json: the experts each token was sent to."),
)

_MODEL, _ENGINE = "Model", "Engine"

MODEL = (
    Option(
        "model", str, _MODEL, "A folder or a hub id; the small model in the package if left out."
    ),
    Option(
        "config",
        str,
        _MODEL,
        "Of a torch.distributed.checkpoint folder: a KempnerForge .toml, or where a config.json is.",
    ),
    Option("revision", str, _MODEL, "Branch, tag or commit on the hub."),
    Option("trust_remote_code", bool, _MODEL, "Run Python code that comes with the model."),
    Option("dtype", str, _MODEL, "auto (the checkpoint's), float32 or bfloat16."),
    Option("device", str, _ENGINE, "auto or cpu."),
    Option("num_threads", int, _ENGINE, "Threads; the results don't depend on them."),
    Option("max_length", int, _ENGINE, "Longest sequence, prompt and completion together."),
    Option("kv_memory", str, _ENGINE, 'Memory for keys and values: "512MB", "40%" or bytes.'),
    Option(
        "kv_dtype", str, _ENGINE, "Of stored keys and values: auto, float32, bfloat16, int8, int4."
    ),
    Option(
        "quantization",
        str,
        _ENGINE,
        "Of weights, in memory or offloaded: int8, int4; w8a8, w4a8: of activations, too, in memory.",
    ),
    Option("fused", bool, _ENGINE, "Run layers by fused kernels; no word depends on it.", on=True),
    Option("block_size", int, _ENGINE, "Token positions per block of keys and values."),
    Option("max_batch_tokens", int, _ENGINE, "Token rows per forward."),
    Option("max_sequences", int, _ENGINE, "Sequences per forward."),
    Option(
        "draft",
        str,
        _ENGINE,
        "Who guesses tokens ahead, for speed alone: ngram, mtp, early-exit, or a smaller model's folder or "
        "hub id.",
    ),
    Option("num_draft_tokens", int, _ENGINE, "Tokens of each draft; as many as pay if left out."),
)


def takes(
    *options: Option, show_defaults: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, which ends in `**given`, these options."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name])
            for name, parameter in signature.parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        shared = [option.parameter(_defaults() if show_defaults else None) for option in options]
        parameters = own + shared
        typed: Any = command  # what typer reads, in both of its ways
        typed.__signature__ = signature.replace(parameters=parameters)
        typed.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return command

    return add


def given(values: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """What was really given of `options`, as Python values."""
    found = {}
    for option in options:
        value = values[option.name]
        if value is not None and value != []:
            found[option.name] = value if option.read is None else option.read(value)
    return found


def seeded(params: SamplingParams) -> SamplingParams:
    """The same with a seed, so that it is known even of a request that does not end.

    A fresh one has 53 bits, as those of the engine: they survive every JSON reader unrounded.
    """
    return params if params.seed is not None else params.replace(seed=secrets.randbits(53))


def prepare() -> None:
    """What every command does before it opens a model: silence others, tell what is missing."""
    from verbatim import kernels

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", message=kernels.MISSING)  # said here, in our own way
    if kernels.missing():
        typer.echo(f"verbatim: {kernels.MISSING}", err=True)


def open_llm(values: Mapping[str, Any], placement: Offload | Cluster | None = None) -> LLM:
    """The engine on the model that the options name."""
    prepare()
    settings = given(values, MODEL)
    if placement is not None:
        settings["placement"] = placement
    import verbatim

    return verbatim.LLM(settings.pop("model", None), **settings)
