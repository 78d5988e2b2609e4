"""`verbatim score`, and shell completion."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from verbatim import LLM
from verbatim.cli.commands import app

TEXT = "Once upon a time there was a fox."
IDS = [5, 17, 9]


@pytest.fixture
def run(monkeypatch):
    # Without kernels the commands print an additional line.
    monkeypatch.setattr("verbatim.kernels.missing", lambda: False)

    def run(*args, input=b""):
        return CliRunner().invoke(app, ["score", *args], input=input)

    return run


@pytest.fixture(scope="module")
def expected():
    with LLM() as llm:
        ids = llm.tokenizer.encode(TEXT)
        return llm.score([ids, IDS]), ids


def test_json_logprobs_are_bit_identical_to_llm_score(run, expected, tmp_path):
    (of_text, of_ids), ids = expected
    file = tmp_path / "text.txt"
    file.write_text(TEXT + "\n")
    done = run(TEXT, "--file", str(file), "--ids", "5 17 9", "--json")
    assert done.exit_code == 0
    from_text, from_file, from_ids = map(json.loads, done.stdout.splitlines())
    assert from_text["logprobs"] == from_file["logprobs"] == of_text
    assert from_text["ids"] == ids
    assert "".join(from_text["tokens"]) == TEXT
    assert from_ids["logprobs"] == of_ids
    assert from_ids["text"] is None
    known = of_text[1:]
    assert from_text["num_scored"] == len(known)
    assert from_text["perplexity"] == math.exp(-math.fsum(known) / len(known))


def test_default_output_is_a_token_table_and_summary(run, expected):
    (logprobs, _), ids = expected
    done = run(input=TEXT.encode() + b"\n")
    head, *rows, last = done.stdout.splitlines()
    assert head.split() == ["at", "id", "log-prob", "prob", "token"]
    assert [int(row.split()[1]) for row in rows] == ids
    assert rows[0].split()[2:4] == ["-", "-"]
    assert [row.split()[2] for row in rows[1:]] == [f"{p:.4f}" for p in logprobs[1:]]
    mean = math.fsum(logprobs[1:]) / len(logprobs[1:])
    assert last.startswith(f"{len(ids)} tokens, log-prob ")
    assert last.endswith(f", perplexity {math.exp(-mean):.4f}")
    done = run(TEXT, "--ids", "5", "--summary")
    assert done.stdout.splitlines() == [
        f"1: {last}",
        "2: 1 token; the first token has no log-prob, so there is no perplexity",
    ]


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        pytest.param(["--json", "--summary", "a"], 2, "use only one of them", id="two-forms"),
        pytest.param(["--ids", "5 x"], 2, "must be integers", id="no-ids"),
        pytest.param(
            ["--file", "-", "--file", "-"], 2, "stdin can only be read once", id="stdin-twice"
        ),
        pytest.param(["--file", "/nowhere"], 1, "can't read /nowhere", id="no-file"),
        pytest.param([""], 1, "the prompt is empty", id="empty"),
        pytest.param(["--ids", "5 99999"], 1, "99999", id="no-such-id"),
    ],
)
def test_usage_and_input_errors_are_printed_in_one_line(run, args, status, said):
    done = run(*args)
    assert done.exit_code == status
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_shell_completion_does_not_import_torch():
    script = """
import sys
from verbatim.cli import main
import os
leave = os._exit
os._exit = lambda status: (print("torch" in sys.modules, flush=True), leave(status))
main()
"""

    def complete(*words):
        typed = {"COMP_WORDS": " ".join(("verbatim", *words)), "COMP_CWORD": str(len(words))}
        env = os.environ | typed | {"_VERBATIM_COMPLETE": "complete_bash"}
        command, pipes = [sys.executable, "-c", script], dict(capture_output=True, text=True)
        done = subprocess.run(command, env=env, check=True, **pipes)
        *found, torch_imported = done.stdout.split()
        assert torch_imported == "False"
        return found

    assert complete("ver") == ["verify"]
    assert complete("batch", "--in-f") == ["--in-flight"]
