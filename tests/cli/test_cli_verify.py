"""`verbatim verify`: finds all schedules bit-identical, or names those that are not."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from support.lora import save_adapter
from support.stages import ThreadHosts
from support.toys import make_toy
from verbatim import LLM, Cluster, SamplingParams, storyteller
from verbatim.cli.commands import app
from verbatim.errors import InvalidRequest
from verbatim.kv.store import KVStore
from verbatim.verify import NAMES, verify
from verbatim.verify.report import Row
from verbatim.verify.schedules import make_requests

IN_MEMORY = [name for name in NAMES if name not in ("offloaded", "two-stages")]


@pytest.fixture
def toy(folders):
    return folders("llama")


def statuses(report):
    return {row.name: row.status for row in report.rows}


@pytest.mark.slow
def test_every_schedule_of_the_storyteller_is_bit_identical():
    reported, names = [], [name for name in NAMES if name != "two-stages"]
    report = verify(only=names, tokens=8, on_row=reported.append)
    assert report.ok
    assert report.verdict() == "bit-identical in all 12 schedules"
    assert statuses(report) == {"alone": "reference"} | dict.fromkeys(names, "equal")
    assert reported == list(report.rows)
    rows = {row.name: row for row in report.rows}
    alone = rows.pop("alone")
    for row in rows.values():
        assert row.ids_equal
        assert row.logprobs_equal
        assert row.first_difference is None
        assert row.largest_difference == 0.0
        assert row.num_tokens >= alone.num_tokens // 4
        assert row.num_logprobs > row.num_tokens
    # A single request has at most two samples or three beams; a batch has all requests.
    assert alone.sequences_at_once == 3
    assert rows["batched"].sequences_at_once > 10
    assert rows["batched"].forwards < alone.forwards / 5
    assert rows["chunked"].rows_per_forward <= 7
    assert rows["chunked"].forwards > 2 * rows["batched"].forwards


@pytest.mark.slow
def test_two_stages_are_bit_identical():
    report = verify(only=["two-stages"], tokens=6, cluster=Cluster(stages=2, hosts=ThreadHosts()))
    assert report.verdict() == "bit-identical in the schedule"
    assert report.rows[1].note == "layers 0 to 2 and 3 to 4"


def test_every_other_request_uses_the_adapter(toy, tmp_path):
    folder = save_adapter(tmp_path / "a", make_toy("llama"))
    entry = ["--adapter", f"a={folder}", "--only", "batched", "--only", "evicted", "--json"]
    done = CliRunner().invoke(app, ["verify", str(toy), *entry])
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and [row["status"] for row in report["rows"][1:]] == ["equal"] * 2
    with LLM(toy, adapters={"a": folder}) as llm:
        requests = make_requests(llm, 4, 0)
    assert [request.params.adapter for request in requests] == ["a", None] * 6


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_verify_command_is_bit_identical_in_every_schedule():
    done = CliRunner().invoke(app, ["verify"])
    assert done.exit_code == 0
    *_, last = done.stdout.splitlines()
    assert last == "bit-identical in all 13 schedules"


def broken(monkeypatch, is_wrong):
    """Make attention slightly wrong in one row of some batches."""
    plain = KVStore.attend

    def attend(self, layer, q, batch, options):
        out = plain(self, layer, q, batch, options)
        if is_wrong(batch.query_starts, batch.context_lens):
            out = out.clone()
            out[-1] *= 1.05
        return out

    monkeypatch.setattr(KVStore, "attend", attend)


def many_sequences(query_starts, context_lens):
    return len(context_lens) > 3


def one_thread(query_starts, context_lens):
    return torch.get_num_threads() == 1


def a_later_chunk(query_starts, context_lens):
    rows = query_starts.diff()
    return bool(((rows > 1) & (context_lens > rows)).any())


BATCHED = {"batched", "reordered", "prefix-hit", "streamed", "threads", "evicted", "drafted"}


@pytest.mark.parametrize(
    ("is_wrong", "rows"),
    [
        pytest.param(many_sequences, BATCHED | {"chunked"}, marks=pytest.mark.slow),
        pytest.param(one_thread, {"threads"}, marks=pytest.mark.slow),
        (a_later_chunk, {"chunked", "prefix-hit", "drafted"}),
    ],
    ids=["with-others", "on-one-thread", "in-chunks"],
)
def test_broken_attention_is_found_in_the_affected_schedules(toy, monkeypatch, is_wrong, rows):
    broken(monkeypatch, is_wrong)
    only = [*BATCHED, "again", "chunked"]
    report = verify(toy, fused=False, only=only, num_threads=2, tokens=8)
    assert not report.ok
    found = {row.name for row in report.of("differs")}
    assert rows <= found <= rows | {"evicted"}  # evicted sequences are recomputed in a chunk
    assert "again" not in found
    for row in report.of("differs"):
        assert row.first_difference
        assert row.differing
        assert row.largest_difference > 0
        assert not (row.ids_equal and row.logprobs_equal)
    for name in found:
        assert name in report.verdict()


@pytest.mark.slow
def test_command_reports_which_schedules_differ(monkeypatch, tmp_path):
    monkeypatch.setattr("verbatim.kernels.missing", lambda: False)
    broken(monkeypatch, many_sequences)
    model = tmp_path / "[b] model"  # must not be read as markup
    model.symlink_to(storyteller.path())
    args = ["verify", str(model), *"--no-fused --only again --only batched --tokens 8".split()]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 1
    assert "[b] model" in done.stdout
    *_, where, verdict = done.stdout.splitlines()
    assert where.startswith("batched (")
    assert ", not " in where
    assert verdict == "1 of 2 schedules are bit-identical; different or failed: batched"
    table = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    shown = {row[0].strip(): row[1].strip() for row in table}
    assert shown == {"alone": "reference", "again": "equal", "batched": "differ"}
    done = CliRunner().invoke(app, [*args, "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert [row["status"] for row in report["rows"]] == ["reference", "equal", "differs"]
    assert report["rows"][2]["largest_difference"] > 0
    assert report["rows"][2]["sequences_at_once"] > 3


def test_failed_schedule_is_reported_and_the_others_run(toy, monkeypatch):
    def attend(self, *args, _plain=KVStore.attend):
        if len(args[2].context_lens) > 3:
            raise ValueError("no such batch")
        return _plain(self, *args)

    monkeypatch.setattr(KVStore, "attend", attend)
    report = verify(toy, fused=False, only=["batched", "again"])
    assert statuses(report) == {"alone": "reference", "again": "equal", "batched": "failed"}
    assert "no such batch" in report.rows[2].note
    assert not report.ok


def test_batched_schedule_without_batching_counts_as_not_run(toy, monkeypatch):
    monkeypatch.setattr("verbatim.verify.schedules.LLM", partial(LLM, max_sequences=3))
    report = verify(toy, only=["batched"])
    (row,) = report.of("not run")
    assert row.note == "no forward had more than 3 sequences, as in the reference"
    assert not report.ok
    assert report.verdict() == "nothing was compared; not run: batched"


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_live_module_reports_schedules_it_cannot_run(name):
    module = make_toy(name)
    report = verify(module, tokens=6, dtype="auto")
    found = statuses(report)
    assert found["offloaded"] == found["two-stages"] == "not run"
    assert {found[row] for row in IN_MEMORY} <= {"equal", "not run"}
    assert sum(status == "equal" for status in found.values()) >= 10
    assert all(row.note for row in report.of("not run"))
    assert report.ok


def test_requests_fit_models_with_short_max_length():
    with LLM(make_toy("llama", max_position_embeddings=9)) as llm:
        requests = make_requests(llm, 16, 0)
        assert all(1 <= len(a.prompt) <= 9 - a.params.max_tokens for a in requests)
        assert make_requests(llm, 16, 0) == requests
        assert make_requests(llm, 16, 1) != requests
    module = make_toy("llama", max_position_embeddings=9)
    assert verify(module, only=["batched", "streamed"]).ok


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(only=["foo"]), "only='foo': must be one of again, batched"),
        (dict(max_sequences=4), "max_sequences=4: the schedules set it"),
        (dict(tokens=0), "tokens=0"),
        (dict(seed=-1), "seed=-1"),
        (dict(num_threads=0), "num_threads=0"),
    ],
)
def test_invalid_settings_are_rejected(settings, said):
    with pytest.raises(InvalidRequest, match=said):
        verify(make_toy("llama"), **settings)


@pytest.fixture(scope="module")
def result():
    with LLM(make_toy("llama")) as llm:
        params = SamplingParams(seed=1, max_tokens=5, logprobs=2, prompt_logprobs=1)
        return llm.generate([[3, 4, 5]], params)[0]


def altered(result, **changes):
    return dataclasses.replace(result, outputs=[dataclasses.replace(result.outputs[0], **changes)])


def compared(expected, found, *run):
    row = Row("a", "b")
    row.compare(4, "greedy", expected, found, *run)
    return row


def test_equal_results_compare_equal_and_are_counted(result):
    nan = altered(result, logprobs=[math.nan] * 5)
    for each in (result, nan):
        row = compared(each, each)
        assert (row.ids_equal, row.logprobs_equal, row.differing) == (True, True, ())
        assert row.num_tokens == 5
    # Per token: two log-probs and the top two. Per prompt token but the first: its log-prob and the top one.
    assert row.num_logprobs == 5 * 4 + 2 * 2


def test_difference_of_one_bit_is_found(result):
    logprobs = list(result.outputs[0].logprobs)
    logprobs[2] = math.nextafter(logprobs[2], 0)
    row = compared(result, altered(result, logprobs=logprobs), "once")
    assert (row.ids_equal, row.logprobs_equal, row.differing) == (True, False, ("greedy",))
    assert 0 < row.largest_difference < 1e-12
    assert row.first_difference.startswith("once, request 4, logprob 2: ")
    zeros = altered(result, logprobs=[0.0] * 5), altered(result, logprobs=[-0.0] * 5)
    assert not compared(*zeros).logprobs_equal


def test_logprobs_after_a_different_token_are_not_compared(result):
    ids, logprobs = list(result.outputs[0].token_ids), list(result.outputs[0].logprobs)
    ids[3] += 1
    logprobs[1] += 0.25
    logprobs[3] -= 100
    logprobs[4] -= 100
    row = compared(result, altered(result, token_ids=ids, logprobs=logprobs))
    assert not row.ids_equal and not row.logprobs_equal
    assert row.first_difference == f"request 4, token 3: {ids[3]}, not {ids[3] - 1}"
    assert row.largest_difference == pytest.approx(0.25)
    for changes in (dict(text="x"), dict(token_ids=ids[:4]), dict(stop_reason=7)):
        assert not compared(result, altered(result, **changes)).ids_equal
