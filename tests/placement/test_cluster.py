"""A model in stages gives the same tokens as a resident one, also when stages are lost, replaced or moved."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from support import toys
from support.mtp_toys import save_with_mtp, toy
from support.pairwise import slow_but
from support.pools import check_pool
from support.programs import PATIENCE_S, until
from support.requests_mixed import (
    all_facts,
    facts,
    generated,
    mixed_facts,
    mixed_requests,
    resident_facts,
    submitted,
)
from support.stages import (
    ThreadHost,
    ThreadHosts,
    at_batch,
    check_threads_end,
    kill,
    num_threads,
    serving,
    staged,
)
from support.toys import Folders
from verbatim import LLM, Cluster, InvalidRequest, NotSupported, SamplingParams, StageFailed
from verbatim.compat import megatron
from verbatim.compat.megatron import DynamicInferenceRequest
from verbatim.draft import EarlyExit
from verbatim.errors import ModelChanged, OutOfBlocks
from verbatim.placement.distributed import link as links
from verbatim.placement.distributed import opening as cluster_opening
from verbatim.placement.distributed import stage_share
from verbatim.placement.distributed.link import LinkLost
from verbatim.placement.distributed.opening import kv_sizes
from verbatim.placement.distributed.split import LayerSizes
from verbatim.placement.distributed.stage_share import StageShare
from verbatim.placement.options import engine_options

MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(
        num_hidden_layers=6, hidden_size=60, intermediate_size=100, num_attention_heads=6
    ),
    "qwen3_moe": dict(num_hidden_layers=6, hidden_size=60, moe_intermediate_size=36),
    "gpt2": dict(num_hidden_layers=6, n_embd=60, n_head=3),
    "gemma2": dict(num_hidden_layers=6, hidden_size=100),
    "bloom": dict(num_hidden_layers=6, hidden_size=60),
}
FAST = {("qwen3_moe", "bfloat16")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return toys.saver(tmp_path_factory, lambda name: toys.make_toy(name, **MODELS[name]))


def clustered(folder: Path, hosts: ThreadHosts | None = None, **settings: Any) -> LLM:
    names = {"dtype", "max_batch_tokens", "block_size", "kv_dtype", "kv_memory", "num_threads"}
    names |= {"prefix_cache", "draft", "num_draft_tokens"}
    engine = {name: settings.pop(name) for name in names & settings.keys()}
    placement = staged(**{"stages": 3, "hosts": hosts or ThreadHosts()} | settings)
    return LLM(folder, max_length=200, placement=placement, **engine)


@pytest.mark.parametrize(
    ("name", "dtype"), slow_but(FAST, itertools.product(MODELS, ("float32", "bfloat16")))
)
def test_any_number_of_stages_gives_same_tokens(name: str, dtype: str, saved: Folders) -> None:
    expected = resident_facts(saved(name), dtype=dtype)
    for stages in (1, 2, 3, 5):
        with clustered(saved(name), stages=stages, dtype=dtype) as llm:
            assert mixed_facts(llm) == expected, stages
            assert len(llm.info()["stages"]) == stages
    for options in (dict(micro_batches=3), dict(max_batch_tokens=7, block_size=5)):
        with clustered(saved(name), dtype=dtype, **options) as llm:
            assert mixed_facts(llm) == expected, options


@pytest.mark.slow
def test_recurrent_model_gives_same_tokens_in_small_micro_batches(
    folders: Folders,
) -> None:
    """A piece of one row overwrites the state that it reads, so a recorded step must not run twice."""
    expected = resident_facts(folders("qwen4"), 11)
    options: dict[str, Any] = dict(max_batch_tokens=7, kv_memory=1_000_000)
    with clustered(folders("qwen4"), micro_batches=2, stages=2, **options) as llm:
        assert mixed_facts(llm, 11) == expected
        kv_bytes = llm.info()["kv_bytes"]
    with LLM(folders("qwen4"), max_length=200, **options) as llm:
        assert llm.info()["kv_bytes"] == kv_bytes, "with the recurrent states"


def test_routing_is_recorded_and_replayed_across_stages(saved: Folders) -> None:
    prompts = [toys.random_ids(30, seed) for seed in range(3)]
    record = SamplingParams(max_tokens=6, seed=4, record_routing=True)
    with LLM(saved("qwen3_moe"), kv_memory="1MB") as llm:
        expected, blocks = llm.generate(prompts, record), llm.engine.runner.num_blocks
        replay = [
            SamplingParams(max_tokens=6, seed=4, replay_routing=r.outputs[0].routing.flip(2))
            for r in expected
        ]
        replayed = all_facts(llm.generate(prompts, replay))
    hosts = ThreadHosts()
    with clustered(saved("qwen3_moe"), hosts, kv_memory="1MB") as llm:
        assert llm.engine.runner.num_blocks == blocks  # routing records take memory on stages, too
        assert all_facts(llm.generate(prompts, record)) == all_facts(expected)
        assert all_facts(llm.generate(prompts, replay)) == replayed
        at_batch(serving(llm)[1], 3, kill)
        assert all_facts(llm.generate(prompts, replay)) == replayed
        at_batch(serving(llm)[0], 3, kill)
        assert all_facts(llm.generate(prompts, record)) == all_facts(expected)
    with clustered(saved("gpt2")) as llm, pytest.raises(NotSupported, match="none of its layers"):
        llm.generate([1, 2], record)


# Faults.


def fail(host: ThreadHost, batch: Any) -> None:
    raise ZeroDivisionError("in a stage")


def replaced(before: list[ThreadHost], llm: LLM) -> list[int]:
    """Return the indices of stages that another process serves now."""
    return [i for i, (a, b) in enumerate(zip(before, serving(llm), strict=True)) if a is not b]


def kill_at_record(llm: LLM, number: int, place: int) -> list[Any]:
    """Kill a stage at the `number`th call of `record`; return a list that collects all calls' arguments."""
    runner, plain, calls = llm.engine.runner, llm.engine.runner.record, list[Any]()

    def record(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            serving(llm)[place].kill()
        return plain(*args)

    runner.record = record  # type: ignore[method-assign]
    return calls


MOMENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "begin": (0, dict()),
    "prefill": (2, dict(max_batch_tokens=40)),  # in the middle of a chunk
    "decode": (6, dict()),
    "small-blocks": (9, dict(block_size=4)),
    "few-bits": (4, dict(kv_dtype="int4")),
}
FAST_KILLS = {(2, "prefill"), (1, "few-bits")}


