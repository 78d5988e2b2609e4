"""Where a command's model lives: in memory, spread over tiers, or in stages. Any of their options says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verbatim.cli.offload import offload_of, tell_plan
from verbatim.cli.options import Option, given
from verbatim.cli.terminal import WrongUsage, note

if TYPE_CHECKING:
    from verbatim.llm import LLM
    from verbatim.placement.cluster.choice import Cluster
    from verbatim.placement.offload.choice import Offload

_PANEL = "Cluster: a model in stages"


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise WrongUsage(
            f"--layers {text!r}: must be the layers of each stage, as 8,8,12"
        ) from None


def _amount(text: str) -> int | str:
    return int(text) if text.strip().isdigit() else text


CLUSTER = (
    Option("stages", int, _PANEL, "Processes that each run some of the layers."),
    Option(
        "cluster",
        str,
        _PANEL,
        "Run them on this cluster, as `verbatim cluster start` prints it; here if left out.",
        "HOST:PORT",
    ),
    Option("layers", str, _PANEL, "Layers of each stage; chosen if left out.", "N,N,...", _layers),
    Option(
        "keep", str, _PANEL, "What a stage may keep to help a lost one again.", "AMOUNT", _amount
    ),
    Option("spares", int, _PANEL, "Processes that wait to take a lost one's place."),
)


def placement_of(values: Mapping[str, Any]) -> Offload | Cluster | None:
    """The placement that the options describe; None where none of them was given."""
    settings = given(values, CLUSTER)
    if not settings:
        return offload_of(values)
    if offload_of({**values, "stats": None}) is not None:
        named = "--" + next(iter(settings)).replace("_", "-")
        raise WrongUsage(f"{named} puts the model in stages, which can't be offloaded besides")
    if values.get("stats"):
        raise WrongUsage(
            "--stats is of an offloaded model; `verbatim cluster status` tells of stages"
        )
    from verbatim.placement.cluster.choice import Cluster

    return Cluster(address=settings.pop("cluster", None), **settings)


def tell_placement(llm: LLM, placement: Offload | Cluster | None) -> None:
    """One line on stderr, where the model isn't simply in memory."""
    from verbatim.placement.cluster.choice import Cluster

    if isinstance(placement, Cluster):
        stages = llm.info()["stages"]
        places = ", ".join(
            f"layers {first} to {end - 1} on {stage['machine']}"
            for stage in stages
            for first, end in [stage["layers"]]
        )
        note(f"{len(stages)} stage{'' if len(stages) == 1 else 's'}: {places}")
    else:
        tell_plan(llm, placement)
