"""`examples/verl_rollout.py` with a server and stand-ins for the verl classes that it uses."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from support.serving import Served, serving
from verbatim import LLM, SamplingParams
from verbatim.serve.settings import ServeSettings

FILE = Path(__file__).parents[2] / "examples/verl_rollout.py"
KEY = "a-key-for-verl"
PROMPT = [5, 17, 9]
# As sent by verl's agent loops.
PARAMS = dict(temperature=1.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, logprobs=True)
CONFIG = SimpleNamespace(
    response_length=12,
    prompt_length=64,
    max_model_len=None,
    tensor_model_parallel_size=1,
    data_parallel_size=1,
    checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1),
)


class BaseRollout:
    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        self.config = config


class RolloutReplica:
    max_concurrency = 8

    def __init__(self, replica_rank: int, config: Any) -> None:
        self.replica_rank, self.config = replica_rank, config


async def ensure_async_iterator(items: Any) -> Any:
    for item in items:
        yield item


class Actor:
    """Stands in for a Ray actor, in this process."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def options(self, **_: Any) -> Actor:
        return self

    def remote(self, *args: Any) -> Any:
        return self._kind(*args)


@pytest.fixture
def replicas() -> dict[str, Any]:
    return {}


@pytest.fixture
def example(replicas: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    registry = SimpleNamespace(register=replicas.__setitem__)
    contents: dict[str, dict[str, Any]] = {
        "ray": {"remote": Actor},
        "verl": {},
        "verl.workers": {},
        "verl.workers.rollout": {},
        "verl.workers.rollout.base": {"BaseRollout": BaseRollout, "_ROLLOUT_REGISTRY": {}},
        "verl.workers.rollout.replica": {
            "RolloutReplica": RolloutReplica,
            "RolloutReplicaRegistry": registry,
            "TokenOutput": SimpleNamespace,
        },
        "verl.workers.rollout.utils": {"ensure_async_iterator": ensure_async_iterator},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("verl_rollout", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = ServeSettings(training=True, api_keys=(KEY,), max_body_bytes=16 << 20)
    with LLM() as llm, serving(llm, settings) as server:
        yield server


@pytest.fixture(autouse=True)
def environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERBATIM_URLS", f"http://127.0.0.1:1,{served.url}/")
    monkeypatch.setenv("VERBATIM_API_KEY", KEY)
    monkeypatch.setenv("RANK", "1")


def server_of(replicas: dict[str, Any]) -> Any:
    replica = replicas["verbatim"]()(1, CONFIG)
    asyncio.run(replica.launch_servers())
    assert replica.servers == [replica._server_handle]
    return replica._server_handle


def draw(server: Any, **changes: Any) -> Any:
    return asyncio.run(server.generate(PROMPT, PARAMS | changes, "request"))


def test_tokens_and_logprobs_match_generate(example: Any, replicas: Any, served: Served) -> None:
    server = server_of(replicas)
    found = draw(server, seed=3, top_k=5)
    params = SamplingParams(seed=3, top_k=5, max_tokens=12)
    output = served.llm.generate(PROMPT, params)[0].outputs[0]
    assert found.token_ids == output.token_ids
    assert found.log_probs == output.sampled_logprobs != output.logprobs
    assert found.stop_reason == "completed"
    assert draw(server, logprobs=False).log_probs is None
    assert len(draw(server, ignore_eos=True, max_tokens=500).token_ids) == 64 + 12 - len(PROMPT)
    with pytest.raises(NotImplementedError, match="image_data"):
        asyncio.run(server.generate(PROMPT, PARAMS, "request", image_data=[1]))


def test_weights_are_updated_in_parts(example: Any, replicas: Any, served: Served) -> None:
    server, module = server_of(replicas), served.llm.engine.runner.module  # type: ignore[attr-defined]
    old = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert sum(tensor.nbytes for tensor in old.values()) > 2 << 20
    before = draw(server, seed=3)
    rollout = example.ServerAdapter(CONFIG, None, None)
    new = {name: tensor * 1.25 for name, tensor in old.items()}
    asyncio.run(rollout.update_weights(new.items(), global_steps=70))
    after = draw(server, seed=3)
    assert after.extra_fields == {"global_steps": 70, "min_global_steps": 70}
    assert after.log_probs != before.log_probs
    with pytest.raises(RuntimeError, match="not the model's"):
        asyncio.run(rollout.update_weights([("other", torch.ones(3))], global_steps=71))
    asyncio.run(rollout.update_weights(old.items(), global_steps=72))
    assert draw(server, seed=3).log_probs == before.log_probs
    with pytest.raises(NotImplementedError, match="whole weights"):
        asyncio.run(rollout.update_weights([], wire_format="delta_flush"))


def test_requests_are_aborted_and_generation_resumes(example: Any, served: Served) -> None:
    server = example.Server(served.url, KEY, 12, 2000)

    async def run() -> None:
        long = PARAMS | {"max_tokens": 1900, "ignore_eos": True}
        under_way = [asyncio.create_task(server.generate(PROMPT, long, "x")) for _ in range(2)]
        while served.llm.stats()["running"] < 2:
            await asyncio.sleep(0.002)
        served.llm.pause()  # so that none of them ends
        await server.abort_all_requests(reject_request=True)
        assert (await server.generate(PROMPT, PARAMS, "x")).stop_reason == "aborted"
        await server.resume_generation()
        await server.clear_kv_cache()
        await server.sleep()
        for found in await asyncio.gather(*under_way):
            assert found.stop_reason == "aborted"
            assert len(found.log_probs) == len(found.token_ids) < 1900
        assert (await server.generate(PROMPT, PARAMS, "x")).stop_reason == "completed"

    asyncio.run(run())


def test_replica_without_server_url_raises(example: Any, replicas: Any) -> None:
    replica = replicas["verbatim"]()(2, CONFIG)
    with pytest.raises(ValueError, match="replica 2 has none"):
        asyncio.run(replica.launch_servers())
