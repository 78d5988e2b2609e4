"""The progress bar of `LLM.generate` and `LLM.score`: when it is shown, what it counts, and how it ends."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from support.programs import in_thread
from support.toys import make_toy, random_ids
from verbatim import LLM, InvalidRequest, SamplingParams
from verbatim.api import progress

PROMPTS = [random_ids(6, seed=seed) for seed in range(5)]
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, seed=0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def bar(self) -> str:
        """The last state of the bar."""
        return self.getvalue().rstrip("\n").rpartition("\r")[2]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(make_toy("llama"), kv_memory="16MB") as opened:
        yield opened


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stderr = Terminal()
    # Not sys.stderr itself, which pytest replaces between a test's phases.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))
    monkeypatch.setattr(progress, "_DELAY_S", 0.0)
    return stderr


def test_generate_on_a_terminal_shows_prompts_and_tokens_per_second(
    llm: LLM, terminal: Terminal
) -> None:
    results = llm.generate(PROMPTS, SHORT)
    assert "5/5" in terminal.bar and re.search(r"\d tokens/s", terminal.bar)
    assert terminal.getvalue().endswith("\n")
    assert results[0].outputs == llm.generate(PROMPTS[0], SHORT)[0].outputs


def test_score_shows_prompts_without_tokens_per_second(llm: LLM, terminal: Terminal) -> None:
    llm.score(PROMPTS)
    assert "5/5" in terminal.bar and "tokens/s" not in terminal.bar


def test_no_bar_for_one_prompt_a_pipe_or_progress_false(
    llm: LLM, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(PROMPTS[0], SHORT)
    llm.generate(PROMPTS, SHORT, progress=False)
    llm.score(PROMPTS, progress=False)
    monkeypatch.setattr(progress.sys, "stderr", pipe := io.StringIO())
    llm.generate(PROMPTS, SHORT)
    assert terminal.getvalue() == pipe.getvalue() == ""
    llm.generate(PROMPTS[0], SHORT, progress=True)
    assert "1/1" in pipe.getvalue()


def test_no_bar_for_a_short_call(
    llm: LLM, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_DELAY_S", 3600.0)
    llm.generate(PROMPTS, SHORT)
    assert terminal.getvalue() == ""


def test_non_boolean_progress_is_rejected(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="progress=1"):
        llm.generate(PROMPTS, SHORT, progress=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_error_ends_the_bar_without_counting_aborted_requests(
    llm: LLM, terminal: Terminal, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = iter(range(100)), llm.engine._engine.step

    def failing() -> bool:
        if next(steps) == 4:
            raise error
        return step()

    monkeypatch.setattr(llm.engine._engine, "step", failing)
    params = [SHORT.replace(max_tokens=n) for n in (1, 2, 90, 90, 90)]
    with pytest.raises(error):
        llm.generate(PROMPTS, params)
    assert "2/5" in terminal.bar and terminal.getvalue().endswith("\n")


def test_concurrent_calls_count_their_own_prompts(llm: LLM, terminal: Terminal) -> None:
    """One thread runs the engine steps of all calls."""
    for call in [in_thread(llm.generate, PROMPTS, SHORT) for _ in range(4)]:
        call.result()
    assert len(re.findall("5/5", terminal.getvalue())) >= 4
    assert "6/5" not in terminal.getvalue()
