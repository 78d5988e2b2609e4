"""Stages as processes started locally or by Ray, some of which are killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import toys
from support.programs import PATIENCE_S, started, state_of, until
from support.requests_mixed import mixed_facts, resident_facts
from support.toys import Folders
from verbatim import LLM, Cluster, SamplingParams

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True, params=["local", "ray"])
def launcher(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "local":
        yield "local"
        return
    ray = pytest.importorskip("ray", reason="the extra .[cluster] is not installed")
    from verbatim.placement.distributed.ray_hosts import ray_options

    ray.init("local", include_dashboard=False, **ray_options())
    yield "ray"
    assert ray.is_initialized(), "a program's own connection stays open"
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(folders: Folders) -> Path:
    return folders("qwen3_moe", num_hidden_layers=6)


@pytest.fixture(scope="module")
def llm(folder: Path, launcher: str) -> Iterator[LLM]:
    placement = Cluster(
        stages=3, spares=2, patience_s=PATIENCE_S
    )  # a busy machine delays processes
    options: dict[str, Any] = dict(max_length=200, max_batch_tokens=64, prefix_cache=False)
    with LLM(folder, placement=placement, **options) as opened:
        yield opened


def pids(llm: LLM) -> list[int]:
    return [stage["pid"] for stage in llm.info()["stages"]]


def strike(llm: LLM, forward: int, places: list[int], number: int) -> Callable[[], None]:
    """Send a signal to some stages just after the `forward`th forward from now on, from 0, was sent."""
    runner, plain, seen = llm.engine.runner, llm.engine.runner.forward, 0

    def counted(batch: Any) -> Any:
        nonlocal seen
        seen += 1
        remote = plain(batch)
        if seen == forward + 1:
            for pid in [pids(llm)[place] for place in places]:
                os.kill(pid, number)
                if number == signal.SIGSTOP:  # its threads may run a little longer
                    until(lambda pid=pid: state_of(pid) == "T")
        return remote

    def undo() -> None:
        del runner.forward
        assert seen > forward, "there were so few forwards that no stage was struck"

    runner.forward = counted  # type: ignore[method-assign]
    return undo


def alive(pid: int) -> bool:
    return state_of(pid) != "Z"


def check_all_end(pids: list[int]) -> None:
    until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    ("forward", "places", "number"),
    [
        (0, [0], signal.SIGKILL),
        (0, [2], signal.SIGKILL),
        (3, [1], signal.SIGKILL),  # in the middle of a chunked prefill
        (10, [0], signal.SIGKILL),
        (12, [2], signal.SIGKILL),
        (9, [0, 2], signal.SIGKILL),
        (9, [1], signal.SIGSTOP),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_killed_or_stopped_process_is_replaced_with_same_tokens(
    forward: int,
    places: list[int],
    number: int,
    llm: LLM,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seventeen mixed requests, with chunked prefills, beams and samples."""
    before, restarts = pids(llm), llm.stats()["cluster"]["restarts"]
    if number == signal.SIGSTOP:
        monkeypatch.setattr(llm.engine.runner.group, "patience_s", 10.0)
    undo = strike(llm, forward, places, number)
    try:
        assert mixed_facts(llm) == resident_facts(folder)
    finally:
        undo()
    after = pids(llm)
    assert [a != b for a, b in zip(before, after, strict=True)] == [i in places for i in range(3)]
    assert llm.stats()["cluster"]["restarts"] == restarts + len(places)
    check_all_end([before[place] for place in places])  # a stopped process is killed, too
    assert llm.stats()["blocks_used"] == 0


def test_two_clusters_recover_and_close_independently(folder: Path, llm: LLM) -> None:
    prompt = toys.random_ids(20, 1)
    with LLM(folder) as whole:
        (want,) = [r.outputs[0].token_ids for r in whole.generate([prompt], PARAMS)]
    with LLM(folder, placement=Cluster(stages=2, spares=1)) as other:
        others = pids(other)
        assert other.generate([prompt], PARAMS)[0].outputs[0].token_ids == want
        other.engine.runner.group.hosts._prepared[0].kill()  # the spare, unnoticed
        os.kill(others[0], signal.SIGKILL)
        assert llm.generate([prompt], PARAMS)[0].outputs[0].token_ids == want
        assert other.generate([prompt], PARAMS)[0].outputs[0].token_ids == want
        others = pids(other)
    check_all_end(others)
    assert all(map(alive, pids(llm)))


def test_stages_end_when_head_is_killed(folder: Path) -> None:
    script = textwrap.dedent(
        f"""
        import sys
        from verbatim import LLM, Cluster
        llm = LLM({str(folder)!r}, placement=Cluster(stages=2, spares=1))
        print(*[stage["pid"] for stage in llm.info()["stages"]], flush=True)
        sys.stdin.read()
        """
    )
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with started([sys.executable, "-P", "-c", script], env=environment, text=True, **pipes) as head:
        assert head.stdout is not None
        stages = [int(pid) for pid in head.stdout.readline().split()]
        assert len(stages) == 2 and all(map(alive, stages))
        head.kill()
        check_all_end(stages)
