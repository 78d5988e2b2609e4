"""Server features for trainers: token ids, prompt log-probs, pauses, weight updates."""

from __future__ import annotations

import base64
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from support.programs import PATIENCE_S, in_thread, started, state_of
from support.serving import Served, serving, until
from support.toys import make_toy
from verbatim import LLM, InvalidRequest, Offload, SamplingParams, rl
from verbatim.errors import VerbatimError
from verbatim.placement.distributed.link import LinkLost
from verbatim.placement.distributed.wire import MAGIC, PREFIX
from verbatim.serve.settings import ServeSettings
from verbatim.serve.training import Updates

PROMPT = "Once upon a time"
BODY: dict[str, Any] = {"prompt": PROMPT, "seed": 7, "max_tokens": 6, "temperature": 0.7}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "seed": 7, "max_tokens": 6}
ROUTES = [
    ("GET", "/server_info"),
    ("GET", "/get_world_size"),
    ("GET", "/is_paused"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
]
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    mode = "processed_logprobs"
    settings = ServeSettings(training=True, logprobs_mode=mode, max_body_bytes=16 << 20)
    with serving(llm, settings) as server:
        yield server


@pytest.fixture
def weights(llm: LLM) -> Iterator[dict[str, torch.Tensor]]:
    """A copy of the model's weights, restored after the test."""
    module = llm.engine.runner.module  # type: ignore[attr-defined]
    plain = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    yield plain
    llm.update_weights(plain)


def other(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor * 1.25 for name, tensor in weights.items()}


def test_request_after_interrupted_update_of_offloaded_weights_gets_503() -> None:
    placement = Offload(gpu="200MB", weights=(0, 0, 100), policy=None)
    with LLM(placement=placement) as llm, serving(llm, ServeSettings()) as server:
        llm.engine.runner.weights.is_mixed = True  # type: ignore[attr-defined]
        error = server.refused("/v1/completions", BODY, 503)
    assert error["message"] == "the model's weights have changed"


# ---- token ids and log-probs


def test_completion_has_token_ids_versions_and_sampled_logprobs(served: Served) -> None:
    body = BODY | {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = served.post("/v1/completions", **body)["choices"][0]
    params = SamplingParams(seed=7, max_tokens=6, temperature=0.7)
    result = served.llm.generate(PROMPT, params)[0]
    output = result.outputs[0]
    assert choice["prompt_token_ids"] == result.prompt_token_ids
    assert choice["token_ids"] == output.token_ids
    assert choice["weight_versions"] == output.weight_versions
    assert choice["logprobs"]["token_logprobs"] == output.sampled_logprobs != output.logprobs
    top = choice["logprobs"]["top_logprobs"]  # TRL's client needs the sampled tokens in it
    assert [p for best in top for p in best.values()] == output.sampled_logprobs
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in output.token_ids]


def test_streamed_token_ids_equal_unstreamed_ones(served: Served) -> None:
    body = BODY | {"return_token_ids": True, "n": 2}
    whole = served.post("/v1/completions", **body)["choices"]
    pieces = served.stream("/v1/completions", **body)[:-1]
    for index, choice in enumerate(whole):
        own = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == index]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not any("prompt_token_ids" in piece for piece in own[1:])
        assert [i for piece in own for i in piece["token_ids"]] == choice["token_ids"]
        assert [v for p in own for v in p["weight_versions"]] == choice["weight_versions"]


