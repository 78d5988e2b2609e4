"""The options that spread a model over device, RAM and disk, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verbatim.cli.options import Option, given
from verbatim.cli.terminal import WrongUsage, note

if TYPE_CHECKING:
    from verbatim.llm import LLM
    from verbatim.placement.offload.choice import Offload

_PANEL = "Offload: a model larger than its memory"


def _budget(text: str) -> int | str:
    return 0 if text.strip() == "0" else text


def _percents(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise WrongUsage(f"--{name} {text!r}: must be percents, as 20,50,30") from None


def _workload(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise WrongUsage(
            f"--workload {text!r}: must be prompt tokens and new tokens, as 512,128"
        ) from None


def _policy(text: str) -> str | None:
    return None if text.lower() == "none" else text


# Of those that describe the machine and the work; `verbatim plan` has no others.
PLACING = (
    Option("gpu", str, _PANEL, 'What the device may hold: "16GB" or bytes.', "AMOUNT", _budget),
    Option("cpu", str, _PANEL, "What RAM may hold, beside that.", "AMOUNT", _budget),
    Option("disk", str, _PANEL, "A folder for what leaves memory.", "PATH"),
    Option("disk_limit", str, _PANEL, "What may be written there.", "AMOUNT"),
    Option(
        "weights",
        str,
        _PANEL,
        "Percents in gpu, cpu and disk; chosen if left out.",
        "G,C,D",
        lambda text: _percents("weights", text),
    ),
    Option(
        "kv",
        str,
        _PANEL,
        "The same of keys and values.",
        "G,C,D",
        lambda text: _percents("kv", text),
    ),
    Option(
        "activations",
        str,
        _PANEL,
        "The same of hidden states that wait.",
        "G,C,D",
        lambda text: _percents("activations", text),
    ),
    Option("batch_size", int, _PANEL, "Sequences that compute at once; chosen if left out."),
    Option("micro_batches", int, _PANEL, "Of them that share each reading of a layer."),
    Option("no_overlap", bool, _PANEL, "Read and compute one after the other."),
    Option(
        "policy",
        str,
        _PANEL,
        "auto measures this machine; none measures nothing.",
        "auto|none",
        _policy,
    ),
    Option(
        "workload",
        str,
        _PANEL,
        "Prompt and new tokens of a typical request; 512,128 if left out.",
        "N,N",
        _workload,
    ),
)

OFFLOAD = (
    *PLACING,
    Option("trace", str, _PANEL, "Write a trace in Chrome's format.", "PATH"),
    Option("stats", bool, _PANEL, "Print what was predicted beside what happened."),
)


def offload_of(values: Mapping[str, Any]) -> Offload | None:
    """The placement that the options describe; None where none of them was given."""
    settings = given(values, [option for option in OFFLOAD if option.name in values])
    stats = settings.pop("stats", False)
    if not settings:
        if stats:
            raise WrongUsage("--stats needs an option of an offloaded model, such as --gpu")
        return None
    if settings.pop("no_overlap", False):
        settings["overlap"] = False
    from verbatim.placement.offload.choice import Offload

    return Offload(**settings)


def tell_plan(llm: LLM, placement: Offload | None) -> None:
    """One line on stderr."""
    if placement is not None:
        note(llm.info()["plan_summary"])


def tell_stats(llm: LLM, values: Mapping[str, Any]) -> None:
    """Predicted beside actual on stderr, where `--stats` asks for it."""
    if values.get("stats"):
        from verbatim.placement.offload.report import compared

        note(compared(llm.stats()["offload"]))
