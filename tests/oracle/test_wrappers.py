"""Multimodal models run on text: the module's own logits in every schedule; images are rejected."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support import toys
from support.pairwise import slow_but
from support.requests_mixed import all_facts, generated, mixed_requests
from support.sweep_forward import assert_equal_in_every_schedule
from support.toy_tokenizers import byte_level
from support.toys import Folders
from support.wrappers import PLACEHOLDER, REFUSED, SUPPORTED, make_wrapper
from verbatim import LLM, NotSupported, Offload, SamplingParams, UnsupportedModel
from verbatim.model.decoder import Decoder
from verbatim.model.limits import placeholders_of
from verbatim.model.loader import ModelSource
from verbatim.model.trial import is_verified
from verbatim.weights.load import open_weights
from verbatim.weights.opening import open_files

FAST = {"glm4v", "inkling2", "qwen3_5_moe"}


@pytest.fixture(scope="module")
def wrapper_folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return toys.saver(tmp_path_factory, make_wrapper)


@pytest.mark.parametrize("name", slow_but(sorted(FAST & {*SUPPORTED}), SUPPORTED))
def test_text_logits_match_multimodal_module(name: str, wrapper_folders: Folders) -> None:
    model = make_wrapper(name)
    assert is_verified(model, model) == (name != "apertus1p5")  # its codec has parametrized layers
    assert_equal_in_every_schedule(model, Decoder(model))
    source = ModelSource(wrapper_folders(name))
    loaded = open_weights(partial(open_files, in_memory=True), source, None)
    assert_equal_in_every_schedule(model, Decoder(loaded.module))


def test_glm_with_pools_of_one_key_matches_its_module() -> None:
    if "glm5_next" not in SUPPORTED:
        pytest.skip("the installed transformers has no glm5_next")
    model = make_wrapper("glm5_next", index_kpool=1)
    assert_equal_in_every_schedule(model, Decoder(model))


def test_experts_with_norms_run_in_one_call(wrapper_folders: Folders) -> None:
    if "muse_spark" not in SUPPORTED:
        pytest.skip("the installed transformers has no muse_spark")
    with LLM(wrapper_folders("muse_spark")) as llm:
        llm.generate([5, 6, 8], SamplingParams(max_tokens=16, ignore_eos=True))
        assert llm.info()["recorded_steps"] == 1  # not "bincount depends on the values of tensors"


def test_multimodal_class_with_unknown_text_model_is_not_verified() -> None:
    model = make_wrapper("llava")
    model.config.text_config = toys.make_toy("doge").config
    assert not is_verified(model, model)


# Toys are cast to their dtype, and Llama 4's vision tower has complex angles.
@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_multimodal_models_are_rejected(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[name][0]):
        Decoder(make_wrapper(name))


@pytest.mark.parametrize("name", slow_but(["qwen3_5"], ["qwen2_5_vl", "qwen3_5", "gemma3"]))
def test_offload_gives_same_tokens(name: str, wrapper_folders: Folders) -> None:
    prompts, params = mixed_requests(6)
    prompts = [[i for i in ids if i != PLACEHOLDER] for ids in prompts]
    expected = generated(LLM(wrapper_folders(name)), prompts, params)
    with LLM(wrapper_folders(name), placement=Offload(gpu="200MB")) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_only_the_part_of_omni_models_that_writes_text_is_opened(name: str, tmp_path: Path) -> None:
    model = make_wrapper(f"{name}_thinker", eos_token_id=None)
    config = dict(model_type=name, thinker_config=model.config.to_dict(), im_end_token_id=5)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"thinker.{key}": value for key, value in model.state_dict().items()}
    save_file(tensors | {"talker.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    prompts, params = mixed_requests(4)
    prompts = [[i for i in ids if i != PLACEHOLDER] for ids in prompts]
    with LLM(tmp_path) as llm:
        assert llm.info()["eos_ids"] == [5]
        model.config.eos_token_id = 5
        assert generated(llm, prompts, params) == generated(LLM(model), prompts, params)


def test_image_token_id_is_found_in_inner_config() -> None:
    from transformers import Phi4MultimodalConfig

    config = Phi4MultimodalConfig(vision_config=dict(image_token_id=100))
    assert placeholders_of(config)[100] == "image_token_id"


@pytest.mark.parametrize("size", [7, 256, 8192])
def test_attention_chunk_sizes_up_to_beyond_max_length_match_module(size: int) -> None:
    model = toys.make_toy("llama4_text", attention_chunk_size=size)
    assert_equal_in_every_schedule(model, Decoder(model))


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "qwen3_5"])
def test_image_inputs_are_rejected(name: str, wrapper_folders: Folders) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    with LLM(wrapper_folders(name)) as llm:
        with pytest.raises(NotSupported, match=f"id {PLACEHOLDER} is the model's image_token"):
            llm.generate([3, PLACEHOLDER, 4])
        with llm.session() as session, pytest.raises(NotSupported, match="image_token"):
            session.generate([3, PLACEHOLDER])
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    with (
        LLM(make_wrapper(name), tokenizer=byte_level().hf) as llm,
        pytest.raises(NotSupported, match="type 'image_url': only text"),
    ):
        llm.chat(messages)
