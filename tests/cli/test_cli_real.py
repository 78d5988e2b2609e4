"""The commands on a real engine: a toy model in a folder, and the storyteller model of the package."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess

import pytest
import torch
from typer.testing import CliRunner

from support import toy_tokenizers
from support.programs import VERBATIM, started
from support.toys import make_toy
from verbatim import LLM, SamplingParams
from verbatim.cli.commands import app

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
MAX_LENGTH = 64
FEW = ("--max-tokens", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3 with random weights, a byte-level tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("toy")
    tokenizer = copy.deepcopy(toy_tokenizers.byte_level().hf)
    tokenizer.chat_template = TEMPLATE
    sizes = dict(vocab_size=len(tokenizer), max_position_embeddings=MAX_LENGTH)
    make_toy("qwen3", **sizes).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def run(folder, monkeypatch):
    # Without kernels the commands print an additional line, but the tests count the other lines.
    monkeypatch.setattr("verbatim.kernels.missing", lambda: False)

    def run(*args, input=b"", model=folder):
        return CliRunner().invoke(app, [*args, "--model", str(model)], input=input)

    return run


def test_generate_command_matches_llm_generate(run, folder):
    with LLM(str(folder)) as llm:
        params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
        (expected,) = llm.generate("the quick", params)
    done = run("generate", "the quick", "--seed", "3", "--max-tokens", "12", "--ignore-eos")
    assert done.exit_code == 0
    assert done.stdout.rstrip("\n") == expected.outputs[0].text.rstrip("\n")
    assert f"{len(expected.prompt_token_ids)} prompt tokens, 12 new tokens in " in done.stderr
    assert done.stderr.endswith("seed 3, finish: length\n")


@pytest.mark.parametrize("command", [["generate", *FEW], ["score"]], ids=["generate", "score"])
def test_json_is_utf8_in_any_locale(folder, command):
    line = [*command, "é", "--json", "--model", str(folder)]
    done = CliRunner(charset="latin-1").invoke(app, line)
    assert done.exit_code == 0
    assert "é" in json.loads(done.stdout_bytes.decode()).values()


def test_reported_seed_reproduces_the_tokens(run):
    def ids(*more):
        done = run("generate", "--ids", "5 17 9", "--max-tokens", "9", "--json", *more)
        result = json.loads(done.stdout)
        return result["outputs"][0]["token_ids"], result["outputs"][0]["seed"]

    first, seed = ids()
    assert ids("--seed", str(seed)) == (first, seed)
    assert ids()[1] != seed


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--ids", "5 99999"], "99999"),
        (["the quick brown fox " * 20], str(MAX_LENGTH)),
        (["x", "--dtype", "int7"], "int7"),
        (["x", "--allowed-token-ids", "99999"], "99999"),
        (["x", "--regex", "(", *FEW], "regex: "),
        (["x", "--json-schema", "false", *FEW], "no document validates"),
        (["x", "--json", "--record-routing"], "record_routing: "),
    ],
)
def test_engine_errors_are_printed_in_one_line(run, args, says):
    done = run("generate", *args)
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("verbatim: ")
    assert says in line


def test_kv_cache_allocation_failure_is_printed_in_one_line(run, monkeypatch):
    allocate = lambda *_, **__: torch.empty(2**50)
    monkeypatch.setattr("verbatim.placement.resident.open_store", allocate)
    done = run("generate", "x", "--kv-memory", "1MB")
    assert (done.exit_code, done.stdout) == (1, "")
    message = r"the KV cache of \d+ bytes can't be allocated: lower kv_memory or max_length"
    assert re.fullmatch(f"verbatim: {message}\n", done.stderr)


def test_model_loading_errors_are_printed_in_one_line(run, folder, tmp_path):
    truncated = shutil.copytree(folder, tmp_path / "truncated") / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-1000])
    strange = shutil.copytree(folder, tmp_path / "strange") / "config.json"
    config = json.loads(strange.read_text())
    strange.write_text(json.dumps(config | {"model_type": "odd", "architectures": ["OddLM"]}))
    broken = shutil.copytree(folder, tmp_path / "broken") / "config.json"
    broken.write_text("{not json")
    (tmp_path / "empty").mkdir()
    for name in ("truncated", "strange", "broken", "empty", "not-there"):
        done = run("generate", "x", model=tmp_path / name)
        assert (done.exit_code, done.stdout) == (1, ""), name
        (line,) = done.stderr.splitlines()
        assert line.startswith("verbatim: "), name
        assert name in line or "odd" in line.lower(), line


def test_info_command_matches_llm_info(run, folder):
    with LLM(str(folder)) as llm:
        expected = llm.info()
    shown = json.loads(run("info", "--json").stdout)
    assert shown == json.loads(json.dumps(expected, default=str))
    text = run("info").stdout
    assert "kv bytes per token" in text
    assert str(expected["architecture"]) in text


def _started(*args):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return started([*VERBATIM, "generate", "Once upon a time", *args], env=environment, **pipes)


def test_storyteller_generates_without_network():
    with _started("--max-tokens", "60", "--seed", "0") as process:
        stdout, stderr = process.communicate()
    assert len(stdout.split()) > 10
    assert stderr.splitlines()[-1].split(b" in ")[0].endswith(b"new tokens"), stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "status", "end"),
    [
        (lambda process: process.send_signal(signal.SIGINT), 130, rb".*interrupted\n"),
        (lambda process: process.stdout.close(), 141, b""),
    ],
    ids=["ctrl-c", "closed pipe"],
)
def test_ctrl_c_and_closed_pipe_end_a_run_quietly(act, status, end):
    returncode = 0
    while not returncode:  # retry if the run had ended before
        with _started("--max-tokens", "900", "--ignore-eos") as process:
            assert process.stdout.read(1)
            act(process)
            stderr = process.stderr.read()
            returncode = process.wait()
    assert returncode == status
    assert re.fullmatch(end, stderr, re.DOTALL), stderr


@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [
        pytest.param("> /dev/full", 1, "can't write to stdout: No space ", marks=pytest.mark.slow),
        (">&-", 1, "stdout is closed"),
        ("<&-", 2, "stdin is closed"),
    ],
)
def test_full_disk_and_closed_streams_print_one_line(redirection, status, message):
    prompt = "" if redirection == "<&-" else "hi"
    line = f'exec "$@" generate {prompt} --max-tokens 2 {redirection}'
    done = subprocess.run(["bash", "-c", line, "bash", *VERBATIM], capture_output=True, text=True)
    assert done.returncode == status
    (line,) = [x for x in done.stderr.splitlines() if "compiled kernels" not in x]
    assert line.startswith("verbatim: ") and message in line
