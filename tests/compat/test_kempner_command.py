"""`python -m verbatim.compat.kempnerforge`: same output as `scripts/generate.py` for the same arguments."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import verbatim
from support import kempner_reference, toy_tokenizers
from support.programs import started, state_of, until
from verbatim import LLM, SamplingParams
from verbatim.cli.terminal import WrongUsage
from verbatim.compat.kempnerforge import command
from verbatim.compat.kempnerforge.command import main, parse
from verbatim.errors import EngineClosed, InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODULE = "verbatim.compat.kempnerforge"
PROMPT = "the quick"
ROOT = Path(__file__).parents[2]


def save(folder: Path, module: torch.nn.Module) -> None:
    dcp.save({"model": module.state_dict()}, checkpoint_id=str(folder))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training run leaves: x.toml, ck/step_2, ck/latest; and a tokenizer."""
    path = tmp_path_factory.mktemp("run")
    tokenizer = toy_tokenizers.byte_level().hf
    tokenizer.save_pretrained(path / "tok")
    size = dict(vocab_size=len(tokenizer), max_seq_len=200)
    kempner_reference.write_toml(path / "x.toml", **size)
    save(path / "ck/step_2", kempner_reference.make(**size))
    (path / "ck/latest").symlink_to("step_2")
    # Models that always generate the same token: their last norm has only a bias.
    favourites = {"says_eos": tokenizer.eos_token_id, "says_bos": tokenizer.bos_token_id}
    for name, favourite in favourites.items():
        module = kempner_reference.make(norm_type="layernorm", **size)
        with torch.no_grad():
            module.norm.weight.zero_()
            module.norm.bias.fill_(1.0)
            module.output_head["proj"].weight.zero_()[favourite] = 1.0
        save(path / name, module)
    return path


class Done:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    def refusal(self) -> str:
        """Return the only line on stderr; with nothing on stdout, no checkpoint was loaded."""
        assert self.status == 1, (self.status, self.err)
        assert self.out == ""
        (line,) = [ln for ln in self.err.splitlines() if "kernels" not in ln]
        return line