def test_chat_has_token_ids_streamed_or_not(served: Served) -> None:
    body = CHAT | {"return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
    answer = served.post("/v1/chat/completions", **body)
    (choice,) = answer["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{i}" for i in choice["token_ids"]]
    pieces = served.stream("/v1/chat/completions", **body)[:-1]
    assert pieces[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    ids = [i for piece in pieces for i in piece["choices"][0].get("token_ids", [])]
    assert ids == choice["token_ids"]


def test_sampling_supports_match_generate(served: Served) -> None:
    params = SamplingParams(seed=7, max_tokens=6, temperature=0.7, top_p=0.8, support=True)
    output = served.llm.generate(PROMPT, params)[0].outputs[0]
    body = BODY | {"top_p": 0.8, "support": True}
    choice = served.post("/v1/completions", **body)["choices"][0]
    assert (choice["supports"], choice["log_masses"]) == (output.supports, output.log_masses)
    pieces = served.stream("/v1/completions", **body)[:-1]
    assert [s for p in pieces for s in p["choices"][0]["supports"]] == output.supports
    chat_body = CHAT | {"top_p": 0.8, "temperature": 0.7, "support": True}
    chat = served.post("/v1/chat/completions", **chat_body)["choices"][0]
    pieces = served.stream("/v1/chat/completions", **chat_body)[:-1]
    own = [s for p in pieces for s in p["choices"][0].get("supports", [])]
    assert own == chat["supports"]
    native = {"seed": 7, "max_tokens": 6, "top_p": 0.8, "support": True}
    (output,) = served.post("/v1/generate", prompt=PROMPT, params=native)["outputs"]
    assert len(output["supports"]) == 6


def test_prompt_logprobs_match_generate(served: Served) -> None:
    ids = served.llm.tokenizer.encode("Once upon a time there was")  # type: ignore[union-attr]
    body = {"prompt": ids, "max_tokens": 0, "prompt_logprobs": 3}
    entries = served.post("/v1/completions", **body)["choices"][0]["prompt_logprobs"]
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    result = served.llm.generate(ids, params)[0]
    assert result.prompt_logprobs is not None and result.prompt_top_logprobs is not None
    assert entries[0] is None
    for at in range(1, len(ids)):
        own = entries[at][str(ids[at])]
        assert own["logprob"] == result.prompt_logprobs[at]
        top = [(int(i), e["logprob"]) for i, e in entries[at].items() if e["rank"] <= 3]
        assert top == [*result.prompt_top_logprobs[at]]  # type: ignore[misc]
        assert own["rank"] == 4 or (ids[at], own["logprob"]) in top
    chat = served.post("/v1/chat/completions", **CHAT, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_vllm_structured_outputs_field_is_accepted(served: Served) -> None:
    body = BODY | {"structured_outputs": {"regex": "[xyz]{4}"}}
    assert served.post("/v1/completions", **body)["choices"][0]["text"].strip("xyz") == ""
    assert "regex" in served.refused("/v1/completions", body | {"regex": "a"})["message"]
    schema = {"structured_outputs": {"json": {"type": "boolean"}}}
    twice = BODY | schema | {"json_schema": {"type": "null"}}
    assert "json_schema is set" in served.refused("/v1/completions", twice)["message"]
    answer = served.post("/v1/chat/completions", **CHAT, **schema)
    assert answer["choices"][0]["message"]["content"] in ("true", "false")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY | {"logprobs": 2}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
        ("/v1/completions", BODY | {"prompt_logprobs": 1, "stream": True}),
    ],
)
def test_unavailable_logprobs_are_rejected(served, path, body) -> None:
    assert "logprob" in served.refused(path, body)["message"].replace("log-prob", "logprob")


# ---- control


def test_server_info_has_fields_read_by_trl(served: Served) -> None:
    config = served.client.get("/server_info", params={"config_format": "json"}).json()
    assert config["vllm_config"]["model_config"]["dtype"] == "torch.bfloat16"
    assert config["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["vllm_config"]["weight_transfer_config"] is not None
    assert served.client.get("/get_world_size").json() == {"world_size": 1}


def test_pause_keeps_requests_and_resume_continues_them(served: Served) -> None:
    expected = served.post("/v1/completions", **BODY)["choices"]
    assert served.client.post("/pause", params={"mode": "keep"}).status_code == 200
    assert served.client.get("/is_paused").json() == {"is_paused": True}
    answer = in_thread(lambda: served.post("/v1/completions", **BODY))
    time.sleep(0.1)
    assert not answer.done()
    assert served.client.post("/reset_prefix_cache").json()["success"] is True
    assert served.client.post("/resume").status_code == 200
    assert answer.result()["choices"] == expected
    assert "mode" in served.client.post("/pause?mode=stop").json()["error"]["message"]


def test_pause_with_abort_ends_requests_with_reason_abort(served: Served) -> None:
    long = {"max_tokens": 1900, "ignore_eos": True}
    bodies = {
        "/v1/completions": BODY | long,
        "/v1/chat/completions": CHAT | long,
        "/v1/messages": CHAT | long,
        "/v1/responses": {"input": "Hi", "max_output_tokens": 1900, "ignore_eos": True},
    }
    answers = [
        in_thread(lambda path=path, body=body: served.post(path, **body))
        for path, body in bodies.items()
    ]
    until(lambda: served.llm.stats()["running"] == len(bodies))
    served.client.post("/pause?mode=abort")
    served.client.post("/resume")
    completion, chat, message, response = [answer.result() for answer in answers]
    for answer in (completion, chat):
        assert answer["choices"][0]["finish_reason"] == "abort"
    assert message["stop_reason"] == "abort"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "abort"}


@pytest.fixture(scope="module")
def keyed(llm: LLM) -> Iterator[Served]:
    settings = ServeSettings(training=True, api_keys=("secret-key-1",))
    with serving(llm, settings) as server:
        yield server


def test_api_key_in_url_is_accepted_as_basic_auth(keyed: Served) -> None:
    """For clients without a setting for a key, such as TRL's."""
    url = keyed.url.replace("://", "://:secret-key-1@")
    assert httpx.get(f"{url}/get_world_size", timeout=PATIENCE_S).json() == {"world_size": 1}
    for wrong in (b"secret-key-1", b":secret-key-2", b"secret-key-1:", b"\xff"):
        headers = {"authorization": b"Basic " + base64.b64encode(wrong)}
        assert keyed.client.get("/get_world_size", headers=headers).status_code == 401


def test_training_routes_exist_only_with_training_enabled(llm: LLM) -> None:
    with serving(llm, ServeSettings()) as plain:
        for method, path in ROUTES:
            assert plain.client.request(method, path).status_code == 404


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_requests_with_origin_header_are_rejected(served: Served, method: str, path: str) -> None:
    answer = served.client.request(method, path, headers={"origin": "https://evil.example"})
    assert answer.status_code == 403
    assert not served.llm.stats()["paused"]


# ---- weights


def generated(llm: LLM) -> Any:
    params = SamplingParams(seed=7, max_tokens=6, temperature=0.7)
    output = llm.generate(PROMPT, params)[0].outputs[0]
    return output.token_ids, output.logprobs


def upload(served: Served, content: bytes, query: str = "") -> httpx.Response:
    return served.client.post(f"/update_weights{query}", content=content, headers=OCTETS)


def test_weights_are_updated_from_safetensors_body(served: Served, weights: Any) -> None:
    before = generated(served.llm)
    answer = upload(served, save(other(weights)), "?version=41")
    assert answer.json() == {"status": "ok", "weight_version": 41}
    after = generated(served.llm)
    assert after != before
    choice = served.post("/v1/completions", **BODY, return_token_ids=True)["choices"][0]
    assert choice["weight_versions"] == [41] * len(choice["token_ids"])
    served.llm.update_weights(weights)
    assert generated(served.llm) == before
    served.llm.update_weights(other(weights))
    assert generated(served.llm) == after


def test_weights_sent_in_parts_are_applied_together(served: Served, weights: Any) -> None:
    before = generated(served.llm)
    names = list(weights)
    post = served.client.post
    started = post("/start_weight_update", json={"is_checkpoint_format": True}).json()
    update = f"?update={started['update']}"
    for part in (names[::2], names[1::2]):
        body = save({name: other(weights)[name] for name in part})
        assert upload(served, body, update).json()["weight_version"] is None
        assert generated(served.llm) == before
    again = upload(served, body, update)
    assert again.status_code == 400 and "twice" in again.text
    again = upload(served, body, f"{update}&version=3")
    assert again.status_code == 400 and "version=3" in again.text
    end = {"update": started["update"]}
    assert isinstance(post("/finish_weight_update", json=end).json()["weight_version"], int)
    assert generated(served.llm) != before


def test_file_of_another_trainer_joins_no_update_in_parts(served: Served, weights: Any) -> None:
    before = generated(served.llm)
    post, body = served.client.post, save(other(weights))
    late = post("/start_weight_update").json()["update"]
    assert upload(served, body).status_code == 409
    assert post("/finish_weight_update").status_code == 409
    post("/finish_weight_update", json={"update": late})  # of no weights: an error, which ends it
    for own in (late, post("/start_weight_update").json()["update"]):
        # With none in progress, and with another one.
        assert upload(served, body, f"?update={late}").status_code == 409, own
        assert generated(served.llm) == before
    post("/finish_weight_update", json={"update": own})


def test_completion_during_an_update_has_both_weight_versions(served: Served, weights: Any) -> None:
    first = served.llm.stats()["weight_version"]
    body = BODY | {"max_tokens": 400, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        seen = [next(lines)]
        update = upload(served, save(other(weights)))
        seen += lines
    versions = [v for line in seen for v in json.loads(line[6:])["choices"][0]["weight_versions"]]
    assert len(versions) == 400
    assert versions == sorted(versions)
    assert set(versions) == {first, update.json()["weight_version"]}


def test_weight_sender_updates_weights(served: Served, weights: Any) -> None:
    sender = rl.WeightSender(served.url, timeout_s=PATIENCE_S)
    before = generated(served.llm)
    sender.pause()
    assert sender.send(other(weights), version=50) == 50
    sender.resume()
    after = generated(served.llm)
    served.llm.update_weights(other(weights))
    assert generated(served.llm) == after != before
    floats = {name: tensor.float() for name, tensor in weights.items()}
    assert sender.send(floats) == 52
    assert generated(served.llm) == before
    with pytest.raises(VerbatimError, match="not the model's"):
        sender.send({"model.other": torch.zeros(3)})
    assert generated(served.llm) == before
    assert sender.send(other(weights)) == 53


def test_weight_sender_rounds_no_float16_folder(tmp_path: Path) -> None:
    half = make_toy("llama", dtype=torch.float16)
    half.save_pretrained(tmp_path)
    module = make_toy("llama", seed=1)
    with LLM(module) as llm, serving(llm, ServeSettings(training=True)) as server:
        assert rl.WeightSender(server.url, timeout_s=PATIENCE_S).send(tmp_path) == 1
    pairs = zip(module.parameters(), half.parameters(), strict=True)
    assert all(torch.equal(new, sent.float()) for new, sent in pairs)


def test_weight_sender_without_key_is_rejected(keyed: Served) -> None:
    with pytest.raises(VerbatimError, match="no API key"):
        rl.WeightSender(keyed.url, timeout_s=1)


@pytest.mark.parametrize(
    "answer", [b"?\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"]
)
def test_weight_sender_reports_a_damaged_answer(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=serve).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(VerbatimError, match=url):
            rl.WeightSender(url, timeout_s=PATIENCE_S)


ADDRESS = {"master_address": "127.0.0.1", "master_port": 1, "key": "0" * 64, "num_bytes": 24}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/finish_weight_update", {}, 409, "start_weight_update"),
        ("/update_weights", ADDRESS, 502, "no connection to 127.0.0.1:1"),
        ("/update_weights", ADDRESS | {"master_address": "a..b"}, 502, "no connection to a..b:1"),
        ("/update_weights", ADDRESS | {"num_bytes": 1 << 40}, 400, "(--max-update-bytes)"),
        ("/update_weights", ADDRESS | {"key": "0"}, 400, "key"),
        ("/update_weights", ADDRESS | {"world_size": 2}, 400, "world_size"),
        ("/update_weights", {}, 400, "master_address"),
        ("/start_weight_update", {"is_checkpoint_format": False}, 400, "is_checkpoint_format"),
    ],
)
def test_invalid_updates_are_rejected(served, path, body, status, says) -> None:
    assert says in served.refused(path, body, status)["message"]


