"""Load and unload adapters under load, in Python and over HTTP; all answers are compared with solo runs.

    python benchmarks/adapter_churn.py [--seconds 60] [--threads 4] [--adapters 6]

The storyteller, with adapters of ranks 4 to 64 for all linear layers. Threads send requests without a pause,
for the base model or an adapter; one more keeps loading, replacing and unloading adapters. A request for an
adapter that is not loaded must be refused by name. Ids and log-probs of all others are compared with those of
the same request alone, computed before. Memory: resident bytes of the engine's process, medians of each fifth
of the time, with five samples per second. The KV cache is small, so that it is soon full of prefixes.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.lora import save_adapter
from support.serving import running
from verbatim import LLM, InvalidRequest, SamplingParams, storyteller

KEY = "a-key-for-churn"
PROMPTS = ["Once upon a time", "The dragon", "Lily and Ben", "One day"]
TOKENS = 24
KV_MEMORY = "16MB"
Answer = tuple[list[int], list[float]]


class NotLoaded(Exception):
    """The request named an adapter that is not loaded."""


def adapter_name(number: int) -> str:
    return f"adapter-{number}"


def in_process(llm: LLM, prompt: str, seed: int, adapter: str | None) -> Answer:
    """Return ids and log-probs of a completion."""
    params = SamplingParams(seed=seed, max_tokens=TOKENS, ignore_eos=True, adapter=adapter)
    try:
        (result,) = llm.generate(prompt, params)
    except InvalidRequest as error:
        raise NotLoaded(str(error)) from None
    return result.outputs[0].token_ids, result.outputs[0].logprobs


def over_http(client: httpx.Client, prompt: str, seed: int, adapter: str | None) -> Answer:
    """Return ids and log-probs of a completion, which the server computes."""
    params = {"seed": seed, "max_tokens": TOKENS, "ignore_eos": True, "adapter": adapter}
    answer = client.post("/v1/generate", json={"prompt": prompt, "params": params})
    if answer.status_code == 400:
        raise NotLoaded(answer.text)
    answer.raise_for_status()
    (output,) = answer.json()["outputs"]
    return output["token_ids"], output["logprobs"]


def churn(
    ask: Callable[[str, int, str | None], Answer],
    load: Callable[[str, str, bool], None],
    unload: Callable[[str], None],
    resident: Callable[[], int],
    alone: dict[Any, Answer],
    given: argparse.Namespace,
) -> str:
    """Run the load, and return a summary.

    Raises:
        AssertionError: an answer differs from that of the request alone, or nothing was loaded.
    """
    end = time.monotonic() + given.seconds
    counts = dict.fromkeys(("answers", "refused", "loads", "replaced", "unloads"), 0)
    errors: list[BaseException] = []
    lock = threading.Lock()

    def count(name: str) -> None:
        with lock:
            counts[name] += 1

    def guarded(work: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < end and not errors:
                work(rng)
        except BaseException as error:
            errors.append(error)

    def answer(rng: random.Random) -> None:
        case = rng.choice(list(alone))
        try:
            result = ask(*case)
        except NotLoaded as error:
            if case[2] is None or case[2] not in str(error):
                raise
            count("refused")
        else:
            assert result == alone[case], case
            count("answers")

    loaded: set[str] = set()

    def change(rng: random.Random) -> None:
        name = adapter_name(rng.randrange(given.adapters))
        if name not in loaded:
            load(name, name, False)
            loaded.add(name)
            count("loads")
        elif rng.random() < 0.5:
            load(name, name, True)
            count("replaced")
        else:
            unload(name)
            loaded.remove(name)
            count("unloads")

    threads = [
        threading.Thread(target=guarded, args=(answer, number)) for number in range(given.threads)
    ]
    threads.append(threading.Thread(target=guarded, args=(change, 99)))
    for thread in threads:
        thread.start()
    samples = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        samples.append(resident())
    for name in loaded:
        unload(name)
    if errors:
        raise errors[0]
    assert all(counts.values()), counts
    assert len(samples) >= 5, "too short a time"
    cuts = [len(samples) * part // 5 for part in range(6)]
    medians = [statistics.median(samples[a:b]) / 1e6 for a, b in itertools.pairwise(cuts)]
    numbers = ", ".join(f"{value:,} {name}" for name, value in counts.items())
    resident_mb = ", ".join(f"{median:.0f}" for median in medians)
    return f"{numbers}; no answer differs; resident MB by fifths of the time: {resident_mb}"


def resident_of(pid: int | str) -> Callable[[], int]:
    """Return a function that measures the resident bytes of a process."""
    return lambda: (
        1024
        * int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split(maxsplit=1)[0])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--adapters", type=int, default=6)
    options = parser.parse_args()
    module = AutoModelForCausalLM.from_pretrained(storyteller.path(), dtype=torch.bfloat16)
    names = [adapter_name(number) for number in range(options.adapters)]
    cases = [(p, seed, name) for p in PROMPTS for seed in (1, 2) for name in (None, *names)]
    with tempfile.TemporaryDirectory() as root:
        for number, name in enumerate(names):
            save_adapter(Path(root) / name, module, rank=4 << number % 5, seed=number)
        with LLM(kv_memory=KV_MEMORY) as llm:
            for name in names:
                llm.load_adapter(name, Path(root) / name)
            alone = {case: in_process(llm, *case) for case in cases}
            assert len({tuple(ids) for ids, _ in alone.values()}) > len(cases) / 2
            for name in names:
                llm.unload_adapter(name)
            summary = churn(
                lambda *case: in_process(llm, *case),
                lambda name, folder, replace: llm.load_adapter(
                    name, Path(root) / folder, replace=replace
                ),
                llm.unload_adapter,
                resident_of("self"),
                alone,
                options,
            )
            print(f"in Python, {options.seconds:g} s: {summary}", flush=True)
        with (
            running("--adapter-root", root, "--kv-memory", KV_MEMORY, VERBATIM_API_KEY=KEY) as (
                process,
                url,
            ),
            httpx.Client(
                base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
            ) as client,
        ):

            def post(path: str, **body: Any) -> None:
                client.post(path, json=body).raise_for_status()

            summary = churn(
                lambda *case: over_http(client, *case),
                lambda name, folder, replace: post(
                    "/v1/load_lora_adapter",
                    lora_name=name,
                    lora_path=folder,
                    load_inplace=replace,
                ),
                lambda name: post("/v1/unload_lora_adapter", lora_name=name),
                resident_of(process.pid),
                alone,
                options,
            )
            print(f"over HTTP, {options.seconds:g} s: {summary}")


if __name__ == "__main__":
    main()
