"""The placement of a command's model: in memory, offloaded, or in stages of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from verbatim.cli.offload import offload_of, report_stats
from verbatim.cli.options import Option, given, numbers, open_llm
from verbatim.cli.terminal import WrongUsage, note

if TYPE_CHECKING:
    from verbatim.llm import LLM
    from verbatim.placement.distributed.choice import Cluster
    from verbatim.placement.offload.choice import Offload

_PANEL = "Cluster: a model in stages"


def _amount(text: str) -> int | str:
    return int(text) if text.strip().isdigit() else text


CLUSTER = (
    Option("stages", int, _PANEL, "Number of stages: processes with some of the layers each."),
    Option(
        "cluster",
        str,
        _PANEL,
        "Address of the cluster, as `verbatim cluster start` prints it. Default: this machine alone.",
        "HOST:PORT",
    ),
    Option(
        "layers",
        str,
        _PANEL,
        "Layers per stage. Default: assigned.",
        "N,N,...",
        numbers("layers", "the number of layers of each stage, such as 8,8,12"),
    ),
    Option(
        "keep",
        str,
        _PANEL,
        "Budget per stage for activations kept for recovery.",
        "AMOUNT",
        _amount,
    ),
    Option("spares", int, _PANEL, "Idle processes that replace lost stages."),
)


def placement_of(values: Mapping[str, Any]) -> Offload | Cluster | None:
    """Return the placement that the options describe; None if none of them was given."""
    settings = given(values, CLUSTER)
    if not settings:
        return offload_of(values)
    if values.get("stats"):
        raise WrongUsage("--stats is for offloading; `verbatim cluster status` shows stages")
    from verbatim.placement.distributed.choice import Cluster

    offload = offload_of({**values, "stats": None})
    return Cluster(address=settings.pop("cluster", None), offload=offload, **settings)


@contextmanager
def opened(values: Mapping[str, Any], placement: Offload | Cluster | None) -> Iterator[LLM]:
    """Open the model that the options name; report its placement and, with `--stats`, how it ran."""
    with open_llm(values, placement) as llm:
        if placement is not None:
            note(_described(llm.info()))
        try:
            yield llm
        finally:
            report_stats(llm, values)


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