def test_malformed_safetensors_bodies_are_rejected(served: Served, weights: Any) -> None:
    whole = save(weights)
    before = generated(served.llm)
    header = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}'
    bombs = [b"", b"\0" * 8, b"\xff" * 64, whole[:-1], whole + b"\0", whole[8:]]
    bombs.append(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    bombs.append(save({"a": torch.zeros(3)}))
    bombs.append(save(weights | {"extra": torch.zeros(4_600_000, dtype=torch.int8)}))
    for body in bombs:
        answer = upload(served, body)
        assert answer.status_code == 400, answer.text
    assert generated(served.llm) == before


def test_update_over_max_update_bytes_is_rejected(served: Served, weights: Any) -> None:
    body = save(weights)
    size = sum(tensor.nbytes for tensor in weights.values())
    for limit, status in ((size, 200), (size - 1, 400)):
        settings = ServeSettings(training=True, max_body_bytes=16 << 20, max_update_bytes=limit)
        with serving(served.llm, settings) as server:
            answer = upload(server, body)
            assert answer.status_code == status, answer.text


# ---- trainers that fail


def test_update_of_silent_trainer_times_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm, ServeSettings(training=True, update_timeout_s=0.3)) as server:
        monkeypatch.setattr(Updates, "_drop", lambda updates: None)  # the timeout does nothing yet
        update = server.post("/start_weight_update")["update"]
        for path, body in (("/start_weight_update", {}), ("/update_weights", ADDRESS)):
            answer = server.client.post(path, json=body)
            assert answer.status_code == 409 and answer.headers["retry-after"]
            assert "another update" in answer.text and "0.3 s" in answer.text
        monkeypatch.undo()
        upload(server, b"", f"?update={update}")  # activity restarts the timeout
        until(lambda: server.client.post("/start_weight_update", json={}).status_code == 200)
        time.sleep(0.4)
        assert "no update" in server.refused("/finish_weight_update", {}, 409)["message"]


