"""`verbatim plan`, and the offloading options of the other commands."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from support import toy_tokenizers
from support.scripted_llm import ScriptedLLM
from support.scripted_llm import run as run_scripted
from support.toys import make_toy
from verbatim import LLM, Offload, SamplingParams
from verbatim.cli.commands import app
from verbatim.cli.placing import OFFLOAD

ROOMY = ("--policy", "none", "--max-length", "128")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy")
    tokenizer = toy_tokenizers.byte_level().hf
    make_toy("qwen3", vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def run(monkeypatch):
    # Without kernels the commands print an additional line, but the tests count the other lines.
    monkeypatch.setattr("verbatim.kernels.missing", lambda: False)
    return lambda *args: CliRunner().invoke(app, list(args))


def test_plan_prints_prediction_and_reasons(run, folder):
    done = run("plan", folder, "--gpu", "1MB", "--workload", "20,10", *ROOMY)
    assert done.exit_code == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    for name in ("weights", "K and V", "memory", "  ring", "  limited by", "  new tokens/s"):
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert " of 1 MB" in done.stdout
    assert any(line.startswith("Of ") and "read in each step" in line for line in lines)


def test_plan_json_has_plan_prediction_and_machine(run, folder):
    done = run("plan", folder, "--gpu", "1MB", "--cpu", "0", "--json", *ROOMY)
    found = json.loads(done.stdout)
    assert set(found) == {"plan", "prediction", "machine"}
    assert found["plan"]["memory_bytes"] <= found["plan"]["budget"] == 1_000_000
    assert sum(found["plan"]["weights"]) == pytest.approx(100, abs=0.2)
    assert found["prediction"]["tokens_per_s"] > 0
    assert found["machine"]["read_rate"] == 1.5e9  # the default, as nothing was measured


def test_plan_matches_that_of_opened_model(run, folder):
    args = ("--gpu", "1MB", "--weights", "10,20,70", "--batch-size", "3", "--max-sequences", "12")
    done = run("plan", folder, "--json", "--kv-dtype", "int8", *args, *ROOMY)
    placement = Offload(gpu="1MB", weights=(10, 20, 70), batch_size=3, policy=None)
    with LLM(folder, max_sequences=12, kv_dtype="int8", max_length=128, placement=placement) as llm:
        info = llm.info()
    planned = json.loads(done.stdout)
    assert planned["plan"] == json.loads(json.dumps(info["plan"]))
    assert planned["prediction"] == json.loads(json.dumps(info["prediction"]))


def test_plan_reads_no_weights(run, folder, monkeypatch):
    def read(*_):
        raise AssertionError

    monkeypatch.setattr("verbatim.weights.files.DirectFile.read", read)
    assert run("plan", folder, "--gpu", "1MB", *ROOMY).exit_code == 0


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["--gpu", "100KB"], 1, "placement=Offload: at least "),
        (["--gpu", "a lot"], 1, "gpu='a lot': must be bytes"),
        (["--gpu", "²"], 1, "gpu='²': must be bytes"),
        (["--kv-memory", "9" * 400], 1, f"kv_memory='{'9' * 400}' is 9223372036854775808 bytes"),
        (["--gpu", "1MB", "--weights", "50,60,0"], 1, "weights=(50.0, 60.0, 0.0): must be"),
        (["--gpu", "1MB", "--weights", "half"], 2, "--weights 'half': must be percents"),
        (["--gpu", "1MB", "--kv", "1;2"], 2, "--kv '1;2': must be percents"),
        (["--workload", "512"], 1, "workload=(512,): must be (prompt tokens, new tokens)"),
        (["--workload", "a,b"], 2, "--workload 'a,b': must be prompt tokens and new tokens"),
        (["--policy", "guess"], 1, "policy='guess': must be 'auto' or None"),
        (["--batch-size", "0"], 1, "batch_size=0: must be an integer, 1 to 2147483647"),
        (["--max-length", "100000"], 1, "max_length=100000: the model's limit is 256"),
        (["--gpu", "1MB", "--kv-memory", "900KB", "--kv", "100,0,0", "--policy", "none"], 1,
         "placement=Offload: with kv=(100.0, 0.0, 0.0), kv_memory=900000, at least "),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected_in_one_line(args, status, says, run, folder):
    done = run("plan", folder, *args)
    assert done.exit_code == status
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"verbatim: {says}")


def test_missing_folder_is_rejected(run):
    done = run("plan", "/nowhere/at/all", "--gpu", "1GB")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("verbatim: no model at '/nowhere/at/all'")


def test_offloading_options_reach_engine(tmp_path):
    class Placed(ScriptedLLM):
        def info(self):
            return {"plan_summary": "offload: so it is"}

        def stats(self):
            return {"offload": {"tokens_per_s": {"predicted": 4.0, "actual": 2.0}}}

    args = (
        f"--gpu 1GB --cpu 0 --disk {tmp_path} --disk-limit 5MB --weights 20,50,30 --kv 0,0,100 "
        "--activations 100,0,0 --batch-size 4 --micro-batches 2 --no-overlap --policy none "
        f"--workload 7,8 --trace {tmp_path}/t.json --stats"
    ).split()
    done = run_scripted("generate", "Hello", *args, engine=Placed)
    assert done.exit_code == 0
    assert ScriptedLLM.last.settings["placement"] == Offload(
        gpu="1GB", cpu=0, disk=tmp_path, disk_limit="5MB", weights=(20, 50, 30), kv=(0, 0, 100),
        activations=(100, 0, 0), batch_size=4, micro_batches=2, overlap=False, policy=None,
        workload=(7, 8), trace=tmp_path / "t.json",
    )  # fmt: skip
    notes = done.stderr.splitlines()
    assert notes[0] == "offload: so it is"
    assert notes[-1].split() == ["tokens/s", "4", "2", "0.50"]
    given = {option.name for option in OFFLOAD} - {"no_overlap", "stats"} | {"overlap"}
    assert given <= set(Offload.__slots__)  # options have the names of the Python arguments


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_stats_without_offloading_is_usage_error(command):
    done = run_scripted(command, *(["Hello"] if command == "generate" else []), "--stats")
    assert done.exit_code == 2
    assert done.stderr.startswith("verbatim: --stats needs an option of offloading")


def test_offloaded_model_generates_same_text_as_resident(run, folder):
    with LLM(folder) as llm:
        params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
        (expected,) = llm.generate("the quick", params)
    args = ("--seed", "3", "--max-tokens", "12", "--ignore-eos", "--model", folder)
    done = run("generate", "the quick", *args, "--gpu", "1MB", "--stats", *ROOMY)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.rstrip("\n") == expected.outputs[0].text.rstrip("\n")
    notes = done.stderr.splitlines()
    assert notes[0].startswith("offload: weights ")
    assert any(line.startswith("decode step ") for line in notes)
    assert any(line.startswith("tokens/s ") for line in notes)
