"""Let verl (0.9) generate its completions with `verbatim serve`. Verl's environment needs no Verbatim.

    verbatim serve MODEL --training --max-body-bytes 4000000000            # in Verbatim's environment
    export VERBATIM_URLS=http://127.0.0.1:8000 VERBATIM_API_KEY=...      # a URL per replica, comma-separated
    export VERL_USE_EXTERNAL_MODULES=verl_rollout PYTHONPATH=examples
    python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=verbatim ...

A verl replica is a server that is already running. It keeps its memory: nothing is released during updates.
Weights are sent over HTTP in parts of `checkpoint_engine.update_weights_bucket_megabytes`; after an error the
server still has the old ones. Log-probs are those of the sampled distribution. Images, LoRA weights without
`model.lora.merge` and weight deltas are rejected.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
import ray
import torch
from safetensors.torch import save
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

OCTETS = {"Content-Type": "application/octet-stream"}


def url_of(replica: int) -> str:
    """Return the address of a replica's server."""
    urls = os.environ["VERBATIM_URLS"].split(",")
    if replica >= len(urls):
        raise ValueError(f"VERBATIM_URLS has {len(urls)} servers; replica {replica} has none")
    return urls[replica].rstrip("/")


class Server:
    """The interface of verl's agent loops to one replica."""

    def __init__(self, url: str, key: str | None, response_length: int, max_model_len: int) -> None:
        self._length, self._max_model_len = response_length, max_model_len
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"} if key else {}
        self._rejecting = False

    async def call(self, path: str, **rest: Any) -> Any:
        """POST to the server, and return the JSON response."""
        async with httpx.AsyncClient(timeout=None, headers=self._headers) as client:
            answer = await client.post(self._url + path, **rest)
        if answer.status_code != 200:
            raise RuntimeError(f"{self._url}{path}: {answer.text}")
        return answer.json()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **media: Any
    ) -> TokenOutput:
        """Generate one completion."""
        kinds = [name for name, value in media.items() if value]
        if kinds:
            raise NotImplementedError(f"{', '.join(kinds)}: not supported by Verbatim's rollout")
        if self._rejecting:
            return TokenOutput(token_ids=[], stop_reason="aborted")
        params = dict(sampling_params)
        wants_logprobs = params.pop("logprobs", False)
        length = params.pop("max_new_tokens", params.get("max_tokens", self._length))
        params["max_tokens"] = min(length, self._max_model_len - len(prompt_ids))
        params["top_k"] = max(0, params.get("top_k", 0))
        answer = await self.call("/v1/generate", json={"prompt": prompt_ids, "params": params})
        (output,) = answer["outputs"]
        versions = output["weight_versions"]
        return TokenOutput(
            token_ids=output["token_ids"],
            log_probs=output["sampled_logprobs"] if wants_logprobs else None,
            stop_reason="aborted" if output["finish_reason"] == "abort" else "completed",
            extra_fields={
                "global_steps": max(versions, default=None),
                "min_global_steps": min(versions, default=None),
            },
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._rejecting = reject_request
        await self.call("/pause?mode=abort")

    async def resume_generation(self) -> None:
        await self.call("/resume")
        self._rejecting = False

    async def clear_kv_cache(self) -> None:
        await self.call("/reset_prefix_cache")

    async def keep(self) -> None:
        """Do nothing: the server keeps its memory."""

    wake_up = sleep = release_kv_cache = resume_kv_cache = keep


class Replica(RolloutReplica):
    """A server that is already running."""

    async def launch_servers(self) -> None:
        length = self.config.response_length
        longest = self.config.max_model_len or self.config.prompt_length + length
        self._server_address = url_of(self.replica_rank).removeprefix("http://")
        actor = ray.remote(Server).options(num_cpus=0, max_concurrency=self.max_concurrency)
        key = os.environ.get("VERBATIM_API_KEY")
        self._server_handle = actor.remote(url_of(self.replica_rank), key, length, longest)
        self.servers = [self._server_handle]


class ServerAdapter(BaseRollout):
    """The trainer's side: sends new weights."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rollout = self.config
        ranks = rollout.tensor_model_parallel_size * rollout.data_parallel_size
        replica, rank = divmod(int(os.environ["RANK"]), ranks)
        replica = replica if replica_rank == -1 else replica_rank
        self._sends = rank == 0
        self._server = Server(url_of(replica), os.environ.get("VERBATIM_API_KEY"), 0, 0)
        self._bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20

    async def resume(self, tags: list[str]) -> None:
        """Do nothing, like `release`: the server keeps its memory."""

    async def release(self) -> None:
        pass

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Replace the server's weights: all of them or, on an error, none."""
        if wire_format != "named_tensors" or peft_config is not None:
            raise NotImplementedError("whole weights only: model.lora.merge=True")
        if self._sends:
            update = (await self._server.call("/start_weight_update"))["update"]
            path = f"/update_weights?update={update}"
        part: dict[str, torch.Tensor] = {}
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            if not self._sends:  # this rank only takes part in the trainer's collective calls
                continue
            if part and size + tensor.nbytes > self._bucket:
                await self._server.call(path, content=save(part), headers=OCTETS)
                part, size = {}, 0
            part[name] = tensor.detach().cpu().contiguous().clone()
            size += tensor.nbytes
        if self._sends:
            await self._server.call(path, content=save(part), headers=OCTETS)
            end = {"update": update, "version": global_steps}
            await self._server.call("/finish_weight_update", json=end)


_ROLLOUT_REGISTRY["verbatim", "async"] = f"{__name__}.ServerAdapter"
RolloutReplicaRegistry.register("verbatim", lambda: Replica)