@pytest.mark.parametrize(
    ("place", "moment"), slow_but(FAST_KILLS, itertools.product(range(3), MOMENTS))
)
def test_killed_stage_is_replaced_with_same_tokens(place: int, moment: str, saved: Folders) -> None:
    """The requests are mixed and include beam search."""
    batch, options = MOMENTS[moment]
    expected = resident_facts(saved("qwen3_moe"), kv_dtype=options.get("kv_dtype", "auto"))
    hosts, threads = ThreadHosts(), num_threads()
    with clustered(saved("qwen3_moe"), hosts, **options) as llm:
        before = serving(llm)
        at_batch(before[place], batch, kill)
        assert mixed_facts(llm) == expected
        assert llm.stats()["cluster"]["restarts"] == 1 and before[place].killed
        assert replaced(before, llm) == [place]
        members = llm.engine.runner.group.members
        assert [member.number for member in members] == [0, 1, 2], "which GPU it would take"
        assert llm.stats()["blocks_used"] == 0
        check_pool(llm.engine.scheduler.pool)
    assert all(host.killed for host in hosts.hosts)
    check_threads_end(threads)


@pytest.mark.slow
def test_stages_lost_together_in_turn_and_during_recovery_are_replaced(saved: Folders) -> None:
    expected = resident_facts(saved("gpt2"))
    hosts = ThreadHosts()
    with clustered(saved("gpt2"), hosts, max_batch_tokens=50) as llm:
        first, second, third = serving(llm)
        at_batch(third, 4, lambda host, batch: [host.kill() for host in (first, third)])
        assert mixed_facts(llm) == expected
        assert llm.stats()["cluster"]["restarts"] == 2 and not second.killed

        # The replacement is killed while it recomputes the lost KV cache.
        hosts.on_start = lambda host: (at_batch(host, 0, kill), setattr(hosts, "on_start", idle))
        at_batch(second, 6, kill)
        assert mixed_facts(llm) == expected
        assert llm.stats()["cluster"]["restarts"] == 4
        for host in serving(llm):
            host.kill()
        assert mixed_facts(llm) == expected, "all of them, while idle"


def test_cluster_that_is_collected_in_a_listener_thread_is_closed(saved: Folders) -> None:
    """The garbage collector may run a finalizer in any thread."""
    hosts = ThreadHosts()
    with clustered(saved("llama"), hosts) as llm:
        runner: Any = llm.engine.runner
        member, closed = runner.group.members[0], threading.Event()
        receive = member.link.receive

        def close_and_receive() -> Any:
            runner._finalizer()
            closed.set()
            return receive()

        member.link.receive = close_and_receive
        member.send({"do": "ping"})
        assert closed.wait(PATIENCE_S)
        assert all(host.killed for host in hosts.hosts)


def idle(host: ThreadHost) -> None:
    pass


CUT = pytest.param(
    "cut",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(sys.platform != "linux", reason="socket filters"),
    ],
)


