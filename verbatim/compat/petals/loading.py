"""Opens an engine by the options of Petals' `from_pretrained`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from verbatim.compat.batches import by_name
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM
from verbatim.placement.cluster.choice import Cluster

_LLM_OPTIONS = frozenset(inspect.signature(LLM.__init__).parameters) - {"self", "model", "_weak"}
_REFUSED = by_name(
    {
        "there is no public swarm and no DHT: machines that trust each other make a cluster": (
            "dht_prefix allowed_servers blocked_servers"
        ),
        "how long a cluster waits is patience_s, step_timeout_s and max_restarts of Cluster": (
            "daemon_startup_timeout connect_timeout update_period min_backoff max_backoff ban_timeout "
            "max_pinged ping_timeout"
        ),
        "`verbatim cluster status` shows the stages": "show_route",
        "merge the adapter into the weights, or give the live module that holds it": "active_adapter",
        "nothing is trained through a cluster": "tuning_mode pre_seq_len",
        "the hub's own: run `hf auth login`, or set HF_TOKEN": "token use_auth_token",
        "the hub's own: set HF_HOME": "cache_dir",
        "the hub's own: empty its cache": "force_download",
        "the hub's own: set HF_HUB_OFFLINE=1, or give the folder": "local_files_only",
        "use placement=, such as Offload() or Cluster()": "device_map",
        "use quantization='int8' or 'int4', without a placement or with Offload()": (
            "load_in_8bit load_in_4bit quantization_config"
        ),
        "attention is the engine's own": "attn_implementation",
    }
)
_ALWAYS = {
    "low_cpu_mem_usage": "weights are read to where they stay",
    "use_server_to_server": "stages connect to each other",
}
_CLUSTER_OPTIONS = {"request_timeout": "step_timeout_s", "max_retries": "max_restarts"}
_ADDRESS = re.compile(r"[^\s/:]+:\d{1,5}")


def open_llm(model: Any, options: Mapping[str, Any]) -> LLM:
    """Open an engine for a folder, a hub id or None.

    Args:
        options: Petals' and `LLM`'s; a value of None is ignored.

    Raises:
        InvalidRequest, NotSupported: an unknown or unsupported option.
        As `LLM` and the placement.
    """
    passed = {name: value for name, value in options.items() if value is not None}
    for name in passed:
        if name in _REFUSED and passed[name] is not False:
            raise NotSupported(f"{name}={passed[name]!r}: {_REFUSED[name]}")
    passed = {name: value for name, value in passed.items() if name not in _REFUSED}
    for name, why in _ALWAYS.items():
        if passed.pop(name, True) is not True:
            raise NotSupported(f"{name}: must be True; {why}")
    if "torch_dtype" in passed:
        if "dtype" in passed:
            raise InvalidRequest("torch_dtype and dtype are both given; they are the same thing")
        passed["dtype"] = passed.pop("torch_dtype")
    cluster = {
        name: passed.pop(petals_name)
        for petals_name, name in _CLUSTER_OPTIONS.items()
        if passed.get(petals_name) is not None
    }
    peers, stages = passed.pop("initial_peers", None), passed.pop("stages", None)
    for name in passed:
        if name not in _LLM_OPTIONS:
            raise InvalidRequest(
                f"{name} is not known; beside Petals' own options there are "
                f"{', '.join(sorted(_LLM_OPTIONS))}"
            )
    if peers is None and stages is None:
        for petals_name, name in _CLUSTER_OPTIONS.items():
            if name in cluster:
                raise InvalidRequest(
                    f"{petals_name}={cluster[name]!r} is for a cluster: give initial_peers or stages, or "
                    f"placement=Cluster({name}=...)"
                )
        return LLM(model, **passed)
    if "placement" in passed:
        raise InvalidRequest(
            "placement with initial_peers or stages, which are a placement themselves: give "
            "placement=Cluster(address=..., stages=...)"
        )
    placement = Cluster(stages=stages, address=_address(peers), **cluster)
    return LLM(model, placement=placement, **passed)


def _address(peers: Any) -> str | None:
    """Return the address of the cluster's head."""
    if peers is None:
        return None
    many = [peers] if isinstance(peers, str) else list(peers)
    if len(many) != 1 or not isinstance(many[0], str):
        raise InvalidRequest(
            f"initial_peers={peers!r}: must be one address, 'host:port', of the cluster's head"
        )
    if _ADDRESS.fullmatch(many[0]) is None:
        raise InvalidRequest(
            f"initial_peers={peers!r}: must be 'host:port', as `verbatim cluster start` prints it; there "
            "is no public swarm"
        )
    return many[0]
