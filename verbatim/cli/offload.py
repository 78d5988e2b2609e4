"""The options of offloading to device, RAM and disk, and the lines that commands print about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verbatim.cli.options import Option, given, numbers
from verbatim.cli.terminal import WrongUsage, note

if TYPE_CHECKING:
    from verbatim.llm import LLM
    from verbatim.placement.offload.choice import Offload

_PANEL = "Offload: a model larger than its memory"
_PERCENTS = "percents, such as 20,50,30"


def _budget(text: str) -> int | str:
    return 0 if text.strip() == "0" else text


def _policy(text: str) -> str | None:
    return None if text.lower() == "none" else text


# The options that describe the machine and the workload: all that `verbatim plan` accepts.
PLACING = (
    Option("gpu", str, _PANEL, 'Budget of the device: "16GB" or bytes.', "AMOUNT", _budget),
    Option("cpu", str, _PANEL, "Budget of RAM, beside that.", "AMOUNT", _budget),
    Option("disk", str, _PANEL, "Folder for KV cache and activations that leave memory.", "PATH"),
    Option("disk_limit", str, _PANEL, "Budget of that folder.", "AMOUNT"),
    *(
        Option(
            name,
            str,
            _PANEL,
            f"Percents of {what} in gpu, cpu and disk. Default: planned.",
            "G,C,D",
            numbers(name, _PERCENTS, float),
        )
        for name, what in (
            ("weights", "the weights"),
            ("kv", "the KV cache"),
            ("activations", "waiting activations"),
        )
    ),
    Option("batch_size", int, _PANEL, "Sequences per micro-batch. Default: planned."),
    Option("micro_batches", int, _PANEL, "Micro-batches per read of a layer. Default: planned."),
    Option("no_overlap", bool, _PANEL, "Read and compute one after the other."),
    Option(
        "policy",
        str,
        _PANEL,
        "auto: measure this machine; none: use round numbers.",
        "auto|none",
        _policy,
    ),
    Option(
        "workload",
        str,
        _PANEL,
        "Prompt and new tokens of a typical request. Default: 512,128.",
        "N,N",
        numbers("workload", "prompt tokens and new tokens, such as 512,128"),
    ),
)

OFFLOAD = (
    *PLACING,
    Option(
        "trace", str, _PANEL, "Write a trace of reads and computation, in Chrome's format.", "PATH"
    ),
    Option("stats", bool, _PANEL, "Print predicted beside actual figures at the end."),
)


def offload_of(values: Mapping[str, Any]) -> Offload | None:
    """Return the placement that the options describe; None if none of them was given."""
    settings = given(values, [option for option in OFFLOAD if option.name in values])
    stats = settings.pop("stats", False)
    if not settings:
        if stats:
            raise WrongUsage("--stats needs an option of offloading, such as --gpu")
        return None
    if settings.pop("no_overlap", False):
        settings["overlap"] = False
    from verbatim.placement.offload.choice import Offload

    return Offload(**settings)


def report_stats(llm: LLM, values: Mapping[str, Any]) -> None:
    """Print predicted beside actual figures on stderr, with `--stats`."""
    if values.get("stats"):
        from verbatim.placement.offload.report import compared

        note(compared(llm.stats()["offload"]))
