"""The options that several commands share, with their help, types and checks.

An option's flag is its Python name with dashes. None, or an empty list, means that it was not given: then the
defaults of `SamplingParams` and `LLM` apply.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import secrets
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from verbatim.cli.deferred import deferred_imports
from verbatim.cli.interrupts import restore_default
from verbatim.cli.terminal import WrongUsage
from verbatim.common.checks import field_docs
from verbatim.common.files import read_file
from verbatim.params import MAX_STRUCTURE_CHARS, SamplingParams

if TYPE_CHECKING:
    from verbatim.api.llm import LLM
    from verbatim.placement.distributed.choice import Cluster
    from verbatim.placement.offload.choice import Offload

DEFAULT_MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option: its Python name, the type that typer parses, and its panel in the help.

    `read` converts typer's value to the Python value, if they differ; for a ValueError it is refused, since
    it must be `what`. A `default` is shown in the help; a switch with default True also has a `--no-` flag.
    """

    name: str
    type: Any
    panel: str
    help: str
    metavar: str | None = None
    read: Callable[[Any], Any] | None = None
    default: Any = None
    what: str = ""

    @property
    def flags(self) -> str:
        dashed = "--" + self.name.replace("_", "-")
        return f"{dashed}/--no-{dashed[2:]}" if self.default is True else dashed

    def value(self, given: Any) -> Any:
        """Return the Python value of a value that typer has read."""
        try:
            return given if self.read is None else self.read(given)
        except (ValueError, KeyError):
            if not self.what:
                raise
            raise WrongUsage(f"{self.flags} {given!r}: must be {self.what}") from None

    def parameter(self, show_default: bool) -> inspect.Parameter:
        """Return the keyword parameter that typer reads."""
        default = (
            ",".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        )
        show_default &= not isinstance(default, bool | None)
        info = typer.Option(
            self.flags,
            help=f"{self.help} Default: {default}." if show_default else self.help,
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


def helps(kind: type) -> dict[str, str]:
    """Return the help of options by field name, from a class's docstring; field names in it become flags."""
    docs = field_docs(kind)

    def option(match: re.Match[str]) -> str:
        return "--" + match[1].replace("_", "-") if match[1] in docs else match[0]

    texts = defaultdict[str, str](str)
    for name, text in docs.items():
        text = text.replace("; None: ", ". Default: ").replace("None: ", "Default: ")
        text = re.sub(r"`(\w+)`", option, text)
        texts[name] = text[:1].upper() + text[1:]
    return texts


def fields_of(
    settings: Any,
    panel: str,
    names: str,
    metavar: str | None = None,
    kind: Any = None,
    read: Callable[[Any], Any] | None = None,
    what: str = "",
) -> tuple[Option, ...]:
    """Return options for fields of a dataclass, with its types and documentation; defaults from `settings`.

    `kind` overrides the type.
    """
    texts = helps(type(settings))
    types = {field.name: str(field.type) for field in dataclasses.fields(settings)}
    plain = {"int": int, "float": float, "bool": bool}
    return tuple(
        Option(
            name,
            kind or plain.get(types[name].removesuffix(" | None"), str),
            panel,
            texts[name],
            metavar,
            read,
            getattr(settings, name),
            what,
        )
        for name in names.split()
    )


def numbers(text: str, kind: type = int) -> tuple[Any, ...]:
    """Parse comma-separated numbers; raise ValueError for others."""
    return tuple(map(kind, text.strip().removesuffix(",").split(","))) if text.strip() else ()


def _text_or_file(text: str) -> str:
    # A character has up to four bytes; SamplingParams counts characters.
    return read_file(text, text[1:], 4 * MAX_STRUCTURE_CHARS) if text.startswith("@") else text


def _biases(entries: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise WrongUsage(f"--logit-bias {entry!r}: must be ID=VALUE, such as 42=-1.5") from None
    return biases


_DRAWING, _PENALTIES, _STOPPING, _REPORT = "Sampling", "Penalties and bans", "Stopping", "Output"
_STRUCTURE, _BEAMS = "Structured output (one of these)", "Beam search"
_JSON = "Output with --json"

_field = partial(fields_of, SamplingParams())

SAMPLING = (
    *_field(_DRAWING, "temperature top_k top_p min_p typical_p seed"),
    *_field(_PENALTIES, "repetition_penalty presence_penalty frequency_penalty"),
    *_field(_PENALTIES, "logit_bias", "ID=VALUE", list[str], _biases),
    Option("bad_words", list[str], _PENALTIES, "String that is never generated.", "TEXT"),
    Option(
        "allowed_token_ids", list[int], _PENALTIES, "Token id to allow; others are banned.", "ID"
    ),
    Option(
        "max_tokens", int, _STOPPING, "Maximum number of new tokens.", default=DEFAULT_MAX_TOKENS
    ),
    *_field(_STOPPING, "min_tokens"),
    Option("stop", list[str], _STOPPING, "String that ends the completion.", "TEXT"),
    Option("stop_token_ids", list[int], _STOPPING, "Token id that ends the completion.", "ID"),
    *_field(_STOPPING, "include_stop_str_in_output ignore_eos"),
    *_field(_STOPPING, "timeout_s", "SECONDS"),
    Option(
        "json_schema",
        str,
        _STRUCTURE,
        "Generate a JSON document that validates.",
        "JSON|@FILE",
        _text_or_file,
    ),
    *_field(_STRUCTURE, "any_whitespace"),
    *_field(_STRUCTURE, "regex", "PATTERN"),
    *_field(_STRUCTURE, "grammar", "GRAMMAR|@FILE", read=_text_or_file),
    Option("choice", list[str], _STRUCTURE, "Generate one of these texts.", "TEXT"),
    *_field(_REPORT, "skip_special_tokens"),
)

# Not for `verbatim chat`, which streams one answer.
GENERATE_ONLY = (
    *_field(_DRAWING, "n"),
    *_field(_BEAMS, "num_beams length_penalty"),
    Option(
        "early_stopping",
        str,
        _BEAMS,
        "When to stop: true (enough beams finished), false (a better one is unlikely), never (a better "
        "one is impossible).",
        "true|false|never",
        lambda text: {"true": True, "false": False, "never": "never"}[text.lower()],
        what="true, false or never",
    ),
    *_field(_JSON, "logprobs prompt_logprobs record_routing record_indices support"),
)

_MODEL, _ENGINE = "Model", "Engine"
_MODEL_HELP = "Folder or hub id. Default: the storyteller inside the package."

MODEL = (
    Option("model", str, _MODEL, _MODEL_HELP),
    Option(
        "config",
        str,
        _MODEL,
        "For a torch.distributed.checkpoint folder: KempnerForge's .toml, or a transformers config.",
    ),
    Option("revision", str, _MODEL, "Branch, tag or commit of a hub id."),
    Option("trust_remote_code", bool, _MODEL, "Run Python code of the checkpoint."),
    Option("unused_weights", str, _MODEL, "Tensors that the model does not use: error or ignore."),
    Option("dtype", str, _MODEL, "Weight dtype: auto (the checkpoint's), float32 or bfloat16."),
    Option("device", str, _ENGINE, "auto, cpu, cuda or cuda:N."),
    Option(
        "deterministic", bool, _ENGINE, "Compute batch-invariantly on a GPU; the CPU always does."
    ),
    Option("num_threads", int, _ENGINE, "Number of threads. Outputs do not depend on it."),
    Option("max_length", int, _ENGINE, "Maximum tokens of prompt and completion together."),
    Option("kv_memory", str, _ENGINE, 'Memory of the KV cache: "512MB", "40%" or bytes.'),
    Option("kv_dtype", str, _ENGINE, "KV cache dtype: auto, float32, bfloat16, int8 or int4."),
    Option("prefix_folder", str, _ENGINE, "Folder for cached prefixes, which survive a restart."),
    Option("prefix_folder_bytes", str, _ENGINE, "Size of that folder. Default: 10GB.", "AMOUNT"),
    Option(
        "quantization",
        str,
        _ENGINE,
        "Weight quantization: int8 or int4; w8a8 or w4a8 (activations too).",
    ),
    Option(
        "fused",
        bool,
        _ENGINE,
        "Use fused layer kernels. Outputs do not depend on it.",
        default=True,
    ),
    Option("block_size", int, _ENGINE, "Token positions per KV block."),
    Option("max_batch_tokens", int, _ENGINE, "Maximum token rows per forward."),
    Option("max_sequences", int, _ENGINE, "Maximum sequences per forward."),
    Option(
        "draft",
        str,
        _ENGINE,
        "How draft tokens are proposed (speculative decoding): ngram, mtp, early-exit, or the folder or hub "
        "id of a smaller model. Outputs do not depend on it.",
    ),
    Option("num_draft_tokens", int, _ENGINE, "Tokens per draft. Default: adaptive."),
)


def adapters_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the folders of the adapters to load, by name."""
    folders: dict[str, str] = {}
    for entry in values.get("adapter") or ():
        name, _, folder = entry.partition("=")
        if not (name and folder):
            raise WrongUsage(f"--adapter {entry!r}: must be NAME=FOLDER, such as law=adapters/law")
        folders[name] = folder
    return folders


ADAPTERS = Option(
    "adapter",
    list[str],
    _ENGINE,
    "Load a LoRA adapter, a PEFT folder; `generate` runs with the first one, `verify` with all in "
    "turn.",
    "NAME=FOLDER",
)


_MODEL_ARGUMENT = inspect.Parameter(
    "model_argument",
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    default=None,
    annotation=Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
)


def with_options(
    *options: Option, show_defaults: bool = True, positional_model: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add these options to a command; its signature must end in `**values`.

    With `positional_model`, the model can also be given as an argument.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_model(model_argument: str | None = None, **values: Any) -> None:
            pop_model([] if model_argument is None else [model_argument], 0, values)
            command(**values)

        hints = get_type_hints(command, include_extras=True)
        parameters = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        if positional_model:
            parameters.insert(0, _MODEL_ARGUMENT)
        parameters += [option.parameter(show_defaults) for option in options]
        target: Any = with_model if positional_model else command  # typer reads both attributes
        target.__signature__ = inspect.Signature(parameters, return_annotation=None)
        target.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return target  # type: ignore[no-any-return]

    return add


def pop_model(arguments: list[str], num_others: int, values: dict[str, Any]) -> list[str]:
    """Move the model, which comes first if there are more than `num_others` arguments, to `values["model"]`.

    Returns:
        The other arguments.

    Raises:
        WrongUsage: too many arguments, or the model twice.
    """
    if len(arguments) <= num_others:
        return arguments
    model, *others = arguments
    if len(others) > num_others:
        raise WrongUsage(f"{others[-1]!r}: one argument too many")
    if values.get("model") is not None:
        raise WrongUsage(f"give the model once, not {model!r} and --model {values['model']!r}")
    values["model"] = model
    return others


def given_options(values: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """Return the options that were given, as Python values."""
    settings = {}
    for option in options:
        value = values[option.name]
        if value is not None and value != []:
            settings[option.name] = option.value(value)
    return settings


def seeded(params: SamplingParams) -> SamplingParams:
    """Return the parameters with a seed, so that it can be reported even if the request is interrupted.

    A random seed has 53 bits, like the engine's: JSON readers do not round it.
    """
    return params if params.seed is not None else params.replace(seed=secrets.randbits(53))


def prepare() -> None:
    """Silence other libraries and report missing kernels, before a command opens a model."""
    from verbatim import kernels

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", message=re.escape(kernels.MISSING))  # reported below
    if kernels.missing():
        typer.echo(f"verbatim: {kernels.MISSING}", err=True)


def open_llm(values: Mapping[str, Any], placement: Offload | Cluster | None = None) -> LLM:
    """Open the model that the options name."""
    prepare()
    settings = given_options(values, MODEL)
    if adapters := adapters_of(values):
        settings["adapters"] = adapters
    if placement is not None:
        settings["placement"] = placement
    import verbatim

    with deferred_imports():
        llm = verbatim.LLM(settings.pop("model", None), **settings)
    restore_default()
    return llm