@pytest.mark.parametrize(
    "how", [*slow_but(["silent", "garbles"], ["hangs", "silent", "hangs up", "garbles"]), CUT]
)
def test_hung_or_disconnected_stage_is_replaced(
    how: str, saved: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`silent` answers no ping, like a stopped process. The last three break the connection between stages 0
    and 1; with `cut`, both still reach the head."""
    expected = resident_facts(saved("gpt2"), 5)
    hosts, release = ThreadHosts(), threading.Event()
    if how == "cut":
        monkeypatch.setattr(links, "_HAS_NAMES", False)
        monkeypatch.setattr(links, "_SEND_TIMEOUT_S", 1.0)
    with clustered(saved("gpt2"), hosts) as llm:
        before, group = serving(llm), llm.engine.runner.group

        def be_patient(patience_s: float, step_timeout_s: float) -> None:
            group.patience_s, group.step_timeout_s = patience_s, step_timeout_s

        def disturb(host: ThreadHost, batch: Any) -> None:
            link: Any = before[0].stage._next_link
            (behind,) = before[1].stage._incoming.values()
            send_raw = link.send_raw
            if how == "silent":
                monkeypatch.setattr(host.stage, "_ping", lambda: release.wait(PATIENCE_S))
            if how in ("hangs", "silent"):
                be_patient(3.0 if how == "silent" else PATIENCE_S, 2.0)
                release.wait(PATIENCE_S)
            elif how == "cut":
                drop_all(link._connection)
                drop_all(behind._connection)
            else:
                garbles = how == "garbles"
                link.send_raw = lambda data: send_raw(bytes(len(data))) if garbles else link.close()

        at_batch(before[1 if how in ("hangs", "silent") else 0], 3, disturb)
        hosts.on_start = lambda host: be_patient(PATIENCE_S, PATIENCE_S)
        assert mixed_facts(llm, 5) == expected
        release.set()
        assert replaced(before, llm) == [1]


def drop_all(connection: socket.socket) -> None:
    """Make the kernel drop every packet that arrives for a connection, so that nothing is acknowledged."""
    attach_filter = 26  # SO_ATTACH_FILTER
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # return 0
    described = struct.pack("HL", 1, ctypes.addressof(program))
    connection.setsockopt(socket.SOL_SOCKET, attach_filter, described)


def test_slow_stage_is_not_declared_lost(saved: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the previous stage can't send to it."""
    monkeypatch.setattr(links, "_SEND_TIMEOUT_S", 1.0)
    expected = resident_facts(saved("gpt2"), 5)
    with clustered(saved("gpt2"), micro_batches=3) as llm:
        before = serving(llm)
        share: Any = before[0].stage
        share._next_link._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        at_batch(before[1], 0, lambda host, batch: time.sleep(1.5))
        assert all_facts(llm.generate(*mixed_requests(5))) == expected
        assert serving(llm) == before


def test_stage_loss_without_replacement_fails_requests_until_a_host_is_back(saved: Folders) -> None:
    prompt, params = toys.random_ids(20, 1), SamplingParams(max_tokens=8, seed=3)
    (expected,) = generated(LLM(saved("gpt2")), [prompt], params)
    hosts = ThreadHosts()
    with clustered(saved("gpt2"), hosts) as llm, llm.session(max_length=100, seed=3) as session:
        assert facts(session.generate(prompt, params.replace(max_tokens=5)))
        session_ids = list(session.token_ids)
        hosts.room = 0
        at_batch(serving(llm)[1], 2, kill)
        with pytest.raises(StageFailed, match=r"stage 1 \(layers 2 to 4 on one\).*no machine left"):
            llm.generate([prompt], params)
        with pytest.raises(StageFailed, match="stage 1"):
            llm.generate([prompt], params)
        assert session.token_ids == session_ids
        hosts.room = None
        assert all_facts(llm.generate([prompt], params)) == [expected]
        session.generate(None, SamplingParams(max_tokens=3))
        assert session.token_ids[20:] == expected[4][0][2]
        assert llm.stats()["blocks_used"] <= 2


def test_restarts_are_limited_by_max_restarts(saved: Folders) -> None:
    hosts, params = ThreadHosts(), SamplingParams(max_tokens=8, ignore_eos=True)
    with clustered(saved("gpt2"), hosts, max_restarts=2) as llm:
        hosts.on_start = lambda host: at_batch(host, 0, kill)
        at_batch(serving(llm)[0], 2, kill)
        with pytest.raises(StageFailed, match="stage 0"):
            llm.generate([[5, 6, 7]], params)
        hosts.on_start = idle
        assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    with clustered(saved("gpt2"), max_restarts=0) as llm:
        at_batch(serving(llm)[0], 2, kill)
        with pytest.raises(StageFailed, match="max_restarts=0"):
            llm.generate([[5, 6, 7]], params)
        assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
        llm.sleep()
        serving(llm)[1].kill()
        with pytest.raises(StageFailed, match="max_restarts=0"):
            llm.wake()
        llm.wake()
        assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    with clustered(saved("qwen3_moe")) as llm:
        plain, calls = llm.engine.runner.record, list[int]()

        def lost_at_each_record(*args: Any) -> Any:
            calls.append(1)
            assert len(calls) < 20, "it goes on for ever"
            serving(llm)[1].kill()
            return plain(*args)

        llm.engine.runner.record = lost_at_each_record
        with pytest.raises(StageFailed, match="max_restarts=3"):
            llm.generate([[5, 6, 7]], params.replace(record_routing=True))
        assert len(calls) == 4


def test_ctrl_c_while_sending_work_loses_no_stage(saved: Folders) -> None:
    with clustered(saved("gpt2")) as llm:
        before, member = serving(llm), llm.engine.runner.group.members[1]
        send = member.send

        def press(message: Any) -> None:
            if isinstance(message, list):  # work, which the first stage has received already
                member.send = send
                signal.raise_signal(signal.SIGINT)
            send(message)

        member.send = press
        with pytest.raises(KeyboardInterrupt):
            mixed_facts(llm, 5)
        assert mixed_facts(llm, 5) == resident_facts(saved("gpt2"), 5)
        assert serving(llm) == before


def test_ctrl_c_during_recovery_leaves_engine_usable(saved: Folders) -> None:
    expected = resident_facts(saved("gpt2"), 5)
    hosts = ThreadHosts()
    with clustered(saved("gpt2"), hosts) as llm:
        prompts, params = mixed_requests(5)
        for moment in (0, 1):
            hit: list[bool] = []

            def press(host: ThreadHost, batch: Any, hit: list[bool] = hit) -> None:
                if not hit:
                    hit.append(True)
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    time.sleep(0.2)

            def strike(host: ThreadHost, moment: int = moment) -> None:
                at_batch(host, moment, press)

            hosts.on_start = strike
            at_batch(serving(llm)[1], 4, kill)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, params)
            assert hit
            hosts.on_start = idle
            assert all_facts(llm.generate(prompts, params)) == expected


def test_lost_kv_cache_is_recomputed_in_one_forward(saved: Folders) -> None:
    prompt, params = toys.random_ids(60, 1), SamplingParams(max_tokens=9, seed=3)
    with clustered(saved("gpt2")) as llm:
        first, _, last = serving(llm)
        rows: list[int] = []
        first.before = lambda batch: rows.append(batch.num_tokens)
        at_batch(last, 5, kill)
        llm.generate([prompt], params)
        assert rows == [60, 1, 1, 1, 1, 1, 65, 1, 1, 1]
        assert llm.stats()["cluster"]["recomputed_tokens"] == 60 + 4


