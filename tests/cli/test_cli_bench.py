"""`verbatim bench`: consistent measurements, and early rejection of what can't be measured."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from verbatim.api.llm import LLM
from verbatim.bench.machine import Limits, Needs
from verbatim.bench.peers import Ours
from verbatim.bench.plan import BenchPlan, random_ids
from verbatim.bench.run import Cell, measure
from verbatim.cli.commands import app
from verbatim.errors import InvalidRequest
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


def test_bench_measures_requested_cells_and_transformers() -> None:
    done = run(*LITTLE, "--mixed", "3", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["systems"] == ["Verbatim", "transformers"]
    cells = [(c["what"], c["rows"], c["context"]) for c in report["cells"]]
    assert cells == [("prefill", None, 24), ("decode", 1, 20), ("decode", 3, 20)]
    for cell in report["cells"]:
        counts = {name: len(times) for name, times in cell["seconds"].items()}
        assert counts == dict.fromkeys(report["systems"], 1 if cell["rows"] is None else 2)
        ours, theirs = (cell["tokens_per_s"][name] for name in report["systems"])
        assert cell["ratio"]["transformers"] == pytest.approx(ours / theirs)
        assert min(cell["of_limit"].values()) > 0
    assert report["mixed"]["requests"] == 3 and report["mixed"]["new_tokens"] >= 3 * 8
    assert report["bandwidth_bytes_per_s"] > 0 and report["flops"] > 0


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib, which the extra bench has")
    picture = tmp_path / "bench.png"
    done = run(*LITTLE, "--mixed", "0", "--no-peers", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_default_output_is_a_table() -> None:
    done = run(*LITTLE, "--mixed", "0", "--no-peers", "--num-threads", "1")
    assert done.exit_code == 0, done.output
    assert "decode, 3 x 20" in done.stdout and "transformers" not in done.stdout
    assert "of the limit" in done.stdout and "GB/s" in done.stdout


def test_too_long_contexts_are_skipped_with_a_remark() -> None:
    done = run("--rows", "2", "--contexts", "20,5000", "--prefills", "9000", "--mixed", "0",
               "--steps", "1", "--rounds", "1", "--no-peers", "--json")  # fmt: skip
    report = json.loads(done.stdout)
    assert [(c["rows"], c["context"]) for c in report["cells"]] == [(2, 20)]
    assert len([r for r in report["remarks"] if "is left out: at most 2048 tokens fit" in r]) == 2


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
def test_usage_errors_are_reported_before_opening_a_model(
    args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it opened a model")

    monkeypatch.setattr("verbatim.cli.placing.open_llm", never)
    done = run(*args)
    assert done.exit_code == 2 and message in done.output


class Failing:
    """A peer that fails at the second cell."""

    name = "another"

    def __init__(self) -> None:
        self.calls = 0

    def prefill(self, prompt: list[int]) -> float:
        return 0.5

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        raise RuntimeError("no more room")


class Still:
    """A machine with fixed limits."""

    def measure(self) -> Limits:
        return Limits(1e9, 1e12)


def test_failing_peer_is_left_out_and_others_continue() -> None:
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
        assert report.remarks == ["another stopped at decode, 2 x 16: no more room"]
        assert decode.limits_s == [(1_000_000 + 2 * 16 * 100) / 1e9] * 2
        assert llm.stats()["blocks_used"] == 0 and llm.stats()["running"] == 0


def test_decode_benchmark_attends_to_full_context() -> None:
    """The prompts are not prefilled, but decoding starts at their full length."""
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


def test_rows_too_long_for_the_model_are_rejected() -> None:
    with LLM(path(), prefix_cache=False, max_length=64, max_batch_tokens=16) as llm:
        store = llm.engine.runner.store
        del store.copy_blocks  # no poisoned blocks, as the prompts are never computed
        for tensor in store.tensors:
            tensor.zero_()
        assert len(Ours(llm).decode(prompts(3, 30), 4)) == 4
        with pytest.raises(InvalidRequest, match="3 rows of 54 tokens: some reach the limit of 64"):
            Ours(llm).decode(prompts(3, 54), 4)


def test_cell_medians_ratios_and_fractions() -> None:
    cell = Cell(4, 100, {"Verbatim": [1.0, 3.0, 2.0], "x": [4.0]}, [0.5, 1.0, 1.5])
    assert cell.speed("Verbatim") == 2.0 and cell.speed("x") == 1.0 and cell.speed("y") is None
    assert cell.ratio("x") == 2.0 and cell.fraction("Verbatim") == 0.5