TRAINER = """
import os, signal, sys, torch
from verbatim import rl
sender = rl.WeightSender(sys.argv[1], timeout_s=240)
def die_midway(link, tensors):
    link.send({"name": "a", "tensor": tensors["a"]})
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
sender._send = die_midway
sender.send({"a": torch.ones(1000), "b": torch.ones(1000)})
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_update_of_lost_trainer_is_dropped(llm: LLM, weights: Any, name: str) -> None:
    before = generated(llm)
    settings = ServeSettings(training=True, update_timeout_s=10)
    line = [sys.executable, "-c", TRAINER]
    with serving(llm, settings) as server, started([*line, server.url, name]) as trainer:
        until(lambda: state_of(trainer.pid) in "TZ")
        until(lambda: '"no update' in server.client.post("/finish_weight_update").text)
        assert generated(llm) == before
        sender = rl.WeightSender(server.url, timeout_s=PATIENCE_S)
        assert sender.send(other(weights), version=700) == 700
        assert generated(llm) != before


A = torch.ones(100)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ([{"name": "a", "tensor": torch.ones(100_000)}], "announced"),
        ([{"name": "a", "tensor": A}, {"name": "a", "tensor": A}], "something other"),
        ([{"name": "a", "tensor": None}], "something other"),
        ([{"tensor": A}], "something other"),
        ([], "connection is lost"),
        # announces bytes that never follow
        ([[PREFIX.pack(MAGIC, 64, 1 << 35)]], "34,359,738,432 bytes, and at most"),
    ],
    ids=["larger", "twice", "none", "nameless", "nothing", "huge"],
)
def test_unexpected_tensors_from_trainer_are_rejected(
    served: Served, weights: Any, sent: Any, says: str
) -> None:
    before = generated(served.llm)
    sender = rl.WeightSender(served.url, timeout_s=PATIENCE_S)

    def send(link: Any, _: Any) -> None:
        with suppress(LinkLost):  # the server reads no more than was announced
            for message in sent:
                link.send(message)
        link.close()

    sender._send = send  # type: ignore[method-assign]
    with pytest.raises(VerbatimError, match=says):
        sender.send({"a": A, "b": A})
    assert generated(served.llm) == before
    del sender._send
    assert sender.send(weights) > 0


def test_unsupported_tensor_dtype_is_rejected(served: Served, weights: Any) -> None:
    sender = rl.WeightSender(served.url, timeout_s=PATIENCE_S)
    with pytest.raises(InvalidRequest, match=r"a: torch\.complex64: must be"):
        sender.send(weights | {"a": torch.ones(3, dtype=torch.complex64)})


def test_failure_to_read_the_senders_weights_is_the_errors_cause(served: Served) -> None:
    sender = rl.WeightSender(served.url, timeout_s=PATIENCE_S)
    with pytest.raises(VerbatimError, match="connection is lost") as caught:
        sender.send({"a": torch.ones(3, device="meta")})
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_concurrent_update_is_rejected(served: Served, weights: Any) -> None:
    first, second = (rl.WeightSender(served.url, timeout_s=PATIENCE_S) for _ in range(2))
    before = generated(served.llm)
    send = second._send

    def meanwhile(link: Any, tensors: Any) -> None:
        with pytest.raises(VerbatimError, match="another update"):
            first.send(other(weights))
        send(link, tensors)

    second._send = meanwhile  # type: ignore[method-assign]
    second.send(other(weights))
    assert generated(served.llm) != before


def test_unknown_logprobs_mode_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="raw_logprobs"):
        ServeSettings(logprobs_mode="raw")