@pytest.fixture
def run(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Any:
    monkeypatch.chdir(run_dir)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")

    def run(line: str) -> Done:
        status = main(shlex.split(line))
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run


ASK = '--data.tokenizer_path=tok --checkpoint.load_path=ck --prompt "the quick" --seed 3 --max_tokens 6'


def test_output_format_matches_generate_py(run: Any, run_dir: Path) -> None:
    done = run(f"x.toml {ASK}")
    assert done.status == 0
    with LLM(run_dir / "ck", config=run_dir / "x.toml", tokenizer=run_dir / "tok",
             dtype="bfloat16") as llm:  # fmt: skip
        params = SamplingParams(seed=3, max_tokens=6)
        (expected,) = llm.generate(PROMPT, params)
    output = expected.outputs[0]
    assert done.out == (
        "Loaded checkpoint: ck\nModel: 0M params on cpu (bfloat16)\n"
        f"\n--- Prompt ---\n{PROMPT}\n"
        f"\n--- Generated ({len(output.token_ids)} tokens) ---\n{output.text}\n\n"
    )
    assert done.err.splitlines()[-1] == "(seed 3)"


def test_flags_and_overrides_are_accepted_in_any_order_and_form(run: Any) -> None:
    parts = [["x.toml"], ["--prompt", PROMPT], ["--checkpoint.load_path", "ck/latest"]]
    parts += [["--data.tokenizer_path=tok"], ["--max_tokens=5", "--seed", "3"]]
    parsed = set()
    for order in itertools.permutations(parts):
        flags, overrides = parse(list(itertools.chain(*order)))
        parsed.add((str(sorted(vars(flags).items())), str(sorted(overrides.items()))))
    assert len(parsed) == 1
    orders = (parts, parts[::-1], parts[2:] + parts[:2])
    outs = {run(shlex.join(itertools.chain(*order))).out for order in orders}
    assert len(outs) == 1
    assert "--- Generated (5 tokens) ---" in outs.pop()


def test_float16_falls_back_to_float32_with_notice(run: Any) -> None:
    done = run(f"x.toml {ASK} --temperature 0 --dtype float16")
    assert done.out == run(f"x.toml {ASK} --temperature 0 --dtype float32").out
    assert done.err.splitlines()[-1].startswith("--dtype float16: computed in float32")


def test_length_limit_error_names_toml_key(run: Any) -> None:
    done = run(f"x.toml {ASK} --max_tokens 500 --model.max_seq_len 90")
    assert done.status == 1 and "is 90 (max_seq_len of [model])" in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_one_error_line(run: Any) -> None:
    assert "no GPU" in run(f"x.toml {ASK} --device cuda").refusal()


@pytest.mark.parametrize("path", ["ck", "ck/latest", "ck/step_2"])
def test_folder_latest_and_step_paths_load_same_checkpoint(run: Any, path: str) -> None:
    done = run(f"x.toml {ASK.replace('path=ck', 'path=' + path)}")
    assert done.out.replace(f": {path}\n", ": ck\n") == run(f"x.toml {ASK}").out


def test_special_tokens_are_counted_and_not_printed(run: Any) -> None:
    ask = f"x.toml --model.norm_type=layernorm --model.activation silu {ASK} --temperature=0"
    done = run(ask.replace("path=ck", "path=says_bos"))
    assert done.out.endswith("\n--- Generated (6 tokens) ---\n\n\n"), done.err
    done = run(ask.replace("path=ck", "path=says_eos"))
    assert done.out.endswith("\n--- Generated (1 tokens) ---\n\n\n"), done.err


def test_documented_command_lines_run(run: Any, run_dir: Path, monkeypatch: Any) -> None:
    # As documented, with the module's name and the paths changed; the config names the tokenizer.
    text = (run_dir / "x.toml").read_text()
    (run_dir / "7b.toml").write_text(text + "[data]\ntokenizer_path = 'tok'\n")
    path = run_dir / "ck/step_2"
    done = run(
        f'7b.toml --checkpoint.load_path {path} --prompt "The capital of France is" --max_tokens 64 '
        "--temperature 0.7 --top_p 0.9"
    )
    assert done.status == 0
    assert "--- Prompt ---\nThe capital of France is\n\n--- Generated (" in done.out
    monkeypatch.setattr("builtins.input", lambda _: (_ for _ in ()).throw(EOFError))
    done = run(f"7b.toml --checkpoint.load_path {path} --interactive")
    assert done.status == 0
    assert done.out.endswith("Exiting.\n")


def test_prompt_may_begin_with_dash(run: Any) -> None:
    done = run(f"x.toml {ASK} --prompt '--model.dim 5 -x'")
    assert "--- Prompt ---\n--model.dim 5 -x\n" in done.out


def test_top_p_0_is_greedy_and_top_k_above_vocabulary_size_is_off(run: Any) -> None:
    def suffix(options: str) -> str:
        done = run(f"x.toml {ASK} {options}")
        assert done.status == 0, done.err
        return str(done.out)

    assert suffix("--top_p 0") == suffix("--temperature 0")
    assert suffix("--top_k 5000") == suffix("--top_k 0")


def test_generated_seed_is_reported_when_none_is_given(run: Any) -> None:
    seed = run(f"x.toml {ASK.replace('--seed 3', '')}").err.splitlines()[-1]
    assert re.fullmatch(r"\(seed \d+\)", seed)


def test_greedy_run_reports_no_seed(run: Any) -> None:
    done = run(f"x.toml {ASK} --temperature 0")
    assert "--- Generated" in done.out and "(seed" not in done.err


# Overrides.


def test_override_values_are_parsed_by_field_type() -> None:
    _, overrides = parse(
        "x.toml --model.dim=64 --model.rope_theta 5e5 --model.qk_norm --model.tie_embeddings=false "
        "--model.n_kv_heads=None --model.activation gelu --checkpoint.load_path 5 --model.dim 32 "
        "--model.norm_eps -1".split()
    )
    assert overrides == {
        "model": {
            "dim": 32, "rope_theta": 5e5, "qk_norm": True, "tie_embeddings": False,
            "n_kv_heads": None, "activation": "gelu", "norm_eps": -1,
        },
        "checkpoint": {"load_path": "5"},
    }  # fmt: skip


def test_boolean_override_without_value_does_not_consume_config_path() -> None:
    for line in ("--model.qk_norm x.toml --seed 1", "--seed 1 --model.qk_norm x.toml"):
        flags, overrides = parse(line.split())
        assert (flags.config, overrides) == ("x.toml", {"model": {"qk_norm": True}})
    flags, overrides = parse("--model.moe_gradient_scale x.toml".split())
    assert (flags.config, overrides) == ("x.toml", {"model": {"moe_gradient_scale": True}})
    with pytest.raises(WrongUsage, match=r"unrecognized arguments: y\.toml"):
        parse("x.toml --model.qk_norm y.toml".split())


def test_non_boolean_override_consumes_next_argument() -> None:
    line = "--model.norm_type my.toml --data.tokenizer_path y.toml x.toml"
    flags, overrides = parse(line.split())
    assert flags.config == "x.toml"
    assert overrides == {"model": {"norm_type": "my.toml"}, "data": {"tokenizer_path": "y.toml"}}


def test_overrides_change_model_config(run: Any) -> None:
    done = run(f"x.toml {ASK} --model.n_layers=3")
    assert "lacks 9 of 30 tensors" in done.refusal()


# Errors.


def test_folder_without_checkpoint_is_one_error_line_and_status_1(run: Any) -> None:
    line = run(f"x.toml {ASK} --checkpoint.load_path=tok").refusal()
    assert "tok holds no checkpoint" in line and "neither .metadata nor pp0" in line


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            "x.toml --data.tokenizer_path=tok --checkpoint.load_path=ck",
            "give --prompt or --interact",
        ),
        ("x.toml --prompt a --checkpoint.load_path=ck", "give --data.tokenizer_path"),
        ("x.toml --prompt a --data.tokenizer_path=tok", "give --checkpoint.load_path"),
        (f"x.toml {ASK} --checkpoint.load_path=ck/step_9", "does not exist: ck/step_9"),
        (f"y.toml {ASK}", "can't read y.toml"),
        (f"x.toml {ASK} --dtype int8", "--dtype int8: must be bfloat16, float16 or float32"),
        (f"x.toml {ASK} --temperature -1", "temperature"),
        (f"x.toml {ASK} --top_p 1.5", "top_p"),
        (f"x.toml {ASK} --max_tokens -1", "max_tokens"),
        (f"x.toml {ASK} --model.dimm 5", "[model] has no field 'dimm'"),
        (f"x.toml {ASK} --model.model_type=vlm", "model_type='vlm'"),
    ],
)
def test_invalid_arguments_are_one_error_line_before_model_is_opened(
    run: Any, monkeypatch: Any, line: str, named: str
) -> None:
    def open_no_model(*_: Any) -> Any:
        raise AssertionError("opened")

    monkeypatch.setattr("verbatim.compat.kempnerforge.command.open_llm", open_no_model)
    assert named in run(line).refusal()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "config"),
        ("x.toml y.toml", "y.toml"),
        ("x.toml --promt a", "--promt"),
        ("x.toml --max_tokens many", "many"),
        ("x.toml --train.seed=1", "--train.seed does not affect generation"),
        ("x.toml --checkpoint.dir=ck", "--checkpoint.dir does not affect"),
        ("x.toml --checkpoint.load_path", "--checkpoint.load_path needs a value"),
        ("x.toml --checkpoint.load_path=", "--checkpoint.load_path needs a value"),
        ("x.toml --model.dim", "--model.dim needs a value"),
        ("x.toml --model.dim --prompt a", "--model.dim needs a value"),
        ("--model.dim x.toml", "required: config"),
    ],
)
def test_wrong_usage_is_one_error_line_and_status_2(run: Any, line: str, named: str) -> None:
    done = run(line)
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert named in done.err


