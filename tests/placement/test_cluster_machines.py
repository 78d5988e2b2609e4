"""A cluster over several machines, simulated by network namespaces that each run Ray."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import verbatim
from support.network import Network, why_not
from support.programs import VERBATIM
from verbatim import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

ROOT = Path(verbatim.__file__).parents[1]  # from where this process imports it
PORT = 6379
PROMPTS = [[5, 6, 7, 8, 9, 10] * 5, [11, 12, 13], [4] * 40]
PARAMS = {"max_tokens": 16, "seed": 3, "ignore_eos": True, "logprobs": 2}

# Runs on the head: reads one command per line, and answers with lines of JSON.
DRIVER = """
import json, sys
from verbatim import LLM, Cluster, SamplingParams

model, address, prompts, params = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
params = SamplingParams(**params)

def say(**facts):
    print(json.dumps(facts), flush=True)

def of(completion):
    return [completion.token_ids, completion.logprobs]

with LLM(model, placement=Cluster(stages=3, address=address, patience_s=10.0)) as llm:
    say(stages=llm.info()["stages"])
    for line in sys.stdin:
        if line == "generate\\n":
            results = llm.generate(prompts, params)
            say(facts=[of(result.outputs[0]) for result in results])
        elif line == "stream\\n":
            ids = []
            for delta in llm.stream(prompts[0], params):
                ids += delta.token_ids
                if len(ids) == 5:
                    say(ids=ids)
                    sys.stdin.readline()
            say(facts=of(delta.result.outputs[0]), stages=llm.info()["stages"], stats=llm.stats()["cluster"])
        else:
            break
"""


class Driver:
    """The process on the head that opens the LLM."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.opened = self.hear()

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        heard: dict[str, Any] = json.loads(self._process.stdout.readline())
        return heard

    def ask(self, line: str) -> dict[str, Any]:
        self.say(line)
        return self.hear()

    def close(self) -> int:
        self._process.communicate("end\n")
        return self._process.returncode


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Three machines: the head, and two others that have joined with its token."""
    with Network(3, tmp_path_factory.mktemp("machines")) as network:
        head, *others = network.machines
        for machine in network.machines:
            machine.environment |= {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
        started = head.run([*VERBATIM, "cluster", "start", "--node-ip-address", head.address])
        assert f"verbatim cluster join {head.address}:{PORT}" in started.stdout
        for machine in others:
            shutil.copytree(
                f"{head.environment['HOME']}/.ray", f"{machine.environment['HOME']}/.ray"
            )
            machine.run([*VERBATIM, "cluster", "join", f"{head.address}:{PORT}"])
        yield network


@pytest.fixture(scope="module")
def wanted(folders: Any) -> list[Any]:
    with LLM(folders("qwen3")) as llm:
        results = llm.generate(PROMPTS, SamplingParams(**PARAMS))
        return json.loads(
            json.dumps([[r.outputs[0].token_ids, r.outputs[0].logprobs] for r in results])
        )


def test_machine_with_wrong_token_is_rejected(network: Network, tmp_path: Path) -> None:
    head, stranger = network.machines[0], network.machines[2]
    (tmp_path / "token").write_text("0" * 64)
    environment = stranger.environment
    stranger.environment = environment | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    try:
        first, second = (  # concurrently: each waits for an answer that never comes
            stranger.started([*VERBATIM, "cluster", *command], stderr=subprocess.PIPE)
            for command in (
                ["join", f"{head.address}:{PORT}"],
                ["status", "--address", f"{head.address}:{PORT}"],
            )
        )
        with first as joins, second as looks:
            errors = [process.communicate()[1] for process in (joins, looks)]
    finally:
        stranger.environment = environment
    assert (joins.returncode, looks.returncode) == (1, 1)
    assert "differs from the cluster's" in errors[0]
    assert "accepts the token of this machine" in errors[1]


def test_stream_continues_when_a_machine_loses_its_network(
    network: Network, wanted: list[Any], folders: Any
) -> None:
    head, pipes = network.machines[0], dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    arguments = [f"{head.address}:{PORT}", *map(json.dumps, (PROMPTS, PARAMS))]
    line = [sys.executable, "-P", "-c", DRIVER, str(folders("qwen3")), *arguments]
    with head.started(line, **pipes) as process:
        driver = Driver(process)
        before = driver.opened["stages"]
        assert {stage["machine"] for stage in before} == {m.address for m in network.machines}

        for delay_s in (0.0, 0.005, 0.04):
            network.switch.delay_s = delay_s
            assert driver.ask("generate")["facts"] == wanted
        network.switch.delay_s = 0.005

        completed = network.machines[1].run([*VERBATIM, "cluster", "status", "--json"])
        status = json.loads(completed.stdout)
        (stages,) = status["clusters"].values()
        assert [stage["layers"] for stage in stages[:3]] == [stage["layers"] for stage in before]
        assert [stage["pid"] for stage in stages[:3]] == [stage["pid"] for stage in before]
        assert all(stage["hop_s"] is not None for stage in stages[:2])
        assert len(status["machines"]) == 3

        first_ids = driver.ask("stream")["ids"]
        assert first_ids == wanted[0][0][:5]
        lost = next(stage for stage in before if stage["machine"] != head.address)
        network.switch.cut = {[m.address for m in network.machines].index(lost["machine"])}
        end = driver.ask("go on")
        print(f"cut off and replaced in {end['stats']['recovery_s'][0]:.1f} s")
        assert end["facts"] == wanted[0]
        assert end["stats"]["restarts"] == 1
        for old, new in zip(before, end["stages"], strict=True):
            same = (old["machine"], old["pid"]) == (new["machine"], new["pid"])
            assert same == (old != lost)
            assert new["machine"] != lost["machine"]
        assert driver.ask("generate")["facts"] == wanted  # on the remaining machines
        assert driver.close() == 0
