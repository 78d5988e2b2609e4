"""Bad input is rejected before any forward, with the field, its value and the limit in the message."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.toys import VOCAB, make_toy
from verbatim import (
    LLM,
    InvalidRequest,
    ModelError,
    NotSupported,
    PromptTooLong,
    SamplingParams,
    UnsupportedModel,
    VerbatimError,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(temperature=-0.5), "temperature=-0.5: must be a finite number, 0 or more"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature="hot"), "temperature='hot': must be a finite number"),
        (dict(top_p=0.0), "top_p=0.0: must be a finite number above 0 and at most 1"),
        (dict(top_p=1.5), "top_p=1.5"),
        (dict(top_k=-1), "top_k=-1: must be an integer, 0 or more"),
        (dict(top_k=2.5), "top_k=2.5: must be an integer"),
        (dict(min_p=1.1), "min_p=1.1"),
        (dict(typical_p=0), "typical_p=0"),
        (
            dict(repetition_penalty=0.0),
            "repetition_penalty=0.0: must be a finite number, 1e-30 or more",
        ),
        (dict(presence_penalty=3.0), "presence_penalty=3.0"),
        (dict(n=0), "n=0: must be an integer, 1 to 4096"),
        (dict(max_tokens=-1), "max_tokens=-1"),
        (dict(min_tokens=5, max_tokens=4), "min_tokens=5 is more than max_tokens=4"),
        (dict(seed=2**64), "seed=18446744073709551616"),
        (dict(seed=-1), "seed=-1"),
        (dict(stop=[""]), "each stop must be a non-empty string"),
        (dict(stop=["x" * 2000]), "2000 characters; at most 1024"),
        (dict(stop_token_ids=[-4]), "-4 is not a token id"),
        (dict(stop_token_ids=["a"]), "neither an id nor a list of ids"),
        (dict(allowed_token_ids=[]), "allowed_token_ids is empty"),
        (dict(logit_bias={3: float("inf")}), r"logit_bias\[3\]=inf"),
        (dict(bad_words="word"), "must be a list of strings"),
        (dict(logprobs=-1), "logprobs=-1"),
        (dict(ignore_eos=1), "ignore_eos=1: must be True or False"),
        (dict(json_schema={}, regex="a"), "json_schema and regex: at most one"),
        (dict(json_schema="{"), "json_schema is not a JSON schema"),
        (dict(json_schema=dict), r"not a JSON schema.* pass model_json_schema\(\)"),
        (dict(json_schema=[1]), "a schema must be an object, true or false"),
        (dict(json_schema={"const": math.nan}), "not a JSON schema.* float"),
        (dict(regex=""), "regex=''"),
        (dict(grammar=3), "grammar=3"),
        (dict(choice="ab"), "choice='ab': must be a list"),
        (dict(choice=[]), "choice="),
        (dict(num_beams=0), "num_beams=0: must be an integer, 1 to 64"),
        (dict(num_beams=2, n=3), "n=3: must be at most num_beams=2"),
        (dict(num_beams=2, early_stopping="soon"), "early_stopping='soon'"),
        (dict(logits_processors=[3]), "3 is not callable"),
        (dict(priority=0.5), "priority=0.5: must be an integer"),
        (dict(timeout_s=0), "timeout_s=0.0: must be a finite number of seconds above 0"),
        (dict(cache_salt=b"x"), "cache_salt=b'x'"),
        (dict(adapter=3), "adapter=3"),
        (dict(record_routing=1), "record_routing=1: must be True or False"),
        (dict(replay_routing=torch.zeros(1, 1, 1)), "torch.float32 .* must be integers of shape"),
        (dict(replay_routing=torch.ones(1, 1, 1, device="meta")), "replay_routing: .*meta"),
        (dict(replay_routing=[[[-1, 0]]]), "experts below 0"),
        (dict(replay_routing=[[[1, 1]]]), "to the same expert twice"),
        (dict(replay_routing=[[[True]]]), "must be integers"),
        (dict(timeout_s=float("inf")), "timeout_s=inf: must be a finite number of seconds"),
        (dict(temperature=10**400), "temperature=inf: must be a finite number"),
        (dict(logit_bias={7: 1e39}), "a number in float32"),
        (dict(regex="a" * 200_000), "regex has 200000 characters; at most 131072"),
        (dict(choice=["a" * 99_999] * 2), "choice has 199998 characters"),
        (dict(stop_token_ids=range(2000)), "2000 entries; at most 1024"),
        (dict(hidden_states="yes"), "hidden_states='yes'"),
        (dict(stop=5), "stop"),
        (dict(stop_token_ids=5), "stop_token_ids"),
        (dict(allowed_token_ids=5), "allowed_token_ids"),
        (dict(bad_words=5), "bad_words"),
        (dict(bad_words=[5.5]), "bad_words"),
        (dict(logit_bias=[1]), "logit_bias"),
        (dict(logit_bias={"a": 1}), "logit_bias"),
        (dict(logit_bias={5: None}), "logit_bias"),
        (dict(logit_bias={5.7: 1}), "logit_bias"),
        (dict(logit_bias={True: 1}), "logit_bias"),
        (dict(n=10**9), "n=1000000000"),
        (dict(cache_salt="\ud800"), "must be Unicode"),
        (dict(regex="a+", min_tokens=2), "min_tokens=2 with regex"),
        (dict(num_beams=2, top_k=3), "top_k=3 with num_beams=2"),
        (dict(num_beams=2, temperature=0.5), "temperature=0.5 with num_beams=2"),
        (dict(length_penalty=2.0), "length_penalty=2.0: requires num_beams above 1"),
        (dict(early_stopping=True), "early_stopping=True: requires num_beams"),
    ],
)
def test_invalid_params_are_rejected(fields: dict[str, Any], message: str) -> None:
    not_together = " with " in message or "requires" in message
    with pytest.raises(NotSupported if not_together else InvalidRequest, match=message) as caught:
        SamplingParams(**fields)
    assert isinstance(caught.value, ValueError)


def test_logit_bias_keys_may_be_strings() -> None:
    given = {"7": 1.0, "0": 2.0, "0" * 30 + "12": 3.0}
    assert SamplingParams(logit_bias=given).logit_bias == {7: 1.0, 0: 2.0, 12: 3.0}


def test_invalid_routing_options_are_rejected() -> None:
    with LLM(make_toy("qwen3_moe")) as llm:
        shapes = {(2, 3, 1): r"shape \[2, 3, 1\]; .* up to \[6, 3, 2\]", (7, 3, 2): r"shape \[7, 3"}
        for shape, message in shapes.items():
            routing = torch.arange(shape[2]).expand(shape)
            with pytest.raises(InvalidRequest, match=message):
                llm.generate([5, 6], SamplingParams(replay_routing=routing, max_tokens=4))
        sixth = torch.tensor([5, 6]).expand(2, 3, 2)
        with pytest.raises(InvalidRequest, match="names expert 6; there are 6"):
            llm.generate([5, 6], SamplingParams(replay_routing=sixth, max_tokens=4))
        with pytest.raises(NotSupported, match="record_routing with num_beams=2"):
            llm.generate([5, 6], SamplingParams(record_routing=True, num_beams=2))


def test_params_compare_by_value_and_can_be_copied() -> None:
    routing = torch.tensor([[[1, 2]]])
    params = SamplingParams(replay_routing=routing, logit_bias={1: 2.0}, stop=["a"])
    assert params == params.replace() and hash(params) == hash(params.replace())
    assert params != params.replace(replay_routing=routing + 1)
    assert params != params.replace(logit_bias={1: 3.0}) and params != "params"
    assert pickle.loads(pickle.dumps(params)) == params and copy.deepcopy(params) == params


def test_replayed_records_ignore_torch_default_device() -> None:
    fields = dict(replay_routing=[[[3, 1]]] * 2, replay_indices=[[[0]], [[1]]])
    with torch.device("meta"):
        params = SamplingParams(**fields)
    assert params == SamplingParams(**fields)


def test_params_copy_mutable_arguments() -> None:
    stops, bias = [[1, 2]], {3: 1.0}
    params = SamplingParams(stop_token_ids=stops, logit_bias=bias)
    stops[0].append(9)
    bias[4] = 2.0
    assert params.stop_token_ids == ((1, 2),) and params.logit_bias == {3: 1.0}


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, InvalidRequest, "the prompt is empty"),
        ([[3], []], {}, InvalidRequest, "the prompt is empty"),
        ([None], {}, InvalidRequest, "prompt=None: must be"),
        ("words", {}, InvalidRequest, "needs a tokenizer"),
        ([3, VOCAB], {}, InvalidRequest, f"id {VOCAB} is outside 0 to {VOCAB - 1}"),
        ([-1], {}, InvalidRequest, "id -1 is outside"),
        ([3, 4.5], {}, InvalidRequest, "4.5 is not a token id"),
        ([3] * 256, {}, PromptTooLong, "has 256 tokens; the limit .* is 256"),
        ([3] * 300, {}, PromptTooLong, "has 300 tokens; the limit .* is 256"),
        ([3] * 250, dict(max_tokens=7), PromptTooLong, "make 257; the limit"),
        ([3], dict(stop="x"), InvalidRequest, "stop"),
        ([3], dict(bad_words=["x"]), InvalidRequest, "bad_words as strings needs a tokenizer"),
        ([3], dict(logit_bias={VOCAB: 1.0}), InvalidRequest, "logit_bias: token id"),
        ([3], dict(allowed_token_ids=[500]), InvalidRequest, "allowed_token_ids: token id 500"),
        ([3], dict(stop_token_ids=[[4, VOCAB]]), InvalidRequest, "stop_token_ids: token id"),
        ([3], dict(logprobs=VOCAB + 1), InvalidRequest, "more than the vocabulary"),
        ([5] * 248, dict(min_tokens=9), InvalidRequest, "min_tokens=9 is more than the 8 tokens"),
        ([3], dict(record_routing=True), NotSupported, "record_routing: none .* experts"),
        ([3], dict(replay_routing=[[[1]]]), NotSupported, "experts"),
        ([3], dict(choice=["a"]), InvalidRequest, "choice needs a tokenizer"),
        ([3], dict(json_schema=True), InvalidRequest, "json_schema needs a tokenizer"),
        ([[3, 4], [999]], {}, InvalidRequest, "outside"),
    ],
)
def test_bad_requests_are_rejected_before_any_forward(
    prompt: Any, params: dict[str, Any], error: type[VerbatimError], message: str
) -> None:
    sampling_params = SamplingParams(**params)
    with LLM(make_toy("llama")) as llm:
        calls: list[Callable[[], Any]] = [lambda: llm.generate(prompt, sampling_params)]
        calls.append(lambda: asyncio.run(llm.agenerate(prompt, sampling_params)))
        if not (prompt and (prompt[0] is None or isinstance(prompt[0], list))):  # one prompt
            calls.append(lambda: llm.stream(prompt, sampling_params))
        for call in calls:
            with pytest.raises(error, match=message):
                call()
        assert llm.stats()["forwards"] == llm.stats()["blocks_used"] == 0


def test_empty_values_are_no_params() -> None:
    with LLM(make_toy("llama")) as llm:
        for call in (llm.stream, llm.astream, llm.generate):
            with pytest.raises(InvalidRequest, match="must be a SamplingParams"):
                call([3, 4], {})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(device="cuda"), NotSupported, "device='cuda'"),
        (dict(placement=object()), NotSupported, "placement"),
        (dict(draft=3), InvalidRequest, "draft=3"),
        (dict(num_draft_tokens=2), InvalidRequest, "num_draft_tokens=2"),
        (dict(draft="ngram", num_draft_tokens=65), InvalidRequest, "num_draft_tokens=65"),
        (dict(quantization="int8"), NotSupported, "quantization='int8-g64'"),
        (dict(prefix_cache="yes"), InvalidRequest, "prefix_cache"),
        (dict(fused="yes"), InvalidRequest, "fused"),
        (dict(deterministic=False), NotSupported, "deterministic=False"),
        (dict(dtype="bfloat16"), NotSupported, "a live module keeps its own"),
        (dict(kv_dtype="int3"), NotSupported, "kv_dtype='int3'|dtype='int3'"),
        (dict(kv_memory="lots"), InvalidRequest, "kv_memory='lots'"),
        (dict(kv_memory="150%"), InvalidRequest, "at most 100%"),
        (dict(kv_memory="900TB"), InvalidRequest, "this machine's memory"),
        (dict(block_size=0), InvalidRequest, "block_size=0"),
        (dict(max_batch_tokens=0), InvalidRequest, "max_batch_tokens=0"),
        (dict(max_length=1000), InvalidRequest, "the model's limit is 256"),
        (dict(num_threads=0), InvalidRequest, "num_threads=0"),
        (dict(num_threads=10**6), InvalidRequest, "num_threads=1000000: at most"),
    ],
)
def test_bad_options_are_rejected(
    options: dict[str, Any], error: type[VerbatimError], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(make_toy("llama"), **options)


@pytest.mark.parametrize("value", ["2MB", "2MiB", 2_000_000, "0.1%"])
def test_kv_memory_is_a_number_a_size_or_a_percentage(value: Any) -> None:
    with LLM(make_toy("llama"), kv_memory=value, max_sequences=10_000) as llm:
        assert 0 < llm.info()["kv_bytes"] <= 40_000_000


class Folder:
    """A saved toy checkpoint that tests damage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_toy("llama").save_pretrained(path)

    def edit(self, **changes: Any) -> None:
        config = self.path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_folder_gives_same_tokens_as_live_module_or_has_another_dtype(folder: Folder) -> None:
    params = SamplingParams(seed=1, max_tokens=6)
    with LLM(folder.path) as loaded, LLM(make_toy("llama")) as live:
        a, b = (llm.generate([5, 6, 7], params)[0].outputs[0] for llm in (loaded, live))
        assert loaded.tokenizer is None and a.token_ids == b.token_ids and a.logprobs == b.logprobs
    with LLM(folder.path, dtype="bfloat16") as llm:
        assert llm.info()["dtype"] == llm.info()["kv_dtype"] == "bfloat16"