# Stage losses at critical moments.


@pytest.mark.slow
def test_stage_lost_as_waiting_samples_finish_gives_same_result(saved: Folders) -> None:
    prompt = toys.random_ids(6, 2)
    params = SamplingParams(max_tokens=1, seed=2, n=3, record_routing=True)
    expected = generated(LLM(saved("qwen3_moe")), [prompt], params)
    with clustered(saved("qwen3_moe"), block_size=4, prefix_cache=False) as llm:
        llm.engine.scheduler.max_sequences = 1
        calls = kill_at_record(llm, 2, 1)
        assert all_facts(llm.generate([prompt], params)) == expected
        assert len(calls) == 3 + 2  # the last two are requested again


def test_abort_after_stage_loss_returns_tokens_without_routing(saved: Folders) -> None:
    prompt = toys.random_ids(20, 1)
    params = SamplingParams(max_tokens=4, seed=3, record_routing=True)
    expected = generated(LLM(saved("qwen3_moe")), [prompt], params)
    with clustered(saved("qwen3_moe")) as llm:
        calls = kill_at_record(llm, 1, 1)
        (request,) = submitted(llm, [prompt], [params])
        while not calls:
            assert llm.engine.step()
        assert not request.finished
        llm.engine.abort(request)
        assert request.result is not None
        (completion,) = request.result.outputs
        assert completion.finish_reason == "abort" and len(completion.token_ids) == 4
        assert completion.routing is not None and completion.routing.shape == (0, 6, 2)
        assert all_facts(llm.generate([prompt], params)) == expected


@pytest.mark.slow
def test_stage_lost_between_megatron_steps_keeps_tokens_and_routing(saved: Folders) -> None:
    """If a step's routing is lost, its tokens are returned with those of the next step."""

    def run(number: int) -> tuple[list[int], list[Any], int]:
        request = DynamicInferenceRequest(request_id=7, prompt_tokens=[7, 8, 9] * 7)
        request.sampling_params = megatron.SamplingParams(
            num_tokens_to_generate=20, termination_id=-1, top_k=1
        )
        with clustered(saved("qwen3_moe"), draft="ngram", num_draft_tokens=3) as llm:
            llm.engine.config.moe_enable_routing_replay = True
            calls = kill_at_record(llm, number, 1)
            controller = megatron.TextGenerationController(llm)
            controller.inference_context.add_request(request)
            ids, rows = list[int](), list[torch.Tensor]()
            while (step := controller.generate_output_tokens_dynamic_batch()) is not None:
                ids += step["sample"].tolist()
                rows += (step["routing_indices_per_request"] or {}).values()
            return ids, torch.cat(rows).tolist(), len(calls)

    ids, rows, num_records = run(0)
    assert len(ids) == 20 and len(rows) == 21 + 19 and num_records < 15
    for number in range(1, num_records + 1):
        assert run(number)[:2] == (ids, rows), number


@pytest.mark.parametrize("place", slow_but([1], range(3)))
def test_stage_lost_during_logits_processor_or_peek_is_replaced(place: int, saved: Folders) -> None:
    prompts = [toys.random_ids(20 + i, i) for i in range(2)]
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    expected = generated(LLM(saved("gpt2")), prompts, params)
    with clustered(saved("gpt2")) as llm:
        seen: list[int] = []

        def strike(ids: Any, logits: Any) -> Any:
            seen.append(len(ids))
            if len(seen) == 5:
                serving(llm)[place].kill()
            return logits

        hooked = params.replace(logits_processors=[strike])
        assert all_facts(llm.generate(prompts, hooked)) == expected
        # The step is repeated; the loss was noticed before its second row, or after it.
        assert len(seen) - 2 * 6 in (1, 2) and llm.stats()["cluster"]["restarts"] == 1
        (request,) = submitted(llm, prompts[:1], [params])
        llm.engine.step()
        serving(llm)[place].kill()
        ((_, token_id, _),) = llm.engine.peek()
        assert token_id == expected[0][4][0][2][1]
        llm.engine.abort(request)
        serving(llm)[place].kill()
        until(lambda: llm.engine.runner.group.pump(0.01) or llm.engine.runner.group.lost)
        llm.engine.dummy_forward()


@pytest.mark.slow
def test_peek_recomputes_lost_kv_cache_before_it_returns(saved: Folders) -> None:
    prompts = [toys.random_ids(60 + i, i) for i in range(2)]
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    expected = generated(LLM(saved("gpt2")), prompts, params)
    with clustered(saved("gpt2"), max_batch_tokens=16) as llm:
        handle, requests = llm.engine, submitted(llm, prompts, [params] * 2)
        until(lambda: handle.step() and all(r.sequences[0].output_ids for r in requests))
        drawn = [len(request.sequences[0].output_ids) for request in requests]
        serving(llm)[1].kill()
        seen = handle.peek()
        assert seen and seen == handle.peek()
        for request, token_id, _ in seen:
            i = requests.index(request)
            assert token_id == expected[i][4][0][2][drawn[i]]
        assert [len(request.sequences[0].output_ids) for request in requests] == drawn


