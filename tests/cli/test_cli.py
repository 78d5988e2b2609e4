"""`verbatim generate`, `chat`, `info` and the help on a scripted engine: output and exit status."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import subprocess
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import verbatim
from support.scripted_llm import ScriptedLLM, interrupted_after, run
from verbatim import kernels
from verbatim._version import __version__
from verbatim.cli.commands import COMMANDS
from verbatim.cli.generate import generate
from verbatim.cli.options import ADAPTERS, GENERATE_ONLY, MODEL, SAMPLING, helps, prepare
from verbatim.cli.placing import CLUSTER, OFFLOAD, PLACING
from verbatim.cli.terminal import exit_status
from verbatim.common.plain import to_json
from verbatim.core import Completion, Metrics, Result
from verbatim.errors import StageFailed
from verbatim.params import SamplingParams
from verbatim.serve.settings import ServeSettings

# Fields that have no command-line form, or no effect on a single request.
LEFT_ALONE = {
    "logits_processors",  # Python functions
    "hidden_states",  # arrays that are too large for JSON
    "replay_routing",  # an array recorded in Python
    "replay_indices",
    "priority",  # no other request is waiting
    "cache_salt",  # no other request shares a prefix
    "adapter",  # set by the option that loads it
    "draft",  # drafting is an option of the engine
}


def test_text_goes_to_stdout_and_counts_to_stderr():
    done = run("generate", "Hello", "--seed", "11")
    assert done.exit_code == 0
    assert done.stdout == "Once there was a 🦊.\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("2 prompt tokens, 4 new tokens in ")
    assert last.endswith(" tokens/s), seed 11, finish: stop")
    assert ScriptedLLM.last.closed


def test_adapter_is_loaded_and_named_in_request():
    assert run("generate", "Hello", "--adapter", "law=some/folder").exit_code == 0
    assert ScriptedLLM.last.settings["adapters"] == {"law": "some/folder"}
    assert ScriptedLLM.last.params[0].adapter == "law"
    assert "must be NAME=FOLDER" in run("generate", "Hello", "--adapter", "law").stderr


OPTIONS = {option.name: option for option in (*SAMPLING, *GENERATE_ONLY)}
# Command-line text of an option, and its value.
BY_TYPE = {int: ("2", 2), float: ("0.5", 0.5), bool: (None, True), str: ("@?x", "@?x"),
           list[int]: ("7", [7]), list[str]: ("x", ["x"])}  # fmt: skip
TYPED = {"logit_bias": ("5=-1.5", {5: -1.5}), "early_stopping": ("NEVER", "never"),
         "json_schema": ("true", True), "grammar": ("x: y", "x: y")}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_sampling_option_reaches_request(name):
    option = OPTIONS[name]
    text, value = TYPED.get(name) or BY_TYPE[option.type]
    flag = option.flags.rpartition("/")[2]  # the flag that changes the default
    args = [flag] if text is None else [flag, text]
    fields = {name: value and option.default is not True}
    if text is not None:
        fields[name] = value
    if name in ("length_penalty", "early_stopping"):
        args, fields = [*args, "--num-beams", "2"], fields | {"num_beams": 2}
    args = ["--temperature", "1", "--top-k", "0", *args]
    for command in ["generate"] + ["chat"] * (option in SAMPLING):
        with_json = ["Hello", "--json"] if command == "generate" else []
        done = run(command, *with_json, *args, input=b"Hello\n")
        assert done.exit_code == 0, done.stderr
        params = ScriptedLLM.last.params[0]
        assert params == SamplingParams(**{"max_tokens": 256, "seed": params.seed} | fields)


def test_every_sampling_field_has_an_option_or_is_excluded():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - OPTIONS.keys() == LEFT_ALONE


def test_options_not_given_keep_python_defaults_and_256_tokens():
    run("generate", "Hello")
    (params,) = ScriptedLLM.last.params
    assert params == SamplingParams(max_tokens=256, seed=params.seed)
    assert ScriptedLLM.last.model is None
    assert ScriptedLLM.last.settings == {}


def test_seed_is_drawn_and_reported_if_not_given():
    def seed(*args):
        done = run("generate", "Hello", *args)
        (params,) = ScriptedLLM.last.params
        assert f", seed {params.seed}, finish: stop\n" in done.stderr
        return params.seed

    assert seed("--seed", "5") == 5
    first, second = seed(), seed()
    assert first != second
    assert max(first, second) < 2**53


SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}'


def test_schemas_and_grammars_are_read_from_files(tmp_path):
    schema, grammar = tmp_path / "name.json", tmp_path / "answer.lark"
    schema.write_text(SCHEMA + "\n")
    grammar.write_text('start: "🦊"\n', encoding="utf-8")
    run("generate", "Hello", "--json-schema", f"@{schema}")
    assert ScriptedLLM.last.params[0].json_schema == SCHEMA
    run("generate", "Hello", "--grammar", f"@{grammar}")
    assert ScriptedLLM.last.params[0].grammar == 'start: "🦊"'


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False)])
def test_early_stopping_may_be_a_bool(text, value):
    run("generate", "Hello", "--num-beams", "2", "--early-stopping", text)
    assert ScriptedLLM.last.params[0].early_stopping is value


def test_model_options_reach_engine():
    args = "--model some/folder --dtype float32 --num-threads 2 --kv-memory 40% --max-length 64"
    run("generate", "Hello", *args.split(), "--trust-remote-code", "--block-size", "8")
    assert ScriptedLLM.last.model == "some/folder"
    assert ScriptedLLM.last.settings == {
        "dtype": "float32", "num_threads": 2, "kv_memory": "40%", "max_length": 64,
        "trust_remote_code": True, "block_size": 8,
    }  # fmt: skip


def test_prompt_comes_from_file_pipe_or_ids(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes("Es war\neinmal ü\r\n".encode())
    piped = path.read_bytes()
    for args, input in (("--file", str(path)), b""), (("--file", "-"), piped), ((), piped):
        assert run("generate", *args, input=input).exit_code == 0
        assert ScriptedLLM.last.asked == ["Es war\neinmal ü"]
    run("generate", "--ids", "5 17, 9", input=b"not read")
    assert ScriptedLLM.last.asked == [[5, 17, 9]]


def test_json_is_one_object_with_result_fields():
    done = run("generate", "Hello", "--json", "--logprobs", "1")
    (line,) = done.stdout.splitlines()
    result = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(result) == [field.name for field in dataclasses.fields(Result)]
    (output,) = result["outputs"]
    assert list(output) == [field.name for field in dataclasses.fields(Completion)]
    assert (output["text"], output["finish_reason"]) == ("Once there was a 🦊.", "stop")
    assert (output["stop_reason"], output["top_logprobs"]) == ([5, 6], [[[3, None]]])


def test_json_has_routing_and_beam_scores():
    def output(*args):
        return json.loads(run("generate", "Hello", "--json", *args).stdout)["outputs"][0]

    routed = output("--record-routing")
    assert routed["routing"] == [[[1, 1]], [[1, 1]]]
    assert (routed["score"], routed["hidden_states"]) == (None, None)
    beam = output("--num-beams", "2")
    assert (beam["score"], beam["sampled_logprobs"], beam["routing"]) == (-0.5, None, None)


def test_tensors_in_json_are_nested_lists():
    states = torch.tensor([[0.5, float("inf")], [1.0, -2.0]], dtype=torch.bfloat16)
    result = Result("r", None, [1], None, None, [], 0, Metrics(), 0, prompt_hidden_states=states)
    assert json.loads(to_json(result))["prompt_hidden_states"] == [[0.5, None], [1.0, -2.0]]


def test_several_completions_are_printed_separately():
    done = run("generate", "Hello", "--n", "2", "--max-tokens", "2")
    assert done.stdout == "--- 1 of 2 ---\nOnce there \n--- 2 of 2 ---\nOnce there \n"
    assert "4 new tokens" in done.stderr
    assert done.stderr.endswith("finish: length, length\n")


def test_fewer_beams_than_requested_are_numbered_correctly():
    class TwoFound(ScriptedLLM):
        num_found = 2

    args = ("generate", "Hello", "--num-beams", "4", "--max-tokens", "1")
    assert run(*args, engine=TwoFound).stdout == "Once \n"
    done = run(*args, "--n", "3", engine=TwoFound)
    assert done.stdout == "--- 1 of 2 ---\nOnce \n--- 2 of 2 ---\nOnce \n"
    assert done.stderr.endswith("finish: length, length\n")


def test_ctrl_c_before_the_first_token_takes_effect_at_once():
    class Prefill(ScriptedLLM):
        def _deltas(self, prompt, params):
            if len(self.asked) == 1:
                signal.raise_signal(signal.SIGINT)
                raise AssertionError("the prefill went on")
            yield from super()._deltas(prompt, params)

    for args, engine in ((), Prefill), (("--num-beams", "4"), interrupted_after(2)):
        done = run("generate", "Hello", *args, engine=engine)
        assert (done.exit_code, done.stdout) == (130, "\n")
        assert done.stderr.startswith("0 new tokens") and done.stderr.endswith(", interrupted\n")
        assert ScriptedLLM.last.closed
    chat = run("chat", input=b"Hi\nMore\n", engine=Prefill)
    assert (chat.exit_code, chat.stdout) == (0, "\nOnce there was a 🦊.\n")


def test_timeout_is_reported():
    done = run("generate", "Hello", "--timeout-s", "2.5")
    assert (done.exit_code, done.stdout) == (0, "Once there \n")
    assert done.stderr.endswith("finish: timeout\n")
    done = run("chat", "--timeout-s", "2", "--seed", "5", input=b"Hi\n")
    assert (done.exit_code, done.stdout) == (0, "Once there \n")
    assert done.stderr.endswith("(out of time after 2 tokens, seed 5)\n")


def test_ctrl_c_prints_partial_text_and_aborts_request():
    before = signal.getsignal(signal.SIGINT)
    done = run("generate", "Hello", engine=interrupted_after(2))
    assert (done.exit_code, done.stdout) == (130, "Once there \n")
    assert "2 new tokens" in done.stderr
    assert done.stderr.endswith(f", seed {ScriptedLLM.last.params[0].seed}, interrupted\n")
    assert ScriptedLLM.last.aborted
    assert ScriptedLLM.last.closed
    assert signal.getsignal(signal.SIGINT) is before
    several = run("generate", "Hello", "--n", "2", engine=interrupted_after(2))
    assert (several.exit_code, several.stdout.count("Once ")) == (130, 2)
    assert run("generate", "Hello", "--json", engine=interrupted_after(1)).stdout == ""


def test_ignored_sigint_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # like in a shell's background job
    try:
        done = run("generate", "Hello", engine=interrupted_after(2))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.exit_code, done.stdout) == (0, "Once there was a 🦊.\n")


@pytest.mark.parametrize("error", [StageFailed("stage 1 was lost"), KeyboardInterrupt])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_error_in_mid_text_is_printed_on_a_new_line(command, error):
    class Failing(ScriptedLLM):
        def _deltas(self, *args):
            for number, delta in enumerate(super()._deltas(*args)):
                if number == 2:
                    raise error
                yield delta

    args = ["Hello"] if command == "generate" else []
    done = run(command, *args, input=b"Hi\n", engine=Failing)
    assert done.stdout == "Once there \n"
    assert "verbatim: " in done.stderr


def test_closed_pipe_ends_quietly_with_status_141(monkeypatch):
    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setitem(vars(verbatim), "LLM", ScriptedLLM)
    monkeypatch.setattr("verbatim.kernels.missing", lambda: False)
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    assert exit_status(partial(generate, ["Hello"], **_nothing_given())) == 141
    assert stderr.getvalue() == ""
    assert ScriptedLLM.last.closed


def _nothing_given():
    options = (*SAMPLING, *GENERATE_ONLY, *MODEL, ADAPTERS, *OFFLOAD, *CLUSTER)
    return {option.name: None for option in options}


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["x", "--temperature", "-1"], 1, "temperature=-1.0: must be a finite number, 0 or more"),
        (["x", "--top-p", "1.5"], 1, "top_p=1.5: must be a finite number above 0 and at most 1"),
        (["x", "--seed", str(2**64)], 1, "seed=18446744073709551616"),
        ([""], 1, "the prompt is empty"),
        (["x" * 1001], 1, "the prompt has 1001 tokens; the limit is 1000"),
        (["--ids", ""], 1, "the prompt is empty"),
        (["--ids", "5 101"], 1, "token id 101 is outside the vocabulary of 100"),
        (["x", "--model", "missing"], 1, "no folder 'missing': and no such model on the hub"),
        (["--file", "/nowhere/at/all"], 1, "can't read /nowhere/at/all: No such file"),
        (["--file", "/"], 1, "can't read /: Is a directory"),
        (["x", "--json-schema", "@missing.json"], 1, "can't read @missing.json: No such file"),
        (["x", "--json-schema", "@"], 1, "can't read @: No such file"),
        (["x", "--grammar", "@/nowhere/at/all"], 1, "can't read @/nowhere/at/all: No such file"),
        (["x", "--json-schema", "{a"], 1, "json_schema is not a JSON schema: Expecting property"),
        (["x", "--regex", "a", "--choice", "a"], 1, "regex and choice: at most one"),
        (["x", "--timeout-s", "0"], 1, "timeout_s=0.0: must be a finite number of seconds above 0"),
        (["x", "--num-beams", "2", "--top-k", "5"], 1, "top_k=5 with num_beams=2: beam search"),
        (["x", "--early-stopping", "maybe"], 2, "--early-stopping 'maybe': must be true, false or"),
        (["x", "--record-routing"], 2, "--record-routing requires --json"),
        (["--ids", "5 x"], 2, "--ids '5 x': must be integers"),
        (["x", "--ids", "5"], 2, "give one prompt, not PROMPT and --ids"),
        (["x", "--logprobs", "2"], 2, "--logprobs requires --json"),
        (["x", "--logit-bias", "5:1"], 2, "--logit-bias '5:1': must be ID=VALUE"),
    ],
)
def test_invalid_input_is_rejected_in_one_line(args, status, says):
    done = run("generate", *args)
    assert done.exit_code == status
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"verbatim: {says}")


def test_binary_stdin_is_rejected_in_one_line():
    done = run("generate", input=b"good\xff\xfe\x00bad")
    assert done.exit_code == 1
    assert done.stderr == "verbatim: stdin is not UTF-8 text: byte 0xff at offset 4\n"


def test_missing_prompt_at_terminal_is_usage_error(monkeypatch):
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("verbatim.cli.generate.sys", SimpleNamespace(stdin=terminal))
    done = run("generate")
    assert done.exit_code == 2
    assert done.stderr.startswith("verbatim: no prompt: ")


@pytest.mark.parametrize(
    "line",
    ["generate x --bogus", "generate x --n two", "train", "chat --n 2", "chat --num-beams 2"],
)
def test_unknown_commands_and_options_are_usage_errors(line):
    done = run(*line.split())
    assert done.exit_code == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_missing_kernels_are_reported(monkeypatch):
    monkeypatch.setattr(kernels, "requested", lambda: None)
    assert "without compiled kernels" in run("generate", "Hello", kernels=()).stderr
    assert "without compiled kernels" not in run("generate", "Hello").stderr
    monkeypatch.setattr(kernels, "requested", lambda: "none")
    assert "without compiled kernels" not in run("generate", "Hello").stderr
    monkeypatch.setattr(kernels, "requested", lambda: "sse")
    stderr = run("generate", "Hello").stderr
    assert stderr.startswith("verbatim: VERBATIM_KERNELS='sse': this build")


@pytest.mark.parametrize(
    "line", [("generate", "folder", "Hello"), ("generate", "Hello", "--model", "folder"),
             ("info", "folder", "--json"), ("info", "--model", "folder", "--json")],
    ids=" ".join,
)  # fmt: skip
def test_model_is_given_as_argument_or_option(line):
    assert run(*line).exit_code == 0
    assert ScriptedLLM.last.model == "folder"


@pytest.mark.parametrize("command", ["serve", "bench", "verify", "plan", "info", "chat"])
def test_model_given_twice_is_usage_error(command):
    done = run(command, "one", "--model", "other")
    assert done.exit_code == 2
    assert "give the model once, not 'one' and --model 'other'" in done.stderr
    assert "one argument too many" in run("generate", "a", "b", "c").stderr


def test_missing_kernels_warning_is_suppressed_in_commands():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        prepare()
        warnings.warn(kernels.MISSING, RuntimeWarning, stacklevel=1)
        warnings.warn("another", RuntimeWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another"]


@pytest.mark.parametrize("settings", [SamplingParams, ServeSettings])
def test_every_field_of_documented_class_has_help_text(settings):
    texts = helps(settings)
    assert texts.keys() == {field.name for field in dataclasses.fields(settings)}
    assert all(text[0] == text[0].upper() and text.endswith((".", ")")) for text in texts.values())


def test_help_shows_defaults_and_negated_flags():
    shown = run("serve", "--help").stdout
    for text in ("512", "--no-docs", "raw_logprobs.", "half of"):
        assert text in shown


# ---- chat, info and the help


def test_chat_keeps_history_and_uses_model_defaults():
    done = run("chat", "--top-p", "0.9", "--system", "Be brief.", input=b"Hi\n\nMore\n")
    assert done.exit_code == 0
    assert done.stdout == "Once there was a 🦊.\n" * 2
    banner = done.stderr.splitlines()[0]
    for part in ("temperature=0.7", "top_k=20", "top_p=0.9", "max_tokens=256"):
        assert part in banner
    engine = ScriptedLLM.last
    fields = dict(temperature=0.7, top_k=20, top_p=0.9, max_tokens=256)
    assert engine.params[0] == SamplingParams(**fields, seed=engine.params[0].seed)
    roles = [(message["role"], message["content"]) for message in engine.asked[-1]]
    assert roles == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Once there was a 🦊."),
        ("user", "More"),
    ]  # fmt: skip
    assert engine.closed


def test_every_chat_turn_reports_its_seed():
    done = run("chat", input=b"Hi\nMore\n")
    seeds = [params.seed for params in ScriptedLLM.last.params]
    assert seeds[0] != seeds[1]
    lines = [line for line in done.stderr.splitlines() if "seed" in line]
    assert lines == [f"(seed {seed})" for seed in seeds]
    done = run("chat", "--seed", "5", input=b"Hi\nMore\n")
    assert done.stderr.splitlines()[-2:] == ["(seed 5)", "(seed 5)"]


def test_chat_banner_truncates_long_grammar():
    done = run("chat", "--grammar", 'start: "yes" | "no" ' + "| x" * 1000, input=b"Hi\n")
    banner = done.stderr.splitlines()[0]
    assert """grammar='start: "yes" |""" in banner
    assert len(banner) < 300


