"""`verbatim chat`, `info` and the help, against a scripted engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.scripted_llm import ScriptedLLM, interrupted_after, run
from verbatim._version import __version__
from verbatim.cli.offload import PLACING
from verbatim.params import SamplingParams


def test_chat_keeps_the_conversation_and_uses_the_models_own_defaults():
    done = run("chat", "--top-p", "0.9", "--system", "Be brief.", input=b"Hi\n\nMore\n")
    assert done.exit_code == 0
    assert done.stdout == "Once there was a 🦊.\n" * 2
    banner = done.stderr.splitlines()[0]
    for part in ("temperature=0.7", "top_k=20", "top_p=0.9", "max_tokens=256"):
        assert part in banner
    engine = ScriptedLLM.last
    seed = engine.params[0].seed
    assert engine.params[0] == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, max_tokens=256, seed=seed
    )
    roles = [(message["role"], message["content"]) for message in engine.asked[-1]]
    assert roles == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Once there was a 🦊."),
        ("user", "More"),
    ]  # fmt: skip
    assert engine.closed


def test_every_turn_tells_its_seed():
    done = run("chat", input=b"Hi\nMore\n")
    seeds = [params.seed for params in ScriptedLLM.last.params]
    assert seeds[0] != seeds[1]
    assert [line for line in done.stderr.splitlines() if "seed" in line] == [
        f"(seed {seed})" for seed in seeds
    ]
    done = run("chat", "--seed", "5", input=b"Hi\nMore\n")
    assert done.stderr.splitlines()[-2:] == ["(seed 5)", "(seed 5)"]


def test_chat_says_when_the_time_is_over():
    done = run("chat", "--timeout-s", "2", "--seed", "5", input=b"Hi\n")
    assert (done.exit_code, done.stdout) == (0, "Once there \n")
    assert done.stderr.endswith("(out of time after 2 tokens, seed 5)\n")


def test_chat_shows_the_beginning_of_a_long_grammar():
    done = run("chat", "--grammar", 'start: "yes" | "no" ' + "| x" * 1000, input=b"Hi\n")
    banner = done.stderr.splitlines()[0]
    assert """grammar='start: "yes" |""" in banner
    assert len(banner) < 300


def test_chat_survives_a_prompt_that_is_too_long():
    done = run("chat", input=b"Hi\n" + b"x" * 1001 + b"\nMore\n")
    assert done.exit_code == 0
    assert "verbatim: the conversation has 2000 tokens; the limit is 1000" in done.stderr
    assert "/clear" in done.stderr
    assert [message["content"] for message in ScriptedLLM.last.asked[-1]][::2] == ["Hi", "More"]


def test_chat_keeps_the_partial_answer_after_ctrl_c():
    done = run("chat", input=b"Hi\nMore\n", engine=interrupted_after(2))
    assert done.exit_code == 0
    assert done.stdout == "Once there \nOnce there was a 🦊.\n"
    assert f"(interrupted, seed {ScriptedLLM.last.params[0].seed})" in done.stderr
    assert ScriptedLLM.last.asked[-1][1] == {"role": "assistant", "content": "Once there "}


def test_chat_commands():
    done = run("chat", "--max-tokens", "1", input=b"Hi\n/clear\n/help\n/bogus\nMore\n/exit\nno\n")
    assert done.exit_code == 0
    assert [len(messages) for messages in ScriptedLLM.last.asked] == [1, 1]
    assert "unknown command /bogus" in done.stderr
    assert "(cut after 1 tokens, seed " in done.stderr


def test_chat_refuses_bad_options_and_binary_lines():
    assert run("chat", "--top-k", "-1").stderr == "verbatim: top_k=-1: must be 0 or more\n"
    done = run("chat", input=b"Hi\n\xff\n")
    assert done.exit_code == 1
    assert done.stderr.endswith("verbatim: stdin is not UTF-8 text: line 2\n")


def test_info_prints_facts_aligned_or_as_json():
    assert run("info").stdout.splitlines() == [
        "model         scripted",
        "weight bytes  1,500,000 (1.5 MB)",
        "probe",
        "  padding     2",
        "eos           1",
    ]
    assert json.loads(run("info", "--json").stdout) == ScriptedLLM().info()


def test_version():
    assert run("--version").stdout == f"verbatim {__version__}\n"


@pytest.mark.parametrize(
    ("args", "names"),
    [(["--help"], ["generate"]), (["plan", "--help"], [option.flags for option in PLACING])],
)
def test_help_does_not_import_torch(args, names):
    code = (
        "import sys\n"
        "from verbatim.cli.commands import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print(heavy, file=sys.stderr)"
    )
    command = [sys.executable, "-P", "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in names)
    assert done.stderr.strip() == "set()"