def test_dtype_that_config_lacks_is_that_of_most_weights(folder: Folder) -> None:
    module: Any = make_toy("llama").bfloat16()
    module.model.norm.float()
    module.save_pretrained(folder.path)
    folder.edit(dtype=None)
    with LLM(folder.path) as llm:
        assert llm.info()["dtype"] == "bfloat16"


def test_missing_and_damaged_checkpoints_are_reported(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at '/no/such/folder'"):
        LLM("/no/such/folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        LLM(tmp_path / "empty")
    weights = folder.path / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="damaged or cut short"):
            LLM(folder.path)
    weights.unlink()
    with pytest.raises(ModelError, match="no weights"):
        LLM(folder.path)
    weights.write_bytes(whole)
    (folder.path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        LLM(folder.path)


def test_missing_weights_and_unsupported_architectures_are_rejected(folder: Folder) -> None:
    for changes, error, message in (
        (dict(num_hidden_layers=4), ModelError, "weights are missing"),
        (dict(model_type="alien"), UnsupportedModel, "alien"),
        (dict(model_type="vit"), UnsupportedModel, "'vit' is not a causal language model"),
    ):
        folder.edit(architectures=["AlienForCausalLM"], **changes)
        with pytest.raises(error, match=message):
            LLM(folder.path)


def test_weights_of_another_shape_are_rejected(folder: Folder) -> None:
    folder.edit(intermediate_size=48)
    with pytest.raises(ModelError, match=r"down_proj\.weight is \[64, \d+\]; .* it is \[64, 48\]"):
        LLM(folder.path)


def test_unsupported_modules_are_rejected() -> None:
    with pytest.raises(UnsupportedModel, match="holds no transformers model"):
        LLM(torch.nn.Linear(3, 3))
    with pytest.raises(NotSupported, match="float64"):
        LLM(make_toy("llama", dtype=torch.float64))
    with pytest.raises(InvalidRequest, match="model=3"):
        LLM(3)  # type: ignore[arg-type]
