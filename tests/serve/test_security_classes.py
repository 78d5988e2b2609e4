"""The classes of vulnerabilities that other engines had: each a test by that name.

More of each is in tests/unit/test_untrusted.py (checkpoints), tests/placement (DCP, transport of clusters),
tests/unit/test_text.py (templates), tests/unit/test_grammar.py (structures) and test_serve_hostile.py.
"""

from __future__ import annotations

import ast
import json
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import verbatim
from support.serving import Served, serving
from support.toys import make_toy
from verbatim import LLM
from verbatim.errors import VerbatimError
from verbatim.placement.distributed import wire
from verbatim.serve.app import make_app
from verbatim.serve.settings import ServeSettings

KEY = "a-key-of-eight"
SAYS = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
PACKAGE = Path(verbatim.__file__).parent


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = ServeSettings(api_keys=(KEY,), name="storyteller")
    with LLM() as llm, serving(llm, settings) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


class Evil:
    """Unpickled as a call."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def test_pickle_on_an_inter_process_socket() -> None:
    raw = pickle.dumps(Evil())
    with pytest.raises(wire.Garbage):
        wire.sizes(raw.ljust(wire.PREFIX.size, b"\0")[: wire.PREFIX.size])
    with pytest.raises(wire.Garbage):
        wire.decode(raw, bytearray())
    # Nothing of the package unpickles, nor calls what does, but for torch's restricted reading of files.
    unpickling = {
        "loads",
        "Unpickler",
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
    }
    unpickling |= {"recv_object_list", "scatter_object_list", "recv_pyobj", "Listener", "Pipe"}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert not (node.attr in unpickling and owner not in ("json", "tomllib")), (
                    file,
                    node.attr,
                )
                assert (owner, node.attr) != ("pickle", "load"), file
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True", file


@pytest.mark.parametrize(
    "array",
    [["float32", [2**40]], ["float32", [-1]], ["float32", ["1"]], ["object", [1]], ["int8"], 5],
)
def test_tensor_deserialization(array: Any) -> None:
    header = json.dumps({"do": "step", "x": {"\0array": array}}).encode()
    with pytest.raises(wire.Garbage):
        wire.decode(header, bytearray(64))


@pytest.mark.parametrize("indices", [[[0, 10**9]], [[-(2**40), 1]]])
def test_tensor_deserialization_of_sparse_tensors(tmp_path: Path, indices: list[list[int]]) -> None:
    module = make_toy("llama")
    module.save_pretrained(tmp_path)
    tensors = module.state_dict()
    with torch.sparse.check_sparse_tensor_invariants(False):
        tensors["model.norm.weight"] = torch.sparse_coo_tensor(
            torch.tensor(indices), torch.ones(2), (64,), is_coalesced=True, check_invariants=False
        )
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(VerbatimError):
        LLM(tmp_path)


@pytest.mark.parametrize("role", ["model", "draft"])
def test_code_from_a_checkpoint_without_consent(tmp_path: Path, role: str) -> None:
    make_toy("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\n")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config |= {"model_type": "own", "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VerbatimError):
        LLM(tmp_path) if role == "model" else LLM(draft=tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch RAN') }}",
        "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{{ c }}{% endfor %}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ 'a' * 10**9 }}",
    ],
)
def test_chat_template_injection(tmp_path: Path, template: str) -> None:
    llm_template = template.replace("RAN", str(tmp_path / "ran"))
    with LLM() as llm:
        llm.tokenizer.hf.chat_template = llm_template
        with pytest.raises(VerbatimError):
            llm.chat(SAYS)
    assert not (tmp_path / "ran").exists()


def test_chat_template_injection_by_a_client(served: Served) -> None:
    given = {"chat_template": "{{ 7 * 7 }}"}
    error = served.refused(CHAT, {"messages": SAYS, "chat_template_kwargs": given})
    assert "chat_template" in error["message"]
    served.refused(CHAT, {"messages": SAYS} | given)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "(a+)+" * 40 + "$"},
        {"type": "string", "pattern": "a{1,100000}{1,100000}"},
        {"type": 5},
        {"type": ["string", 5]},
        {"type": "nope"},
        {"enum": []},
        {"$ref": "#/nowhere"},
        {"minLength": 10**12, "type": "string"},
    ],
)
def test_schema_and_regex_crash_or_blow_up(served: Served, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": SAYS, "response_format": form, "max_tokens": 2}
    answer = served.client.post(CHAT, json=body)
    assert answer.status_code == (200 if "(a+)+" in str(schema) or "{1," in str(schema) else 400)
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("number", [2**31, 2**63, 2**64, 10**30, -1, -(2**63) - 1])
def test_unchecked_integers_that_reach_cpp(served: Served, number: int) -> None:
    for name in ("max_tokens", "top_k", "n", "logprobs", "min_tokens", "num_beams", "priority"):
        answer = served.client.post(
            "/v1/completions", json={"prompt": "x", "stop": ["e"], name: number}
        )
        assert answer.status_code in ((200, 400) if number > 0 else (400,)), (name, answer.text)
    for body in (
        {"prompt": [number]},
        {"prompt": "x", "stop_token_ids": [number]},
        {"prompt": "x", "allowed_token_ids": [number]},
        {"prompt": "x", "logit_bias": {str(number): 1.0}},
        {"prompt": "x", "bad_words": [[number]]},
    ):
        served.refused("/v1/completions", body)
    assert served.client.post("/detokenize", json={"ids": [number]}).status_code == 400


def test_unbounded_fan_out(served: Served) -> None:
    for change in ({"n": 10**6}, {"prompt": ["x"] * 1000, "n": 100}, {"num_beams": 10**6}):
        served.refused("/v1/completions", {"prompt": "x"} | change)
    served.refused(CHAT, {"messages": SAYS, "n": 10**6})


def test_leak_by_abort(served: Served) -> None:
    body = json.dumps({"model": "storyteller", "prompt": "x", "max_tokens": 400, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
            connection.sendall((head + body).encode())
            connection.recv(100)
    assert served.idle()


def test_control_routes_without_a_key(served: Served) -> None:
    paths = {route.path for route in make_app(served.llm).routes}
    for path in paths - {"/health", "/ready", "/"}:
        for method in ("GET", "POST"):
            answer = served.client.request(method, path, headers={"authorization": ""}, json={})
            assert answer.status_code == 401, (method, path)


def test_server_side_request_forgery(served: Served) -> None:
    """No body makes the server fetch anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_image", "image_url": url},
            {"type": "file", "file": {"file_data": url}},
        ):
            served.refused(CHAT, {"messages": [{"role": "user", "content": [part]}]})
        source = {"type": "image", "source": {"type": "url", "url": url}}
        turns = [{"role": "user", "content": [source]}]
        assert served.client.post(
            "/v1/messages", json={"messages": turns, "max_tokens": 1}
        ).is_error
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
