"""Run TRL's HTTP clients, unmodified, against `verbatim serve --training`, with and without a key.

    pip install 'torch>=2.11,<2.14' && pip install trl requests '.[serve]'
    python benchmarks/clients/trl_http.py

`trl.generation.vllm_client.VLLMClient` refuses to start without vLLM, although only its NCCL transfers use
it: here its check for vLLM is patched. Weights are sent by `rl.WeightSender`, and as a safetensors file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import torch
from accelerate import PartialState
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
from trl.generation import vllm_client

from verbatim import LLM, SamplingParams, rl, storyteller

KEY = "a-key-for-trl-clients"
PROMPTS = ["Once upon a time", "One morning"]


def main() -> None:
    PartialState()  # TRL's loggers need it
    vllm_client.is_vllm_available = lambda *_, **__: True
    folder = storyteller.path()
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with LLM(module, tokenizer=tokenizer) as llm:
        for key in (None, KEY):
            with server(key) as url:
                check_async(AsyncClient(url, server_timeout=10))
                client = vllm_client.VLLMClient(base_url=url)
                check_generation(client, llm)
                check_scores(client, llm)
                check_weights(client, llm, url, key)
            print(f"{'with' if key else 'without'} a key: all passed")


def check_async(client: AsyncClient) -> None:
    """Check `trl.experimental.async_grpo`: readiness, introspection, pause and resume."""
    client.wait_for_server_ready()
    assert client.get_max_model_len() == 2048
    assert client.get_dtype() == "torch.bfloat16"
    assert client.get_world_size() == 1
    client.pause()
    client.resume()
    print("async client: health, models, server_info, world size, pause, resume")


def check_generation(client: Any, llm: Any) -> None:
    """Check that ids and log-probs equal those of `LLM.generate`."""
    fields: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 24}
    expected = llm.generate(PROMPTS, SamplingParams(n=2, seed=5, **fields))
    outputs = [output for result in expected for output in result.outputs]
    answer = client.generate(PROMPTS, n=2, generation_kwargs={"seed": 5}, **fields)
    assert answer["prompt_ids"] == [result.prompt_token_ids for result in expected]
    assert answer["completion_ids"] == [output.token_ids for output in outputs]
    assert answer["logprobs"] == [[[p] for p in output.sampled_logprobs] for output in outputs]
    assert answer["logprob_token_ids"] == [[[i] for i in output.token_ids] for output in outputs]
    talk = [{"role": "user", "content": "Tell me a story."}]
    (output,) = llm.chat(talk, SamplingParams(seed=5, **fields)).outputs
    answer = client.chat([talk], generation_kwargs={"seed": 5}, **fields)
    assert answer["completion_ids"] == [output.token_ids]
    assert answer["logprobs"] == [[[p] for p in output.sampled_logprobs]]
    words = client.generate(["x"], structured_outputs_regex="[ab]{4}")["completion_ids"][0]
    assert re.fullmatch("[ab]{4}", llm.tokenizer.decode(words, True).strip())
    print("generation client: generate, chat, regex; ids and log-probs equal LLM.generate's")


def check_scores(client: Any, llm: Any) -> None:
    """Check that `get_sequence_logprobs` equals the rollout's log-probs, bit for bit."""
    result = llm.generate(PROMPTS[0], SamplingParams(seed=1, max_tokens=12))[0]
    ids, start = result.prompt_token_ids + result.outputs[0].token_ids, len(result.prompt_token_ids)
    answer = client.get_sequence_logprobs([ids, ids], [start, start], top_logprobs=1000)
    assert [[p] for p in result.outputs[0].logprobs] == answer["actual_logprobs"][1]
    few = client.get_sequence_logprobs([ids], [start], top_logprobs=1)
    assert few["logprob_token_ids"][0] == [[row[0]] for row in answer["logprob_token_ids"][0]]
    print("generation client: get_sequence_logprobs; equal to the rollout's")


def check_weights(client: Any, llm: Any, url: str, key: str | None) -> None:
    """Check new weights over a connection, as a file, and while a request runs."""
    plain = {name: tensor.clone() for name, tensor in llm.engine.runner.module.state_dict().items()}
    other = {name: tensor * 1.25 for name, tensor in plain.items()}
    generate = {"max_tokens": 24, "generation_kwargs": {"seed": 5}}
    before = client.generate(PROMPTS, **generate)
    address = url.replace(f":{KEY}@", "")
    sender = rl.WeightSender(address, api_key=key)
    begin = time.perf_counter()
    assert sender.send(other, version=9) == 9
    seconds = time.perf_counter() - begin
    llm.update_weights(other)
    after = client.generate(PROMPTS, **generate)
    expected = llm.generate(PROMPTS, SamplingParams(seed=5, max_tokens=24))
    assert after["completion_ids"] == [result.outputs[0].token_ids for result in expected]
    assert after != before
    file = save(plain)
    answer = requests.post(
        f"{url}/update_weights?version=10",
        data=file,
        headers={"content-type": "application/octet-stream"},
    )
    assert answer.json()["weight_version"] == 10, answer.text
    client.reset_prefix_cache()
    assert client.generate(PROMPTS, **generate) == before
    llm.update_weights(plain)

    body = {"model": client.model, "prompt": PROMPTS[0], "max_tokens": 1000, "ignore_eos": True}
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(
            requests.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}).json()
        )
    )
    thread.start()
    time.sleep(0.1)
    sender.send(plain, version=11)
    thread.join()
    versions = answers[0]["choices"][0]["weight_versions"]
    counts = {version: versions.count(version) for version in sorted(set(versions))}
    assert len(versions) == 1000 and versions == sorted(versions)
    print(
        f"weights: {len(file) / 1e6:.1f} MB in {seconds * 1e3:.0f} ms; tokens by version {counts}"
    )


@contextmanager
def server(key: str | None) -> Iterator[str]:
    """Run a server in a new process; yield its URL, with the key."""
    environment = os.environ | ({} if key is None else {"VERBATIM_API_KEY": key})
    code = "from verbatim.cli import main; main()"
    arguments = (
        "serve --port 0 --training --logprobs-mode processed_logprobs --max-body-bytes 20000000"
    )
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments.split()],
                env=environment, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            match = None
            for _ in range(600):
                match = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
                if match:
                    break
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            assert match is not None, log.read_text()
            user = "" if key is None else f":{key}@"
            yield f"http://{user}127.0.0.1:{match[1]}"
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
