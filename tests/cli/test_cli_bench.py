"""`verbatim bench`: what it measures adds up, and what it can't do is refused before minutes are spent."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from verbatim.bench.machine import Limits, Needs
from verbatim.bench.peers import Ours
from verbatim.bench.plan import BenchPlan
from verbatim.bench.run import Cell, measure
from verbatim.bench.timing import random_ids
from verbatim.cli.commands import app
from verbatim.errors import InvalidRequest
from verbatim.llm import LLM
from verbatim.storyteller import path

LITTLE = ["--rounds", "1", "--steps", "2", "--rows", "1,3", "--contexts", "20", "--prefills", "24"]


def prompts(rows: int, length: int) -> list[list[int]]:
    return [random_ids(length, 2048) for _ in range(rows)]


def run(*args: str):
    return CliRunner().invoke(app, ["bench", *args])


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("verbatim.bench.machine._READ_BYTES", 1 << 20)
    monkeypatch.setattr("verbatim.bench.machine._COLS", 64)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_measures_all_that_was_asked_beside_transformers() -> None:
    done = run(*LITTLE, "--mixed", "3", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["systems"] == ["Verbatim", "transformers"]
    assert [(c["what"], c["rows"], c["context"]) for c in told["cells"]] == [
        ("prefill", None, 24),
        ("decode", 1, 20),
        ("decode", 3, 20),
    ]
    for cell in told["cells"]:
        assert {name: len(times) for name, times in cell["seconds"].items()} == dict.fromkeys(
            told["systems"], 1 if cell["rows"] is None else 2
        )
        ours, theirs = (cell["tokens_per_s"][name] for name in told["systems"])
        assert cell["ratio"]["transformers"] == pytest.approx(ours / theirs)
        assert min(cell["of_limit"].values()) > 0
    assert told["mixed"]["requests"] == 3 and told["mixed"]["new_tokens"] >= 3 * 8
    assert told["bandwidth_bytes_per_s"] > 0 and told["flops"] > 0


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib, which the extra bench has")
    picture = tmp_path / "bench.png"
    done = run(*LITTLE, "--mixed", "0", "--no-peers", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_is_for_people() -> None:
    done = run(*LITTLE, "--mixed", "0", "--no-peers", "--num-threads", "1")
    assert done.exit_code == 0, done.output
    assert "decode, 3 x 20" in done.stdout and "transformers" not in done.stdout
    assert "of the limit" in done.stdout and "GB/s" in done.stdout


def test_what_is_too_long_for_the_model_is_left_out_and_said() -> None:
    done = run("--rows", "2", "--contexts", "20,5000", "--prefills", "9000", "--mixed", "0",
               "--steps", "1", "--rounds", "1", "--no-peers", "--json")  # fmt: skip
    told = json.loads(done.stdout)
    assert [(c["rows"], c["context"]) for c in told["cells"]] == [(2, 20)]
    assert len([r for r in told["remarks"] if "is left out: at most 2048 tokens fit" in r]) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--rows", "1,x"), "--rows '1,x': must be integers of 1 or more"),
        (("--contexts", "0"), "--contexts=0: must be an integer, 1 or more"),
        (("--rounds", "0"), "--rounds=0: must be an integer, 1 or more"),
        (("--mixed", "-1"), "--mixed=-1: must be an integer, 0 or more"),
        (("--plot", "a.txt"), "must end in .png, .svg or .pdf"),
        (("--plot", "nowhere/a.png"), "no such folder"),
        (("--gguf", "no.gguf"), "--gguf no.gguf"),
        (("--openvino", "nowhere"), "--openvino nowhere"),
        (("--rows", "", "--prefills", "", "--mixed", "0"), "nothing to measure"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_opened(
    args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it opened a model")

    monkeypatch.setattr("verbatim.cli.placing.open_llm", never)
    done = run(*args)
    assert done.exit_code == 2 and message in done.output


class Failing:
    """A peer that gives up at the second cell."""

    name = "another"

    def __init__(self) -> None:
        self.calls = 0

    def prefill(self, prompt: list[int]) -> float:
        return 0.5

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        raise RuntimeError("no more room")


class Still:
    """A machine of round numbers."""

    def measure(self) -> Limits:
        return Limits(1e9, 1e12)


def test_a_peer_that_fails_is_left_out_and_the_rest_goes_on() -> None:
    with LLM(path()) as llm:
        report = measure(
            BenchPlan(rows=(2,), contexts=(16,), prefills=(16,), rounds=2, steps=3, mixed=0),
            Ours(llm),
            [Failing()],
            Still(),
            Needs(1_000_000, 500_000, 100),
            lambda what: None,
        )
        prefill, decode = report.cells
        assert prefill.ratio("another") is not None and prefill.speed("another") == 32.0
        assert len(decode.seconds["Verbatim"]) == 6 and decode.speed("another") is None
        assert report.remarks == ["another left off at decode, 2 x 16: no more room"]
        assert decode.limits_s == [(1_000_000 + 2 * 16 * 100) / 1e9] * 2
        assert llm.stats()["blocks_used"] == 0 and llm.stats()["running"] == 0


def test_the_engine_really_reads_so_many_tokens_and_is_as_before() -> None:
    """Its pretended prompts are in the KV, and nothing of it stays."""
    with LLM(path(), prefix_cache=False) as llm:
        seen: list[int] = []
        runner = llm.engine.runner
        forward = runner.forward

        def counted(batch):  # type: ignore[no-untyped-def]
            seen.append(int(batch.positions.max()))
            return forward(batch)

        ours = Ours(llm)
        skip_prefill = ours._skip_prefill

        def then_count(requests):  # type: ignore[no-untyped-def]
            skip_prefill(requests)
            runner.forward = counted

        ours._skip_prefill = then_count
        times = ours.decode(prompts(3, 40), 4)
        assert len(times) == 4 and len(seen) == 6 and min(seen) >= 40


def test_rows_that_end_before_all_are_taken_in_are_refused() -> None:
    with LLM(path(), prefix_cache=False, max_length=64, max_batch_tokens=16) as llm:
        store = llm.engine.runner.store
        del store.copy_blocks  # which poisons: prompts that nobody computes have numbers
        for tensor in store.tensors:
            tensor.zero_()
        assert len(Ours(llm).decode(prompts(3, 30), 4)) == 4
        with pytest.raises(InvalidRequest, match="3 rows of 54 tokens: some reach 64"):
            Ours(llm).decode(prompts(3, 54), 4)


def test_medians_ratios_and_shares() -> None:
    cell = Cell(4, 100, {"Verbatim": [1.0, 3.0, 2.0], "x": [4.0]}, [0.5, 1.0, 1.5])
    assert cell.speed("Verbatim") == 2.0 and cell.speed("x") == 1.0 and cell.speed("y") is None
    assert cell.ratio("x") == 2.0 and cell.fraction("Verbatim") == 0.5
