"""LoRA adapters over HTTP: selected by model name, loaded from one folder by clients with an API key."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.lora import save_adapter
from support.serving import Served, serving
from support.toys import make_toy, random_ids
from verbatim import LLM, InvalidRequest, SamplingParams
from verbatim.serve.service import Service
from verbatim.serve.settings import ServeSettings

KEY = "a-key-of-the-operator"
IDS = random_ids(12, seed=1)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    module = make_toy("llama")
    module.save_pretrained(folder / "base")
    for seed, name in enumerate(("law", "french")):
        save_adapter(folder / "root" / name, module, seed=seed)
    save_adapter(folder / "outside", module, seed=5)
    (folder / "root" / "link").symlink_to(folder / "outside")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder / "base", adapters={"law": folder / "root" / "law"}) as llm:
        yield llm


@pytest.fixture(scope="module")
def served(llm: LLM, folder: Path) -> Iterator[Served]:
    settings = ServeSettings(name="base", api_keys=(KEY,), adapter_root=str(folder / "root"))
    with serving(llm, settings) as served:
        served.client.headers["Authorization"] = f"Bearer {KEY}"
        yield served


def ids_of(served: Served, model: str) -> Any:
    body = dict(params={"max_tokens": 6, "seed": 3, "ignore_eos": True}, prompt=IDS, model=model)
    return served.post("/v1/generate", **body)["outputs"][0]["token_ids"]


def test_model_field_selects_adapter(served: Served, llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    for model, adapter in (("base", None), ("law", "law")):
        (result,) = llm.generate([IDS], params.replace(adapter=adapter))
        assert ids_of(served, model) == result.outputs[0].token_ids
    params = {"max_tokens": 1, "seed": 3, "adapter": "law"}
    by_params = served.post("/v1/generate", prompt=IDS, params=params)
    assert by_params["outputs"][0]["token_ids"] == ids_of(served, "law")[:1]
    assert ids_of(served, "law") != ids_of(served, "base")
    answer = served.post("/v1/completions", model="law", prompt=IDS, max_tokens=2)
    assert answer["model"] == "law"
    for model, expected in ("base", llm.score(IDS)), ("law", llm.score(IDS, adapter="law")):
        answer = served.post("/v1/logprobs", model=model, prompts=[IDS])
        assert answer["scores"][0]["logprobs"] == expected
    error = served.refused("/v1/completions", {"model": "other", "prompt": IDS}, 404)
    assert error["code"] == "model_not_found" and "'base', 'law'" in error["message"]


def test_adapter_with_the_name_of_the_model_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="'law' has the name of the served model"):
        Service(llm, ServeSettings(name="law"))


def test_models_lists_adapters_with_their_parent(served: Served) -> None:
    models = served.client.get("/v1/models").json()["data"]
    assert [(m["id"], m["parent"]) for m in models] == [("base", None), ("law", "base")]
    assert served.client.get("/v1/models/law").json()["parent"] == "base"


def test_adapters_are_loaded_and_unloaded_over_http(served: Served, llm: LLM) -> None:
    law = ids_of(served, "law")
    served.post(LOAD, lora_name="french", lora_path="french")
    french = ids_of(served, "french")
    assert french not in (law, ids_of(served, "base"))
    error = served.refused(LOAD, {"lora_name": "french", "lora_path": "law"})
    assert "unload it first" in error["message"]
    served.post(LOAD, lora_name="french", lora_path="law", load_inplace=True)
    assert ids_of(served, "french") == law
    served.post(UNLOAD, lora_name="french", lora_int_id=None)
    served.refused("/v1/completions", {"model": "french", "prompt": IDS}, 404)
    assert "adapter='french'" in served.refused(UNLOAD, {"lora_name": "french"})["message"]
    error = served.refused(LOAD, {"lora_name": "base", "lora_path": "law"})
    assert "is the name of the model" in error["message"]
    assert llm.adapters == ["law"]


@pytest.mark.parametrize("path", ["../outside", "link", "/", "/etc/passwd", "..", "a\0b"])
def test_adapter_path_outside_root_is_forbidden(served: Served, path: str) -> None:
    error = served.refused(LOAD, {"lora_name": "x", "lora_path": path}, 403)
    assert "--adapter-root" in error["message"]


@pytest.mark.parametrize("path", ["none", "law/adapter_config.json", "odd"])
def test_invalid_adapter_folder_is_rejected(served: Served, folder: Path, path: str) -> None:
    odd = folder / "root" / "odd"
    shutil.copytree(folder / "root" / "law", odd, dirs_exist_ok=True)
    (odd / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    error = served.refused(LOAD, {"lora_name": "x", "lora_path": path})
    assert path in error["message"] and str(folder) not in error["message"]


def test_loading_adapters_requires_api_key_and_root(served: Served, llm: LLM, folder: Path) -> None:
    body = {"lora_name": "french", "lora_path": "french"}
    for path in (LOAD, UNLOAD):
        wrong = served.client.post(path, json=body, headers={"Authorization": "Bearer no"})
        assert wrong.status_code == 401
    with pytest.raises(InvalidRequest, match="needs an API key"):
        ServeSettings(adapter_root=str(folder))
    with pytest.raises(InvalidRequest, match="must be a folder"):
        ServeSettings(adapter_root=str(folder / "none"), api_keys=(KEY,))
    with serving(llm, ServeSettings(name="base")) as open_to_all:
        open_to_all.refused(LOAD, body, 403)
        open_to_all.refused(UNLOAD, {"lora_name": "law"}, 403)
    assert llm.adapters == ["law"]