def test_chat_survives_too_long_prompt():
    done = run("chat", input=b"Hi\n" + b"x" * 1001 + b"\nMore\n")
    assert done.exit_code == 0
    assert "verbatim: the conversation has 2000 tokens; the limit is 1000" in done.stderr
    assert "/clear" in done.stderr
    assert [message["content"] for message in ScriptedLLM.last.asked[-1]][::2] == ["Hi", "More"]


def test_chat_keeps_partial_answer_after_ctrl_c():
    done = run("chat", input=b"Hi\nMore\n", engine=interrupted_after(2))
    assert done.exit_code == 0
    assert done.stdout == "Once there \nOnce there was a 🦊.\n"
    assert f"(interrupted, seed {ScriptedLLM.last.params[0].seed})" in done.stderr
    assert ScriptedLLM.last.asked[-1][1] == {"role": "assistant", "content": "Once there "}


def test_chat_slash_commands():
    done = run("chat", "--max-tokens", "1", input=b"Hi\n/clear\n/help\n/bogus\nMore\n/exit\nno\n")
    assert done.exit_code == 0
    assert [len(messages) for messages in ScriptedLLM.last.asked] == [1, 1]
    assert "unknown command /bogus" in done.stderr
    assert "(cut after 1 tokens, seed " in done.stderr


def test_chat_rejects_bad_options_and_binary_lines():
    done = run("chat", "--top-k", "-1")
    assert done.stderr == "verbatim: top_k=-1: must be an integer, 0 or more\n"
    done = run("chat", input=b"Hi\n\xff\n")
    assert done.exit_code == 1
    assert done.stderr.endswith("verbatim: stdin is not UTF-8 text: line 2\n")


def test_info_prints_aligned_fields_or_json():
    assert run("info").stdout.splitlines() == [
        "model         scripted",
        "weight bytes  1,500,000 (1.5 MB)",
        "probe",
        "  padding     2",
        "eos           1",
    ]
    assert json.loads(run("info", "--json").stdout) == ScriptedLLM().info()


def test_version_option():
    assert run("--version").stdout == f"verbatim {__version__}\n"


def test_python_m_verbatim_runs_the_command():
    command = [sys.executable, "-P", "-m", "verbatim"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"verbatim {__version__}\n"
    done = subprocess.run([*command, "genrate"], capture_output=True, text=True)
    assert done.returncode == 2 and "verbatim --help" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_command_list_matches_help_of_each_command(name):
    assert COMMANDS[name] in " ".join(run(name, "--help").stdout.split())


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
