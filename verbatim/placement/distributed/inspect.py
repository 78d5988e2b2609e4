"""The status of a Ray cluster: its machines, and the stages that run on it."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from verbatim.placement.distributed.contact import NAMESPACE, answers, begin_ray, import_ray

_ANSWER_S = 3.0  # in which a stage tells how it is


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The status of a cluster, as plain values.

    Attributes:
        address: of the Ray cluster.
        machines: `machine` (its address), `cores`, `memory_bytes`, and whether it is `reachable` from here.
        clusters: the stages of each open model, in the order of their layers: `Stage.status`, or `silent`
            for one that does not answer.
    """

    address: str
    machines: list[dict[str, Any]]
    clusters: dict[str, list[dict[str, Any]]]

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return asdict(self)


def cluster_status(address: str | None) -> ClusterStatus:
    """Return the status of the Ray cluster at `address`; None: the one of this machine.

    Raises:
        NotSupported: Ray is not installed.
        NoHost: there is none.
    """
    ray = import_ray()
    begin_ray(address or os.environ.get("RAY_ADDRESS") or "auto")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return ClusterStatus(
            ray.get_runtime_context().gcs_address, [*map(_machine, nodes)], _clusters(ray)
        )
    finally:
        ray.shutdown()


def _machine(node: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": node["NodeManagerAddress"],
        "cores": node["Resources"].get("CPU", 0.0),
        "memory_bytes": int(node["Resources"].get("memory", 0)),
        "reachable": answers((node["NodeManagerAddress"], node["NodeManagerPort"])),
    }


def _clusters(ray: Any) -> dict[str, list[dict[str, Any]]]:
    asked: dict[Any, str] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE:
            try:
                actor = ray.get_actor(entry["name"], namespace=NAMESPACE)
            except ValueError:
                continue  # it has ended meanwhile
            asked[actor.status.remote()] = entry["name"]
    ready: list[Any] = []
    if asked:
        ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=_ANSWER_S)
    found: dict[str, list[dict[str, Any]]] = {}
    for question, name in asked.items():
        stage: dict[str, Any] = {"cluster": name.split("-")[1], "silent": True}
        if question in ready:
            try:
                stage = ray.get(question) | {"silent": False}
            except ray.exceptions.RayError:
                continue  # it has ended meanwhile
        found.setdefault(stage.pop("cluster"), []).append(stage)
    for stages in found.values():
        stages.sort(key=_place)
    return dict(sorted(found.items()))


def _place(stage: dict[str, Any]) -> tuple[int, int]:
    """Return a sort key: stages by their layers, then those without."""
    if stage["silent"]:
        return 1, 0
    return (2, stage["pid"]) if stage["layers"] is None else (0, stage["index"])