def test_missing_tokenizer_is_one_error_line(run: Any, tmp_path: Path) -> None:
    done = run(f"x.toml {ASK} --data.tokenizer_path={tmp_path}")
    assert "has no tokenizer" in done.refusal()


def test_too_long_prompt_exits_with_status_1_and_names_limit(run: Any) -> None:
    done = run(f"x.toml {ASK} --max_tokens 500")
    assert done.status == 1
    assert re.search(r"max_tokens=500 make \d+; the limit for both together is 200", done.err)


# Interactive mode.


def interactive(run_dir: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    options = [*shlex.split(ASK.replace('--prompt "the quick"', "")), "--interactive"]
    line = [sys.executable, "-m", MODULE, "x.toml", *options]
    env = os.environ | {"PYTHONPATH": str(Path(verbatim.__file__).parents[1])}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return started(line, cwd=run_dir, env=env, text=True, **pipes)


@pytest.mark.slow
def test_interactive_mode_reads_prompts_until_end_of_stdin(run_dir: Path) -> None:
    with interactive(run_dir) as process:
        out, err = process.communicate(f"{PROMPT}\n\n   \n{'fox ' * 190}\nlazy dog\n")
    assert process.returncode == 0, err
    assert re.findall(r"--- Prompt ---\n(.*)\n", out) == [PROMPT, "lazy dog"]
    assert out.count(">>> ") == 6  # five lines, two of them blank and one too long; and the end
    assert out.endswith("\nExiting.\n")
    lines = [line for line in err.splitlines() if "kernels" not in line]
    assert [line[:6] for line in lines] == ["(seed ", "verbat", "(seed "]
    assert "the limit for" in lines[1]


@pytest.mark.slow
def test_ctrl_c_at_prompt_exits_with_status_0(run_dir: Path) -> None:
    with interactive(run_dir) as process:
        assert process.stdout is not None
        seen = ""
        while not seen.endswith(">>> "):
            seen += process.stdout.read(1)
        until(lambda: state_of(process.pid) == "S")  # `input` waits
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.endswith("Exiting.\n")
    assert "Traceback" not in err


def test_help_imports_neither_torch_nor_transformers(run_dir: Path) -> None:
    code = (
        "import sys; from verbatim.compat.kempnerforge.command import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--interactive" in done.stdout


def test_interactive_mode_ends_on_closed_engine_and_rejects_non_utf8_stdin(monkeypatch) -> None:
    def answer(*_: Any) -> None:
        raise EngineClosed("closed")

    monkeypatch.setattr(command, "_answer", answer)
    for line, error, said in (b"a", EngineClosed, "closed"), (b"\xff", InvalidRequest, "not UTF-8"):
        monkeypatch.setattr("builtins.input", lambda _, line=line: line.decode())
        with pytest.raises(error, match=said):
            command._converse(None, SamplingParams())  # type: ignore[arg-type]