@pytest.mark.slow
def test_stage_lost_during_sleep_gives_same_tokens_after_wake(saved: Folders) -> None:
    prompt, params = toys.random_ids(20, 1), SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    with LLM(saved("gpt2")) as llm:
        expected = llm.generate([prompt], params)[0].outputs[0].token_ids
    for weights, noticed in ((False, False), (True, False), (False, True)):
        with clustered(saved("gpt2")) as llm:
            found, group = [], llm.engine.runner.group
            for i, delta in enumerate(llm.stream(prompt, params)):
                found += delta.token_ids
                if i == 2:
                    _, dying, _ = serving(llm)
                    layers = dying.stage
                    layers.sleep = lambda weights, host=dying: host.kill()  # type: ignore[misc]
                    if noticed:
                        dying.kill()
                        until(lambda group=group: group.pump(0.01) or group.lost)
                    llm.sleep(weights=weights)
                    # The first stage got the `sleep` call, too, and handles one call at a time.
                    assert group.call("status", [group.members[0]])[0]["kv_bytes"] == 0
                    llm.wake()
            assert found == expected


def test_stage_unreachable_from_the_previous_one_is_replaced(
    saved: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = resident_facts(saved("gpt2"), 5)
    connect, tried = stage_share.connect, []

    def refused(address: Any, *args: Any) -> Any:
        tried.append(address)
        if len(tried) == 1:
            raise LinkLost("nobody there")
        return connect(address, *args)

    with clustered(saved("gpt2")) as llm:
        at_batch(serving(llm)[0], 3, kill)
        monkeypatch.setattr(stage_share, "connect", refused)
        assert mixed_facts(llm, 5) == expected
        assert llm.stats()["cluster"]["restarts"] == 2


def test_micro_batch_error_with_delayed_report_is_raised(saved: Folders) -> None:
    with clustered(saved("gpt2"), micro_batches=3) as llm:
        stage = serving(llm)[0].stage
        report = stage.report
        stage.report = lambda m: threading.Timer(0.3, report, [m]).start()  # type: ignore[method-assign]
        at_batch(serving(llm)[0], 1, fail)
        with pytest.raises(Exception, match=r"in a stage \(stage 0 "):
            llm.generate([[5], [6], [7]], SamplingParams(max_tokens=2, ignore_eos=True))
        stage.report = report  # type: ignore[method-assign]
        assert llm.generate([[5], [6], [7]], SamplingParams(max_tokens=2, ignore_eos=True))


def test_changed_checkpoint_is_detected_on_wake_and_stage_replacement(
    saved: Folders, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("gpt2"), tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    before, written = file.read_bytes(), file.stat().st_mtime_ns
    header = 8 + int.from_bytes(before[:8], "little")
    others = before[:header] + bytes(len(before) - header)  # of the same size
    expected = resident_facts(folder, 5)
    with clustered(folder, max_restarts=1) as llm:
        assert mixed_facts(llm, 5) == expected
        with pytest.MonkeyPatch.context() as patch:

            def refuse(weights: bool) -> None:
                raise ModelChanged("a file of this stage changed")

            patch.setattr(serving(llm)[1].stage.runner, "sleep", refuse)
            with pytest.raises(ModelChanged, match="of this stage"):
                llm.sleep(weights=True)
        assert mixed_facts(llm, 5) == expected  # the other stages are awake again
        llm.sleep(weights=True)
        file.write_bytes(others)
        with pytest.raises(ModelChanged, match="changed since"):
            llm.wake()
        file.write_bytes(before)
        os.utime(file, ns=(written, written))
        llm.wake()
        assert mixed_facts(llm, 5) == expected
        file.write_bytes(others)
        serving(llm)[0].kill()
        with pytest.raises(StageFailed, match=r"stage 0 .*another model"):
            llm.generate([5, 6])
        file.write_bytes(before)
        os.utime(file, ns=(written, written))
        assert mixed_facts(llm, 5) == expected
        file.write_bytes(others)
        with pytest.raises(NotSupported, match="another model"):
            llm.engine.runner.group.move([(0, 1), (1, 5), (5, 6)])
        assert len(llm.info()["stages"]) == 3


# Moving layers.


def test_layers_move_between_stages_during_generation(saved: Folders) -> None:
    prompt, params = toys.random_ids(30, 1), SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    with LLM(saved("qwen3_moe")) as llm:
        expected = llm.generate([prompt], params)[0].outputs[0].token_ids
    with clustered(saved("qwen3_moe")) as llm:
        runner, found = llm.engine.runner, []
        for i, delta in enumerate(llm.stream(prompt, params)):
            found += delta.token_ids
            if i in (2, 5):
                pids = serving(llm)
                ranges = [(0, 1), (1, 5), (5, 6)] if i == 2 else [(0, 4), (4, 5), (5, 6)]
                runner.group.move(ranges)
                assert [tuple(s["layers"]) for s in llm.info()["stages"]] == ranges
                assert serving(llm) == pids
        assert found == expected
        llm.rebalance()
        assert sum(b - a for a, b in (s["layers"] for s in llm.info()["stages"])) == 6
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected
    with LLM(saved("gpt2")) as llm, pytest.raises(NotSupported, match="placement=Cluster"):
        llm.rebalance()


def test_move_that_fails_leaves_the_layers_where_they_were(saved: Folders) -> None:
    expected = resident_facts(saved("gpt2"), 5)
    with clustered(saved("gpt2"), layers=(2, 2, 2)) as llm:

        def fail(**_: Any) -> None:
            raise OutOfBlocks("no room")

        serving(llm)[1].stage.open = fail  # type: ignore[method-assign]
        with pytest.raises(OutOfBlocks, match="no room"):
            llm.engine.runner.group.move([(0, 1), (1, 5), (5, 6)])
        assert mixed_facts(llm, 5) == expected
        assert [s["layers"] for s in llm.info()["stages"]] == [[0, 2], [2, 4], [4, 6]]


def test_joining_machine_receives_a_stage_between_requests_unless_it_fails(saved: Folders) -> None:
    expected = resident_facts(saved("gpt2"), 5)
    hosts = ThreadHosts("one")
    with clustered(saved("gpt2"), hosts) as llm:
        assert mixed_facts(llm, 5) == expected
        for joining, used in ("two", "one two"), ("three four", "one two"), ("", "one two four"):
            if joining == "three four":  # the stage on the first of them fails
                hosts.on_start = lambda host: (host.kill(), setattr(hosts, "on_start", idle))
            hosts.names += joining.split()
            llm.engine.runner.group._next_check = 0.0
            assert mixed_facts(llm, 5) == expected
            assert {host.machine for host in serving(llm)} == {*used.split()}, joining
        assert llm.stats()["cluster"]["restarts"] == 0


def test_stage_too_large_for_any_machine_is_split(
    saved: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = resident_facts(saved("qwen3_moe"))
    hosts = ThreadHosts()
    with clustered(saved("qwen3_moe"), hosts, stages=2) as llm:
        needed = max(stage["weight_bytes"] for stage in llm.info()["stages"])
        monkeypatch.setattr("verbatim.model.device.available_memory", lambda: needed * 3 // 4)
        at_batch(serving(llm)[1], 5, kill)
        assert mixed_facts(llm) == expected
        assert [stage["layers"] for stage in llm.info()["stages"]] in (
            [[0, 3], [3, 4], [4, 6]],
            [[0, 3], [3, 5], [5, 6]],
        )
        monkeypatch.setattr("verbatim.model.device.available_memory", lambda: needed // 9)
        at_batch(serving(llm)[0], 5, kill)
        with pytest.raises(StageFailed, match=r"stage 0 .*can't be divided"):
            llm.generate(*mixed_requests())


@pytest.mark.parametrize(
    ("outside", "cuts", "room", "speed", "expected"),
    [
        ((0, 0), (1, 2, 3), [9, 9], [1, 1], [(0, 2), (2, 4)]),
        ((0, 0), (1, 2, 3), [9, 9], [3, 1], [(0, 3), (3, 4)]),
        ((0, 3), (1, 2, 3), [9, 9], [1, 1], [(0, 3), (3, 4)]),
        ((0, 0), (1,), [9, 9], [1, 1], [(0, 1), (1, 4)]),
        ((0, 0), (1, 2, 3), [1, 9], [1, 1], [(0, 1), (1, 4)]),
        ((0, 0), (1, 2, 3), [1, 2], [1, 1], None),
    ],
)
def test_layers_are_divided_by_memory_and_speed(
    outside: Any, cuts: Any, room: Any, speed: Any, expected: Any
) -> None:
    layout = LayerSizes((1, 1, 1, 1), outside, 0, cuts)
    if expected is not None:
        assert layout.divide(room, speed) == expected
        return
    with pytest.raises(MemoryError, match="can't be divided over 2 stages"):
        layout.divide(room, speed)


def test_processes_on_one_device_share_its_kv_budget() -> None:
    def sizes(*memories: tuple[str, int], **given: Any) -> tuple[int | None, int]:
        fields = {"token_bytes": 10, "state_bytes": 0}
        shares = [(name, {"memory": nbytes, **fields}) for name, nbytes in memories]
        options, blocks, _ = kv_sizes(engine_options(**given), None, shares)
        return options.kv_bytes, blocks

    # 40% of the smaller memory holds 200 tokens
    assert sizes(("cuda:0", 10_000), ("cuda:1", 5000)) == (200 * 20, 200 // 16)
    # free memory was measured after the other process had loaded its weights
    assert sizes(("cuda:0", 10_000), ("cuda:0", 5000)) == (100 * 20, 100 // 16)
    assert sizes(("cpu", 10_000), kv_memory=770) == (770, 770 // 160)


def test_stages_of_one_machine_share_its_memory_under_any_names(
    saved: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = 10_000_000
    monkeypatch.setattr("verbatim.model.device.available_memory", lambda: memory)
    with clustered(saved("llama"), ThreadHosts("rank 1", "rank 0")) as llm:
        assert 0.39 * memory < llm.info()["kv_bytes"] <= 0.4 * memory


def test_range_of_layers_is_divided_over_stages() -> None:
    layout = LayerSizes((1, 2, 3, 4), (10, 20), 5, (1, 2, 3))
    assert [layout.bytes_of(0, 4), layout.bytes_of(1, 2), layout.bytes_of(0, 1)] == [45, 7, 16]
    assert layout.divide([30, 30], [1, 1], (1, 3)) == [(1, 2), (2, 3)]


# Opening and closing.


def test_machines_with_different_numerics_version_or_model_are_rejected(
    saved: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = iter(["cpu/a", "cpu/a", "cpu/b", "cpu/b", "cpu/a", "cpu/a"])
    monkeypatch.setattr(stage_share, "key_of", lambda *args, **by_torch: next(keys))
    with pytest.raises(NotSupported, match=r"one has the numerics key 'cpu/[ab]' and one 'cpu/"):
        clustered(saved("gpt2"))
    monkeypatch.undo()
    facts_of = StageShare.facts
    monkeypatch.setattr(StageShare, "facts", lambda *args: {**facts_of(*args), "verbatim": "0.0.0"})
    with pytest.raises(NotSupported, match=r"one has verbatim 0\.0\.0, but this machine has"):
        clustered(saved("gpt2"))
    monkeypatch.undo()
    monkeypatch.setattr(cluster_opening, "fingerprint", lambda loaded: "another")
    with pytest.raises(NotSupported, match="one has another model at"):
        clustered(saved("gpt2"))


def test_invalid_cluster_placements_are_rejected(saved: Folders) -> None:
    folder = saved("gpt2")
    with pytest.raises(InvalidRequest, match=r"stages=7: the model can be cut into 6"):
        clustered(folder, stages=7)
    with pytest.raises(InvalidRequest, match="stages=7"):  # before a cluster there is sought
        LLM(folder, placement=Cluster(stages=7, address="127.0.0.1:9"))
    with pytest.raises(InvalidRequest, match=r"layers=\(2, 2\) add up to 4; the model has 6"):
        clustered(folder, stages=None, layers=(2, 2))
    with pytest.raises(NotSupported, match="a live module is in memory"):
        LLM(toys.make_toy("gpt2"), placement=staged())
    with pytest.raises(InvalidRequest, match=r"layers=4.*the first stage holds 3 layers"):
        clustered(folder, layers=(3, 3), stages=None, draft=EarlyExit(4))
    bad: list[tuple[dict[str, Any], str]] = [
        (dict(stages=0), "stages=0"),
        (dict(stages=True), "stages=True"),
        (dict(stages=100_000), "1 to 512"),
        (dict(layers=()), "layers=\\(\\)"),
        (dict(layers="22"), "layers='22'"),
        (dict(layers=(1, 0)), "layers=0"),
        (dict(stages=3, layers=(3, 3)), "makes 2 stages"),
        (dict(spares=-1), "spares=-1"),
        (dict(max_restarts=1.5), "max_restarts=1.5"),
        (dict(patience_s=0), "patience_s=0"),
        (dict(step_timeout_s=float("nan")), "step_timeout_s=nan"),
        (dict(micro_batches=0), "micro_batches=0"),
        (dict(address=7), "address=7"),
    ]
    for settings, message in bad:
        with pytest.raises(InvalidRequest, match=message):
            Cluster(**settings)
    hosts = ThreadHosts()
    hosts.room = 2
    with pytest.raises(StageFailed, match="no machine left"):
        clustered(folder, hosts)
    assert all(host.killed for host in hosts.hosts)


def test_stage_lost_after_weight_update_requires_another_update(saved: Folders) -> None:
    """A stage lost during the update itself is replaced, because its weights are sent again."""
    new = toys.make_toy("llama", seed=7, **MODELS["llama"])
    right = generated(LLM(new, max_length=200), *mixed_requests(5))
    with clustered(saved("llama")) as llm:
        layers: Any = serving(llm)[1].stage
        write = layers.write_weights

        def lose(tensors: Any) -> Any:
            kill(serving(llm)[1], None)
            return write(tensors)

        layers.write_weights = lose
        llm.update_weights(new)
        assert llm.stats()["cluster"]["restarts"] == 1
        assert mixed_facts(llm, 5) == right
        for call, name in (
            (lambda: llm.rebalance(), "rebalance"),
            (lambda: llm.sleep(weights=True), "sleep"),
        ):
            with pytest.raises(NotSupported, match=rf"{name}.*updated in memory"):
                call()
        llm.sleep()
        llm.wake()
        at_batch(serving(llm)[2], 3, kill)
        for _ in range(2):
            with pytest.raises(StageFailed, match=r"stage 2 .* call update_weights again"):
                llm.generate(*mixed_requests(5))
        llm.update_weights(new)
        assert mixed_facts(llm, 5) == right


def test_stage_lost_before_new_weights_are_written_leaves_the_old_ones(saved: Folders) -> None:
    new = toys.make_toy("llama", seed=7, **MODELS["llama"])
    expected = resident_facts(saved("llama"), 5)
    with clustered(saved("llama")) as llm:
        stage: Any = serving(llm)[1].stage

        def lose(tensors: Any) -> None:
            kill(serving(llm)[1], None)

        stage.prepare_weights = lose
        llm.engine.runner.new_weights(new.state_dict(), check_finite=False)
        assert llm.stats()["cluster"]["restarts"] == 1
        assert mixed_facts(llm, 5) == expected


def test_explicit_layers_per_stage_are_used(saved: Folders) -> None:
    expected = resident_facts(saved("llama"), 5)
    with clustered(saved("llama"), stages=None, layers=(1, 4, 1), num_threads=1) as llm:
        assert [stage["layers"] for stage in llm.info()["stages"]] == [[0, 1], [1, 5], [5, 6]]
        assert mixed_facts(llm, 5) == expected
        llm.sleep(weights=True)
        serving(llm)[1].kill()
        llm.wake()
        assert mixed_facts(llm, 5) == expected
    whole = LLM(saved("llama"))
    parts = clustered(saved("llama"), stages=4)
    with whole, parts:
        one, other = whole.info(), parts.info()
        same = "architecture dtype layers kv_bytes_per_token numerics_key vocab_size weight_bytes"
        assert [one[name] for name in same.split()] == [other[name] for name in same.split()]


@pytest.mark.slow
def test_killed_stage_with_preemptions_gives_same_tokens(saved: Folders) -> None:
    expected = resident_facts(saved("gpt2"))
    with LLM(saved("gpt2")) as llm:
        per_token = llm.info()["kv_bytes_per_token"]
    for prefix_cache in (True, False):
        options = dict(kv_memory=per_token * 104, block_size=8, prefix_cache=prefix_cache)
        with clustered(saved("gpt2"), **options) as llm:
            for place in (2, 0, 1):
                at_batch(serving(llm)[place], 11, kill)
                assert mixed_facts(llm) == expected
            stats = llm.stats()
            assert stats["preemptions"] and stats["cluster"]["restarts"] == 3


@pytest.mark.parametrize(
    ("place", "source", "draft"),
    [
        pytest.param(1, "dcp", "mtp", id="last-dcp", marks=pytest.mark.slow),
        pytest.param(0, "dcp", "mtp", id="first-dcp", marks=pytest.mark.slow),
        pytest.param(1, "folder", "mtp", id="last-folder", marks=pytest.mark.slow),
        pytest.param(0, "folder", EarlyExit(1), id="first-early-exit"),
    ],
)
def test_drafts_match_one_process_after_stage_loss_sleep_and_move(
    place: int, source: str, draft: Any, tmp_path: Path
) -> None:
    """Drafts for a prefix equal those of a model in one process, before and after a stage is lost."""
    pair = toy("qwen3", 2)
    save_with_mtp(pair, tmp_path / "hf")
    options: dict[str, Any] = dict(draft=draft, num_draft_tokens=3, max_length=200)
    folder = tmp_path / "hf"
    if source == "dcp":
        weights = load_file(folder / "model.safetensors")
        folder = tmp_path / "step_7"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({"model": weights}, checkpoint_id=str(folder))
        options["config"] = pair.main.config
    prompts = [toys.random_ids(9 + 7 * i, i) for i in range(6)]
    params = [SamplingParams(seed=i, temperature=i / 4, max_tokens=14) for i in range(6)]

    def drafts_of(llm: LLM) -> dict[Any, list[int]]:
        """Return a dict of the drafts by prefix, filled in from now on."""
        found: dict[Any, list[int]] = {}
        proposer: Any = llm.engine.drafting.proposer  # type: ignore[union-attr]
        propose = proposer.propose

        def noted(sequences: list[Any], lengths: list[int]) -> list[list[int]]:
            answers: list[list[int]] = propose(sequences, lengths)
            for s, length, answer in zip(sequences, lengths, answers, strict=True):
                found[length, s.request.params.seed, *s.token_ids(0, s.num_tokens)] = answer
            return answers

        proposer.propose = noted
        return found

    with LLM(folder, **options) as llm:
        right = drafts_of(llm)
        expected = all_facts(llm.generate(prompts, params))
        assert len(right) > 30 and all(right.values())
    placement = staged(layers=(2, 1))
    with LLM(folder, placement=placement, **options) as llm:
        found = drafts_of(llm)
        assert all_facts(llm.generate(prompts, params)) == expected
        assert found == right
        found.clear()
        at_batch(serving(llm)[place], 5, kill)
        assert all_facts(llm.generate(prompts, params)) == expected
        stats = llm.stats()
        assert stats["cluster"]["restarts"] == 1 and stats["draft"]["errors"] == 0
        known = {prefix: draft for prefix, draft in found.items() if prefix in right}
        assert len(known) > 20 and all(right[prefix] == draft for prefix, draft in known.items())
        llm.sleep(weights=True)
        llm.wake()
        found.clear()
        assert all_facts(llm.generate(prompts, params)) == expected
        assert found == right
        llm.engine.runner.group.move([(0, 1), (1, 3)])  # type: ignore[attr-defined]
        found.clear()
        assert all_facts(llm.generate(prompts, params)) == expected
        assert found == right
        drafting: Any = serving(llm)[-1 if draft == "mtp" else 0].stage.runner

        def fail(**_: Any) -> None:
            raise ZeroDivisionError("in a layer that drafts")

        drafting.draft = fail
        assert all_facts(llm.generate(prompts, params)) == expected
        stats = llm.stats()
        assert "in a layer that drafts (stage " in stats["draft"]["last_error"]
        assert stats["draft"]["errors"] > 0 and stats["cluster"]["restarts"] == 1


def test_model_error_fails_requests_but_keeps_stages(saved: Folders) -> None:
    with clustered(saved("gpt2")) as llm:
        before = serving(llm)
        for place, hooks in itertools.product(range(3), ([], [lambda ids, logits: logits])):
            at_batch(before[place], 1, fail)
            params = SamplingParams(max_tokens=5, ignore_eos=True, logits_processors=hooks)
            with pytest.raises(Exception, match=rf"in a stage \(stage {place} "):
                llm.generate([[5, 6]], params)
        last: Any = before[2].stage
        draw = last.draw

        def draw_plain(plan: Any, **which: Any) -> Any:
            assert all(row.processed is None for row in plan.rows), "they came from there"
            return draw(plan=plan, **which)

        last.draw = draw_plain
        assert mixed_facts(llm) == resident_facts(saved("gpt2"))
        assert serving(llm) == before and llm.stats()["cluster"]["restarts"] == 0


@pytest.mark.slow
def test_stage_lost_while_step_is_committed_gives_same_tokens(saved: Folders) -> None:
    """The step's tokens are committed for some sequences and not yet for others."""
    prompts = [toys.random_ids(20 + i, i) for i in range(4)]
    params = [
        SamplingParams(max_tokens=5 + 3 * (i > 1), seed=i, record_routing=True) for i in range(4)
    ]
    expected = generated(LLM(saved("qwen3_moe")), prompts, params)
    for place in range(3):
        with clustered(saved("qwen3_moe"), block_size=4) as llm:
            kill_at_record(llm, 1, place)  # for the first of two sequences that end in this step
            assert all_facts(llm.generate(prompts, params)) == expected
            assert llm.stats()["cluster"]["restarts"] == 1
