"""Vulnerability classes known from other engines, one or more tests for each.

Further tests are in tests/unit/test_untrusted.py (checkpoints), tests/placement (DCP, cluster transport),
tests/unit/test_text.py (templates), tests/unit/test_grammar.py (structured outputs) and
test_serve_starving.py (hostile values in any request field).
"""

from __future__ import annotations

import ast
import contextlib
import http.client
import itertools
import json
import pickle
import re
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import verbatim
from support import toy_tokenizers
from support.lora import save_adapter
from support.pairwise import slow_but
from support.serving import Served, request_of, routes_of, serving, until
from support.stages import ThreadHosts
from support.toys import make_toy
from verbatim import LLM, Cluster, InvalidRequest, Offload, SamplingParams
from verbatim.api.opening import plan_offload
from verbatim.errors import VerbatimError
from verbatim.model.loader import ModelSource
from verbatim.placement.distributed import wire
from verbatim.placement.options import engine_options
from verbatim.serve.app import make_app
from verbatim.serve.settings import ServeSettings

KEY = "a-key-of-eight"
GREEDY = SamplingParams(temperature=0, max_tokens=4)
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
PACKAGE = Path(verbatim.__file__).parent


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = ServeSettings(api_keys=(KEY,), name="storyteller", training=True)
    with LLM() as llm, serving(llm, settings) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


