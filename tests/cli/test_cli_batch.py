"""`verbatim batch`: the same answers as from a server, and resuming after interruptions."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from support.programs import FROM_THE_DOT, VERBATIM, started
from verbatim import LLM, SamplingParams
from verbatim.cli.batch import _shown
from verbatim.cli.commands import app
from verbatim.common.files import lines_of
from verbatim.errors import InvalidRequest, StageFailed, VerbatimError
from verbatim.serve.batch import BatchRun
from verbatim.serve.metrics import ServerMetrics
from verbatim.serve.records import Records

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def line(custom_id, body, url=COMPLETIONS, **rest):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | rest


def some(count, **fields):
    return [
        line(f"r{i}", {"prompt": "The fox", "max_tokens": 4 + i % 5, "seed": i} | fields)
        for i in range(count)
    ]


def write(path, lines):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def read(path):
    return [json.loads(text) for text in path.read_bytes().splitlines()]


def records_in(folder):
    return Records(folder / "out.jsonl", folder / "in.jsonl")


def texts_of(records):
    return {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in records}


@pytest.fixture(scope="module")
def llm():
    with LLM() as llm:
        yield llm


@pytest.fixture
def answer(llm, tmp_path):
    """Run a batch to its end on the shared engine; return the run and its records."""

    def answer(lines=None, on_record=lambda: None, **options):
        if lines is not None:
            write(tmp_path / "in.jsonl", lines)
        with records_in(tmp_path) as records:
            run = BatchRun(llm, records, **options)
            asyncio.run(run.run(on_record))
        assert run.bytes_done == run.num_bytes
        return run, read(tmp_path / "out.jsonl")

    return answer


@pytest.fixture
def command(llm, monkeypatch, tmp_path):
    """Run the command on the shared engine."""

    class Kept:
        def __enter__(self):
            return llm

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("verbatim.cli.placing.open_llm", lambda values, placement: Kept())

    def command(*args):
        paths = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")
        return CliRunner().invoke(app, ["batch", *paths, *args])

    return command


@pytest.fixture
def disturbed(command, monkeypatch, tmp_path):
    """Run the command until it has written `left` bytes, then fail or interrupt it."""
    out = tmp_path / "out.jsonl"
    write_to, add = os.write, Records._add

    def disturbed(how, left):
        def limited(fd, data):
            nonlocal left
            if not out.exists() or not os.path.samestat(os.fstat(fd), out.stat()):
                return write_to(fd, data)
            if how == "full" and left <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = write_to(fd, data[: left if how == "full" else None])
            left -= written
            return written

        def interrupted(self, *args):
            add(self, *args)
            if how == "interrupted" and left <= 0:
                signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr("verbatim.serve.records.os.write", limited)
            patch.setattr(Records, "_add", interrupted)
            done = command("--in-flight", "3")
        assert done.exit_code == (130 if how == "interrupted" and left <= 0 else 1)
        return done

    return disturbed


def test_batch_answers_match_generate_and_chat(answer, llm):
    user = [{"role": "user", "content": "Tell me of a fox."}]
    lines = [
        line("text", {"prompt": "Once upon a time", "max_tokens": 12, "seed": 5, "logprobs": 2}),
        line("chat", {"messages": user, "max_tokens": 9, "seed": 6, "temperature": 1}, CHATS),
        line("new", {"input": "A fox", "max_output_tokens": 8, "seed": 7}, RESPONSES),
    ]
    run, records = answer(lines)
    assert run.num_done == 3
    assert [set(record) for record in records] == [{"id", "custom_id", "response", "error"}] * 3
    assert all(record["error"] is None for record in records)
    assert all(record["response"]["status_code"] == 200 for record in records)
    found = {record["custom_id"]: record["response"]["body"] for record in records}
    params = SamplingParams(max_tokens=12, seed=5, logprobs=2)
    (alone,) = llm.generate("Once upon a time", params)
    (choice,) = found["text"]["choices"]
    assert choice["text"] == alone.outputs[0].text
    assert choice["logprobs"]["token_logprobs"] == alone.outputs[0].logprobs
    params = llm.default_params().replace(max_tokens=9, seed=6, temperature=1)
    chat = llm.chat(user, params).outputs[0]
    assert found["chat"]["choices"][0]["message"]["content"] == chat.text
    assert found["new"]["output"][0]["content"][0]["text"]
    assert found["new"]["seed"] == 7


def test_reported_seed_reproduces_the_text(answer, tmp_path):
    _, records = answer([line("a", {"prompt": "The"}), line("b", {"prompt": "The"})])
    seeds = {r["custom_id"]: r["response"]["body"]["choices"][0]["seed"] for r in records}
    assert seeds["a"] != seeds["b"]
    (tmp_path / "out.jsonl").unlink()
    _, again = answer([line("a", {"prompt": "The", "seed": seeds["a"]})])
    assert texts_of(again)["a"] == texts_of(records)["a"]


def test_progress_of_resumed_run_is_shown_after_each_answer(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    seconds, records = itertools.count(), SimpleNamespace(num_errors=0)
    run = SimpleNamespace(num_bytes=1000, bytes_skipped=900, bytes_done=900, records=records)
    run.num_skipped, run.num_done, run.num_tokens, run.seconds = 90, 0, 5, 1.0
    monkeypatch.setattr("tqdm.std.time", lambda: next(seconds))
    monkeypatch.setattr("sys.stderr", Terminal())
    with _shown(run) as advance:
        for _ in range(3):
            run.bytes_done, run.num_done = run.bytes_done + 10, run.num_done + 1
            advance()
            assert f"{run.bytes_done // 10}%: {90 + run.num_done} lines" in sys.stderr.getvalue()


def test_many_lines_run_at_once_up_to_in_flight(answer, llm, tmp_path):
    before = llm.stats()
    run, _ = answer(some(40, ignore_eos=True))
    after = llm.stats()
    assert after["forwards"] - before["forwards"] < (after["tokens"] - before["tokens"]) / 4
    assert run.num_tokens == sum(4 + i % 5 for i in range(40))
    (tmp_path / "out.jsonl").unlink()
    most = 0

    def note():
        nonlocal most
        most = max(most, run.service.num_in_progress)

    with records_in(tmp_path) as records:
        run = BatchRun(llm, records, in_flight=3)
        asyncio.run(run.run(note))
    assert most in (2, 3)  # a request that is being written has released its reservation
    assert len(read(tmp_path / "out.jsonl")) == 40


def test_run_resumes_from_truncated_output_with_same_answers(answer, tmp_path):
    lines = some(12)
    out = tmp_path / "out.jsonl"
    _, records = answer(lines)
    expected, whole = texts_of(records), out.read_bytes()
    assert len(expected) == 12
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    cuts = [0, 1, 10, ends[0] - 1, ends[0], ends[0] + 1, ends[5] + 40, ends[-1] - 1, ends[-1]]
    for cut in cuts:
        out.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends)
        run, records = answer()
        assert (run.num_skipped, run.num_done) == (kept, 12 - kept), cut
        assert texts_of(records) == expected
        assert len(records) == 12
        assert out.read_bytes().startswith(whole[: ends[kept - 1] if kept else 0])


BAD = [
    ("nonsense", None, "invalid_line", "line 2: not JSON"),
    ([1], None, "invalid_line", "line 3: must be a JSON object"),
    ({"custom_id": 7}, None, "invalid_line", "line 4: custom_id=7"),
    (line("r0", {}), "r0", "duplicate_custom_id", "line 5: an earlier line"),
    (line("u", {}, "/v1/x"), "u", "invalid_url", "url: '/v1/x': Input should be '/v1/compl"),
    (line("m", {}, method="GET"), "m", "invalid_method", "method: 'GET': Input should be 'POST'"),
    (line("f", {}, more=1), "f", "invalid_request", "unsupported field 'more'"),
    (line("b", []), "b", "invalid_request", "body: Input should be a valid dictionary"),
    ("[" * 100_000, None, "invalid_line", "line 10: not JSON"),
]
REFUSED = [
    ({"prompt": "a", "foo": 1}, 400, "unsupported field 'foo'"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature=-1"),
    ({"prompt": ""}, 400, "the prompt is empty"),
    ({"prompt": "a", "stream": True}, 400, "stream: not supported in a batch"),
    ({"prompt": "a", "model": "gpt"}, 404, "model='gpt'"),
]


def test_bad_lines_become_error_records(command, tmp_path):
    good = [json.dumps(line("r0", {"prompt": "The fox", "max_tokens": 3})) + "\n"]
    refused = [json.dumps(line(f"x{i}", body)) + "\n" for i, (body, _, _) in enumerate(REFUSED)]
    last = good[0].replace("r0", "last").strip()  # without a final newline
    bad = [(text if isinstance(text, str) else json.dumps(text)) + "\n" for text, *_ in BAD]
    text = "\ufeff" + "".join([*good, *bad, "\n", *refused, last])
    (tmp_path / "in.jsonl").write_text(text)
    done = command()
    assert done.exit_code == 1
    records = read(tmp_path / "out.jsonl")
    faults = [record for record in records if record["response"] is None]
    assert len(faults) == len(BAD)
    for record, (_, custom_id, code, message) in zip(faults, BAD, strict=True):
        assert record["custom_id"] == custom_id
        assert record["error"]["code"] == code
        assert message in record["error"]["message"]
    answered = {r["custom_id"]: r["response"] for r in records if r["response"] is not None}
    for i, (_, status, message) in enumerate(REFUSED):
        assert answered[f"x{i}"]["status_code"] == status
        assert message in answered[f"x{i}"]["body"]["error"]["message"]
    assert answered["r0"]["status_code"] == answered["last"]["status_code"] == 200
    number = len(BAD) + len(REFUSED) + 2
    assert f"{number} lines are in " in done.stderr
    assert f", {number - 2} of them errors; " in done.stderr
    # A second run answers nothing, and its status is that of the existing records.
    done = command()
    assert done.exit_code == 1
    assert f"({number} from earlier runs)" in done.stderr
    assert len(read(tmp_path / "out.jsonl")) == number


def test_run_without_errors_prints_a_summary(command, tmp_path):
    write(tmp_path / "in.jsonl", some(2, ignore_eos=True))
    done = command("--name", "fox")
    assert done.exit_code == 0
    assert done.stdout == ""
    assert done.stderr.startswith(f"2 lines are in {tmp_path / 'out.jsonl'}; 9 tokens in ")
    body = read(tmp_path / "out.jsonl")[0]["response"]["body"]
    assert body["model"] == "fox"
    write(tmp_path / "in.jsonl", some(3))
    done = command()
    assert "was started by fox with cpu/" in done.stderr


def test_ctrl_c_keeps_written_lines_and_says_how_to_resume(command, disturbed, tmp_path):
    write(tmp_path / "in.jsonl", some(30, max_tokens=None))
    done = disturbed("interrupted", 1000)
    count = len(read(tmp_path / "out.jsonl"))
    assert 2 <= count <= 6
    assert f"verbatim: interrupted; {count} lines are in " in done.stderr
    assert "the same command resumes there" in done.stderr
    assert command().exit_code == 0
    ids = sorted(r["custom_id"] for r in read(tmp_path / "out.jsonl"))
    assert ids == sorted(f"r{i}" for i in range(30))


def test_full_disk_prints_one_line_and_leaves_whole_lines(disturbed, tmp_path):
    write(tmp_path / "in.jsonl", some(9))
    done = disturbed("full", 1500)
    assert len(done.stderr.splitlines()) == 1
    assert "out.jsonl: No space left on device" in done.stderr
    assert 1 <= len(read(tmp_path / "out.jsonl")) < 9


def test_engine_failure_ends_run_and_loses_no_line(llm, monkeypatch, tmp_path):
    write(tmp_path / "in.jsonl", some(6))
    with records_in(tmp_path) as records:
        run = BatchRun(llm, records, in_flight=2)
        plain = llm.engine.arun

        async def failing(requests):
            if requests[0].seed == 3:
                raise StageFailed("stage 1 was lost")
            return await plain(requests)

        with monkeypatch.context() as patched:
            patched.setattr(llm.engine, "arun", failing)
            with pytest.raises(StageFailed, match="stage 1 was lost"):
                asyncio.run(run.run())
    assert "r3" not in texts_of(read(tmp_path / "out.jsonl"))
    with records_in(tmp_path) as records:
        asyncio.run(BatchRun(llm, records).run())
    assert set(texts_of(read(tmp_path / "out.jsonl"))) == {f"r{i}" for i in range(6)}


def test_unexpected_error_is_recorded_for_its_line(answer, monkeypatch):
    from verbatim.serve import completions

    plain = completions.CompletionRequest.answer

    async def failing(self, key):
        if self.params.seed == 1:
            raise LookupError("odd")
        return await plain(self, key)

    monkeypatch.setattr(completions.CompletionRequest, "answer", failing)
    _, records = answer(some(3))
    found = {r["custom_id"]: r["response"] for r in records}
    assert found["r1"]["status_code"] == 500
    assert found["r1"]["body"]["error"]["message"] == "LookupError: odd"
    assert found["r0"]["status_code"] == found["r2"]["status_code"] == 200


@pytest.mark.parametrize("limit", ["response bytes", "queue"])
def test_lines_over_a_limit_on_all_lines_together_wait(answer, llm, monkeypatch, limit):
    monkeypatch.setattr("verbatim.serve.batch.RETRY_AFTER_S", 0.01)
    if limit == "queue":
        monkeypatch.setattr(llm.engine._engine, "max_waiting", 0)
        monkeypatch.setattr(llm.engine.scheduler, "max_sequences", 2)
    else:
        monkeypatch.setattr("verbatim.serve.batch.MAX_RESPONSE_BYTES", 200)
        monkeypatch.setattr("verbatim.serve.service._MAX_RESPONSES", 1)
    # Three prompts at once never fit into the queue, and a hundred tokens not into a response.
    never = line("never", {"prompt": ["a", "b", "c"], "max_tokens": 100})
    admitted, admit = [], llm.engine.admission.admit

    def counted(prompt, *args, **kwargs):
        admitted.append(prompt)
        return admit(prompt, *args, **kwargs)

    monkeypatch.setattr(llm.engine.admission, "admit", counted)
    _, records = answer([never, *some(20)], in_flight=10)
    statuses = {r["custom_id"]: r["response"]["status_code"] for r in records}
    assert statuses.pop("never") == (429 if limit == "queue" else 400)
    assert set(statuses.values()) == {200} and len(statuses) == 20
    assert len(admitted) == 3 + 20  # a line that waits is not tokenized again


def test_half_surrogate_pair_does_not_end_the_run(answer):
    body = {"input": "a", "metadata": {"a": "\ud800"}, "max_output_tokens": 3}
    body["include"] = ["message.output_text.logprobs"]
    _, records = answer([line("a", body, RESPONSES)])
    assert records[0]["response"]["body"]["metadata"] == {"a": "?"}
    assert len(records[0]["response"]["body"]["output"][0]["content"][0]["logprobs"]) == 3


def test_concurrent_runs_on_one_output_are_rejected(command, tmp_path):
    write(tmp_path / "in.jsonl", some(1))
    with records_in(tmp_path):
        done = command()
    assert done.exit_code == 1
    assert done.stderr == f"verbatim: another run is writing to {tmp_path / 'out.jsonl'}\n"


@pytest.mark.parametrize(
    "text",
    [b"my notes", b'{"a": 1}\n', b'{"id":"batch_req_1","custom_id":"a","response":null}\n', b"\x00\x01\n"],
    ids=["a-text", "other-json", "half-a-record", "bytes"],
)  # fmt: skip
def test_unrelated_output_file_is_left_untouched(tmp_path, text):
    path = tmp_path / "out.jsonl"
    path.write_bytes(text)
    with pytest.raises(InvalidRequest, match=r"out\.jsonl, line 1: not a batch answer"):
        Records(path, __file__)
    assert path.read_bytes() == text


def test_invalid_paths_are_rejected_before_the_model_opens(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr("verbatim.cli.placing.open_llm", never)
    source, target = write(tmp_path / "in.jsonl", some(1)), tmp_path / "out.jsonl"
    os.mkfifo(tmp_path / "pipe")

    def refused(*args):
        done = CliRunner().invoke(app, ["batch", *map(str, args)])
        assert done.exit_code in (1, 2)
        return done.stderr

    assert "can't read" in refused(tmp_path / "none", target)
    assert not target.exists()
    assert "must be a regular file" in refused(tmp_path / "pipe", target)
    assert "must be a regular file" in refused(source, tmp_path / "pipe")
    assert "must be a regular file" in refused(source, "-")
    assert "can't write to" in refused(source, tmp_path)
    assert f"can't write to {'x' * 300}: File name too long" in refused(source, "x" * 300)
    assert "can't be written to the request file" in refused(source, source)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert "batch needs prometheus_client: pip install '.[serve]'" in refused(source, target)


def test_overlong_lines_are_read_as_none(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"ab\n" + b"x" * 5000 + b"\ncd\n" + b"y" * 99)
    with open(path, "rb") as file:
        assert list(lines_of(file, 10)) == [
            (b"ab\n", 3), (None, 5001), (b"cd\n", 3), (None, 99)
        ]  # fmt: skip
    with open(path, "rb") as file:
        assert [length for _, length in lines_of(file, 4096)] == [3, 5001, 3, 99]


def test_tensor_parallel_engine_is_rejected(llm, monkeypatch, tmp_path):
    monkeypatch.setattr(llm.engine, "collective", object())
    write(tmp_path / "in.jsonl", some(1))
    with records_in(tmp_path) as records, pytest.raises(VerbatimError, match="rank"):
        BatchRun(llm, records)


def test_metrics_include_drafted_tokens():
    with LLM(draft="ngram", num_draft_tokens=3) as llm:
        llm.generate([[5, 6, 7] * 6], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        stats = llm.stats()
        drafted, text = stats["draft"]["drafted"], ServerMetrics().text(stats).decode()
        assert drafted > 0 and f"verbatim_drafted_tokens_total {float(drafted)}" in text


def mixed(count):
    """Input lines, some of them rejected, repeated or not JSON."""
    lines = some(count, ignore_eos=True)
    for i in range(0, count, 7):
        lines[i]["body"]["temperature"] = -1
    texts = [json.dumps(entry) for entry in lines]
    for i in range(3, count, 10):
        texts.insert(i, texts[i - 1] if i % 20 == 3 else f"no JSON {i}")
    return "".join(text + "\n" for text in texts)


def answers_of(records):
    """Count the records, without the fields that differ between two runs."""
    found = []
    for record in records:
        response, error = record["response"], record["error"]
        if response is not None:
            body = response["body"]
            response = response["status_code"], body.get("choices"), body.get("error")
        found.append(json.dumps([record["custom_id"], response, error], sort_keys=True))
    return Counter(found)


@pytest.mark.parametrize("seed", [0, 1])
def test_interrupted_run_answers_each_line_once(command, disturbed, tmp_path, seed):
    (tmp_path / "in.jsonl").write_text(mixed(40))
    out = tmp_path / "out.jsonl"
    assert command().exit_code == 1  # some lines are rejected
    expected, draw = answers_of(read(out)), random.Random(seed)
    assert set(expected.values()) == {1}
    out.unlink()
    for _ in range(3):
        for how in draw.sample(["interrupted", "full", "killed"], 3):
            disturbed(how, draw.randrange(1, 2500))
            if how == "killed":  # possibly in the middle of a line
                os.truncate(out, max(0, out.stat().st_size - draw.randrange(3000)))
    assert command().exit_code == 1
    assert answers_of(read(out)) == expected


@pytest.mark.slow
def test_killed_process_answers_each_line_once(tmp_path):
    source, out, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    source.write_text(mixed(1500))
    args = ["batch", str(source)]
    done = subprocess.run([*VERBATIM, *args, str(whole)], stderr=subprocess.DEVNULL)
    assert done.returncode == 1
    expected = answers_of(read(whole))
    assert set(expected.values()) == {1}
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)  # pytest shows it where the test fails
    draw, step, ends = random.Random(seed), whole.stat().st_size // 10, Counter()
    out.touch()
    for _ in range(8):
        how = draw.choice(["kill", "interrupt", "disk"])
        kept = out.stat().st_size
        target = kept + draw.randrange(2 * step)

        def full(target=target):
            resource.setrlimit(resource.RLIMIT_FSIZE, (target, resource.RLIM_INFINITY))

        line = [sys.executable, "-P", "-c", FROM_THE_DOT, *args, str(out), "--in-flight", "4"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with started(line, preexec_fn=full if how == "disk" else None, **pipes) as run:
            assert run.stdout.read(1) == b"."
            early = draw.random() < 0.2  # during startup
            deadline = time.monotonic() + (draw.random() * 3 if early else 60)
            while time.monotonic() < deadline and run.poll() is None:
                if how != "disk" and out.stat().st_size > target:
                    break
                time.sleep(0.001)
            if how != "disk" or run.poll() is None:
                run.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
            stderr = run.communicate()[1].decode()
        ends[how, run.returncode] += 1
        assert run.returncode in (1, 130, -signal.SIGKILL), stderr
        assert "Traceback" not in stderr
        if run.returncode != -signal.SIGKILL:  # a "disk" run that did not fill the disk is killed
            assert out.read_bytes()[-1:] in (b"", b"\n")
    print(ends)
    done = subprocess.run([*VERBATIM, *args, str(out)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "from earlier runs)" in done.stderr
    assert answers_of(read(out)) == expected
