"""The options of offloading and clusters; opens a model with them, and reports its placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from verbatim.cli.options import Option, fields_of, given_options, helps, numbers, open_llm
from verbatim.cli.terminal import WrongUsage, note
from verbatim.placement.distributed.choice import Cluster
from verbatim.placement.offload.choice import Offload

if TYPE_CHECKING:
    from verbatim.api.llm import LLM

_OFFLOAD, _CLUSTER = "Offload: a model larger than its memory", "Cluster: a model in stages"


def _amount(text: str) -> int | str:
    return int(text) if text.strip().isdecimal() else text


_field, _stage_field = partial(fields_of, Offload()), partial(fields_of, Cluster())

# The options that describe the machine and the workload; `verbatim plan` accepts only these.
PLACING = (
    *_field(_OFFLOAD, "gpu cpu", "AMOUNT", str, _amount),
    *_field(_OFFLOAD, "disk", "PATH"),
    *_field(_OFFLOAD, "disk_limit", "AMOUNT", str, _amount),
    *_field(
        _OFFLOAD,
        "weights kv activations",
        "G,C,D",
        read=partial(numbers, kind=float),
        what="percents, such as 20,50,30",
    ),
    *_field(_OFFLOAD, "batch_size micro_batches"),
    Option("no_overlap", bool, _OFFLOAD, "Read and compute one after the other."),
    Option(
        "policy",
        str,
        _OFFLOAD,
        "auto: measure this machine; none: use round numbers.",
        "auto|none",
        lambda text: None if text.lower() == "none" else text,
        "auto",
    ),
    *_field(
        _OFFLOAD,
        "workload",
        "N,N",
        read=numbers,
        what="prompt tokens and new tokens, such as 512,128",
    ),
)

OFFLOAD = (
    *PLACING,
    *_field(_OFFLOAD, "trace", "PATH"),
    Option("stats", bool, _OFFLOAD, "Print predicted and actual figures at the end."),
)

CLUSTER = (
    *_stage_field(_CLUSTER, "stages"),
    Option("cluster", str, _CLUSTER, helps(Cluster)["address"], "HOST:PORT"),
    *_stage_field(
        _CLUSTER,
        "layers",
        "N,N,...",
        read=numbers,
        what="the number of layers of each stage, such as 8,8,12",
    ),
    *_stage_field(_CLUSTER, "spares"),
)


def offload_of(values: Mapping[str, Any]) -> Offload | None:
    """Return the placement for the offloading options; None if none of them was given."""
    settings = given_options(values, [option for option in OFFLOAD if option.name in values])
    stats = settings.pop("stats", False)
    if not settings:
        if stats:
            raise WrongUsage("--stats needs an option of offloading, such as --gpu")
        return None
    if settings.pop("no_overlap", False):
        settings["overlap"] = False
    return Offload(**settings)


def placement_of(values: Mapping[str, Any]) -> Offload | Cluster | None:
    """Return the placement for the offloading and cluster options; None if none of them was given."""
    settings = given_options(values, CLUSTER)
    if not settings:
        return offload_of(values)
    if values.get("stats"):
        raise WrongUsage("--stats is for offloading; `verbatim cluster status` shows stages")
    offload = offload_of({**values, "stats": None})
    return Cluster(address=settings.pop("cluster", None), offload=offload, **settings)


@contextmanager
def opened_llm(values: Mapping[str, Any], placement: Offload | Cluster | None) -> Iterator[LLM]:
    """Open the model that the options name; report its placement and, with `--stats`, how it ran."""
    with open_llm(values, placement) as llm:
        if placement is not None:
            note(_described(llm.info()))
        try:
            yield llm
        finally:
            if values.get("stats"):
                from verbatim.placement.offload.report import comparison_table

                note(comparison_table(llm.stats()["offload"]))


def _described(info: Mapping[str, Any]) -> str:
    if "stages" not in info:
        return str(info["plan_summary"])
    stages = info["stages"]
    places = ", ".join(
        f"layers {first} to {end - 1} on {stage['machine']}"
        + (f" ({stage['plan']})" if "plan" in stage else "")
        for stage in stages
        for first, end in [stage["layers"]]
    )
    return f"{len(stages)} stage{'' if len(stages) == 1 else 's'}: {places}"
