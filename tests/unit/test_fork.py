"""Forked processes raise an error instead of hanging. Each case runs in a fresh process."""

from __future__ import annotations

import pytest

from support.programs import run_program

PROGRAM = """
import multiprocessing, os, signal, sys, threading
from support.toys import make_toy
from verbatim import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
case = sys.argv[1]


def opened():
    return LLM(make_toy("llama"), kv_memory="16MB", num_threads=2)


def tokens(llm):
    return llm.generate([3, 4, 5], GREEDY)[0].outputs[0].token_ids


def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(240)
        try:
            print(work(), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    print("exit", os.waitpid(child, 0)[1], flush=True)


def fresh(_):
    return tokens(opened())


if case == "before":
    in_child(lambda: fresh(0) == [])
    sys.exit()
llm = opened()
expected = tokens(llm)
if case == "generate":
    in_child(lambda: tokens(llm))
elif case == "new":
    llm.close()
    in_child(lambda: fresh(0))
elif case == "close":
    in_child(lambda: llm.close())
elif case == "pool":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        try:
            pool.map(fresh, [0, 1])
        except Exception as error:
            print(type(error).__name__, error)
elif case == "thread":
    thread = threading.Thread(target=lambda: in_child(lambda: tokens(llm)))
    thread.start()
    thread.join()
if case != "new":
    assert tokens(llm) == expected
print("parent goes on")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("before", "False\nexit 0"),
        ("generate", "EngineClosed an LLM was opened before"),
        ("new", "NotSupported an LLM was opened before"),
        ("close", "None\nexit 0"),
        ("pool", "NotSupported an LLM was opened before"),
        ("thread", "EngineClosed an LLM was opened before"),
    ],
)
def test_llm_in_forked_child_does_not_hang(case: str, said: str) -> None:
    output = run_program("-W", "ignore", "-c", PROGRAM, case)
    assert said in output, output
    assert case == "before" or "parent goes on" in output, output