class Evil:
    """Calls `exec` when unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def test_inter_process_sockets_do_not_unpickle() -> None:
    raw = pickle.dumps(Evil())
    with pytest.raises(wire.Garbage):
        wire.sizes(raw.ljust(wire.PREFIX.size, b"\0")[: wire.PREFIX.size])
    with pytest.raises(wire.Garbage):
        wire.decode(raw, bytearray())
    for array in (["float32", ["1"]], ["int8"]):
        header = json.dumps({"do": "step", "x": {"\0array": array}}).encode()
        with pytest.raises(wire.Garbage):
            wire.decode(header, bytearray(64))
    # The package neither unpickles nor calls what does, except torch's restricted file loading.
    unpickling = {"loads", "Unpickler", "recv_pyobj", "Listener", "Pipe", "all_gather_object"}
    unpickling |= {"gather_object", "scatter_object_list"}
    unpickling |= {"broadcast_object_list", "recv_object_list"}
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            # DCP's restricted unpickler imports it.
            if modules & {name.partition(".")[0] for name in imported}:
                assert file.parent.name == "dcp" and imported == ["pickle"], file
            if isinstance(node, ast.Attribute):
                owner, where = getattr(node.value, "id", ""), (file, node.attr)
                assert node.attr not in unpickling or owner in ("json", "tomllib"), where
                assert (owner, node.attr) != ("pickle", "load"), file
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True", file


@pytest.mark.parametrize("indices", [[[0, 10**9]], [[-(2**40), 1]]])
def test_sparse_tensors_with_bad_indices_are_rejected(tmp_path: Path, indices: Any) -> None:
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


def code(ran: Path) -> str:
    return f"open({str(ran)!r}, 'w').close()"


class Runs:
    """Writes the file `ran` when unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> Any:
        return exec, (code(self.ran),)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def without_safetensors(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()


def trap_config(folder: Path, ran: Path) -> None:
    change(folder / "config.json", model_type="own")


def trap_nothing(folder: Path, ran: Path) -> None:
    """Keep the known model type, whose code `auto_map` and the files next to it would replace."""


def trap_weights(folder: Path, ran: Path) -> None:
    without_safetensors(folder)
    torch.save({"model.norm.weight": Runs(ran)}, folder / "pytorch_model.bin")


def trap_old_weights(folder: Path, ran: Path) -> None:
    """Use torch's format from before zip files."""
    without_safetensors(folder)
    weights = {"model.norm.weight": Runs(ran)}
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def trap_shards(folder: Path, ran: Path) -> None:
    without_safetensors(folder)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "part-1.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "part-1.bin").write_bytes(pickle.dumps(Runs(ran)))


def trap_adapter(folder: Path, ran: Path) -> None:
    """Hide the code in a base model that the folder's adapter names."""
    base = folder / "base"
    base.mkdir()
    (folder / "config.json").rename(base / "config.json")
    change(base / "config.json", model_type="own")
    (base / "code.py").write_text(code(ran))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


TRAPS = (trap_nothing, trap_config, trap_weights, trap_old_weights, trap_shards, trap_adapter)


def trapped(folder: Path, trap: Callable[[Path, Path], None], ran: Path) -> Path:
    """Write a model folder in which every file that may hold code writes the file `ran` if executed."""
    module = make_toy("llama")
    module.save_pretrained(folder)
    save_adapter(folder, module)
    (folder / "adapter_config.json").unlink()
    toy_tokenizers.byte_level().hf.save_pretrained(folder)
    kinds = "Config Model ModelForCausalLM ModelForMultimodalLM Processor ImageProcessor".split()
    change(folder / "config.json", auto_map={f"Auto{kind}": "code.Own" for kind in kinds})
    own = {"AutoTokenizer": ["code.Own", "code.Own"], "AutoProcessor": "code.Own"}
    change(folder / "tokenizer_config.json", auto_map=own, chat_template=INJECTED.format(ran))
    (folder / "custom_generate").mkdir()
    for name in ("code.py", "custom_generate/generate.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(code(ran))
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "adapter_model.bin"):
        torch.save(Runs(ran), folder / name)
    trap(folder, ran)
    return folder


INJECTED = "{{{{ cycler.__init__.__globals__.os.system('touch {}') }}}}"


def chats(llm: LLM) -> None:
    with llm:
        llm.chat(MESSAGES)


def serves_training(path: Path) -> None:
    """Send every file of the folder as new weights, then the folder itself as an adapter."""
    settings = ServeSettings(training=True, api_keys=(KEY,), adapter_root=str(path.parent))
    with LLM() as llm, serving(llm, settings) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            octets = {"content-type": "application/octet-stream"}
            body = {"content": file.read_bytes(), "headers": octets}
            assert server.client.post("/update_weights", **body).status_code == 400
        adapter = {"lora_name": "x", "lora_path": path.name}
        raise InvalidRequest(server.refused("/v1/load_lora_adapter", adapter)["message"])


def loads_files(path: Path) -> None:
    """Load every file of the folder as a session and as new weights, then the folder as an adapter."""
    with LLM() as llm:
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            with pytest.raises(VerbatimError):
                llm.session(load=file)
            with pytest.raises(VerbatimError):
                llm.update_weights(file)
        llm.load_adapter("x", path)


def finds_prefixes(path: Path) -> None:
    """Replace every saved prefix by a pickle, which must be a cache miss."""
    kept = path / "kept"
    prompt = list(range(40))
    open_ = partial(LLM, prefix_folder=kept, block_size=8, kv_memory="16MB")
    pickled = next(file for file in path.iterdir() if file.suffix in (".bin", ".pt"))
    with open_() as llm:
        expected = llm.generate([prompt], GREEDY)[0].outputs[0]
    files = [file for file in kept.rglob("*") if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(pickled.read_bytes())
    with open_() as llm:
        (result,) = llm.generate([prompt], GREEDY)
    assert result.num_cached_tokens == 0
    assert result.outputs[0].token_ids == expected.token_ids


def reads_dcp(path: Path) -> None:
    """Open a DCP checkpoint with the config and tokenizer of the folder."""
    name = path / "step_1"
    name.mkdir()
    (name / ".metadata").write_bytes((path / "optimizer.pt").read_bytes())
    with pytest.raises(VerbatimError):
        LLM(name, config=path)
    (name / ".metadata").unlink()
    writer = FileSystemWriter(name, sync_files=False)
    dcp.save({"model": make_toy("llama").state_dict()}, storage_writer=writer)
    for file in path.glob("*.bin"):
        (name / file.name).write_bytes(file.read_bytes())
    chats(LLM(name, config=path, tokenizer=path))


# All entry points for untrusted folders, files and request bodies. Each either rejects them or reads only
# data.
ENTRANCES: dict[str, Callable[[Path], object]] = {
    "model": lambda path: chats(LLM(path)),
    "model offloaded": lambda path: chats(LLM(path, placement=Offload(cpu="64MB"))),
    "model in stages": lambda path: chats(
        LLM(path, placement=Cluster(stages=2, hosts=ThreadHosts()))
    ),
    "model quantized": lambda path: chats(LLM(path, quantization="int8")),
    "draft": lambda path: LLM(make_toy("llama"), draft=path),
    "tokenizer": lambda path: chats(LLM(make_toy("llama"), tokenizer=path)),
    "weights": lambda path: LLM(make_toy("llama")).update_weights(path),
    "adapter": lambda path: LLM(make_toy("llama"), adapters={"x": path}),
    "plan": lambda path: plan_offload(ModelSource(path), Offload(), engine_options()),
    "files": loads_files,
    "server": serves_training,
    "prefixes": finds_prefixes,
    "checkpoint of torch": reads_dcp,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's, of dcp.save
@pytest.mark.parametrize(
    ("entrance", "trap"),
    slow_but(
        [
            (entrance, trap)
            for i, entrance in enumerate(ENTRANCES)
            for j, trap in enumerate(TRAPS)
            if (i + j) % 2
        ],
        itertools.product(ENTRANCES, TRAPS),
    ),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_checkpoint_code_does_not_run_without_consent(
    tmp_path: Path, entrance: str, trap: Callable[[Path, Path], None]
) -> None:
    ran = tmp_path / "ran"
    folder = trapped(tmp_path / "folder", trap, ran)
    with contextlib.suppress(VerbatimError):
        ENTRANCES[entrance](folder)
    assert not ran.exists()


def test_checkpoint_code_runs_with_consent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that the traps of the previous test work."""
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    ran = tmp_path / "ran"
    folder = trapped(tmp_path / "folder", trap_config, ran)
    with pytest.raises(VerbatimError):
        LLM(folder, trust_remote_code=True)
    assert ran.exists()
    ran.unlink()
    torch.load(folder / "optimizer.pt", weights_only=False)
    assert ran.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch RAN') }}",
        "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{{ c }}{% endfor %}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ 'a' * 10**9 }}",
    ],
)
def test_malicious_chat_template_is_rejected(tmp_path: Path, template: str) -> None:
    llm_template = template.replace("RAN", str(tmp_path / "ran"))
    with LLM() as llm:
        llm.tokenizer.hf.chat_template = llm_template
        with pytest.raises(VerbatimError):
            llm.chat(MESSAGES)
    assert not (tmp_path / "ran").exists()


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
def test_invalid_or_costly_schemas_do_not_crash_server(
    served: Served, schema: dict[str, Any]
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": MESSAGES, "response_format": form, "max_tokens": 2}
    answer = served.client.post(CHAT, json=body)
    is_costly = "(a+)+" in str(schema) or "{1," in str(schema)
    assert answer.status_code == (200 if is_costly else 400)
    # The other fields that take a schema.
    nested = {"type": "object", "properties": {"x": schema}}
    function = {"name": "f", "parameters": nested}
    says: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
    others: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "x", "json_schema": schema}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": schema}}),
        ("/v1/generate", {"prompt": "x", "params": {"json_schema": schema}}),
        ("/v1/responses", {"input": "x", "text": {"format": form["json_schema"] | {"type": form["type"]}}}),
        ("/v1/responses", {"input": "x", "tools": [function | {"type": "function"}]}),
        ("/v1/messages", says | {"output_config": {"format": {"type": form["type"], "schema": schema}}}),
        ("/v1/messages", says | {"tools": [{"name": "f", "input_schema": nested}]}),
        (CHAT, says | {"tools": [{"type": "function", "function": function}]}),
    ]  # fmt: skip
    for path, body in others if not is_costly else []:
        assert served.client.post(path, json=body).status_code == 400, (path, body)
    assert served.client.get("/health").status_code == 200


def test_aborted_requests_leak_no_tasks_or_blocks(served: Served) -> None:
    """Clients disconnect during a request, a response or a stream, some with a TCP reset."""
    tasks = served.num_tasks()
    for number in range(40):
        body = {"prompt": "x", "max_tokens": 400, "n": 4, "stream": number % 2 > 0}
        sent = request_of(body, Authorization=f"Bearer {KEY}")
        with served.connect() as connection:
            connection.sendall(sent[: None if number % 7 else 60])
            if number % 4 == 1 and number % 7:
                connection.recv(100)
            if number % 5 == 0:
                reset = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    until(lambda: served.num_tasks() <= tasks)  # the last disconnects may not have been noticed yet
    served.until_idle()


@pytest.mark.parametrize("training", slow_but([True], [False, True]))
def test_routes_without_api_key_return_401(tmp_path: Path, training: bool) -> None:
    settings = ServeSettings(api_keys=(KEY,), training=training, adapter_root=str(tmp_path))
    with LLM() as llm, serving(llm, settings) as server:
        routes = list(routes_of(make_app(llm, settings).routes))
        paths = {re.sub(r"\{.*?\}", "x", route.path) for route in routes}
        assert all(route.methods for route in routes)  # all are HTTP routes, which the guard checks
        assert training == bool(paths & {"/pause", "/update_weights"})
        before = llm.info(), llm.stats()["weight_version"]
        missing, invalid = ("", "Bearer", KEY, f"Basic {KEY}"), (KEY[:-1], f"{KEY}x", "\xff\xfe")
        wrong = dict.fromkeys(missing, "missing_api_key")
        wrong |= {f"Bearer {key}": "invalid_api_key" for key in invalid}
        for path in paths - {"/health", "/ready", "/"} | {"/nope"}:
            for form in (path, f"/{path}", f"{path}/", f"/health/..{path}", f"{path}?key={KEY}"):
                for method in ("GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
                    connection = http.client.HTTPConnection("127.0.0.1", server.port)
                    headers = {"authorization": [*wrong][len(form) % len(wrong)]}
                    connection.request(method, form, "{}", headers)
                    assert connection.getresponse().status == 401, (method, form)
                    connection.close()
            for authorization, code in wrong.items():
                headers = {"authorization": authorization.encode("latin-1")}
                answer = server.client.post(path, headers=headers, json={})
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, code)
                assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/"):
            assert server.client.get(path).status_code == 200
            assert server.client.post(path, json={}).status_code == 405
        assert (llm.info(), llm.stats()["weight_version"]) == before
        assert not llm.stats()["paused"]


def test_server_does_not_fetch_urls_in_requests(served: Served) -> None:
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
        served_turns = {"messages": turns, "max_tokens": 1}
        assert served.client.post("/v1/messages", json=served_turns).is_error
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
