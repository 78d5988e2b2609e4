"""Regression tests: concurrent use, models that change while open, and odd input."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import verbatim
from support import toy_tokenizers
from support.programs import in_thread
from support.requests_mixed import all_facts, facts, mixed_requests
from support.toys import make_toy, random_ids
from verbatim import (
    LLM,
    InvalidRequest,
    ModelError,
    NotSupported,
    SamplingParams,
    UnsupportedModel,
    VerbatimError,
)

PROMPT = random_ids(12, seed=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SMALL: dict[str, Any] = dict(kv_memory="16MB")


def test_two_engines_on_one_module_in_two_threads_give_same_results() -> None:
    model = make_toy("llama")
    prompts, params = mixed_requests(9)
    with LLM(model, **SMALL) as first, LLM(model, **SMALL) as second:
        expected = all_facts(first.generate(prompts, params))

        def call(llm: LLM) -> list[Any]:
            return [all_facts(llm.generate(prompts, params)) for _ in range(3)]

        callers = [in_thread(call, llm) for llm in (first, second)]
        LLM(model, **SMALL).close()  # opening a third one meanwhile must not matter
        assert [caller.result() for caller in callers] == [[expected] * 3] * 2
    assert model.config._attn_implementation != "verbatim"
    model(torch.tensor([PROMPT]))


@pytest.mark.parametrize("act", [torch.sigmoid, nn.functional.silu, lambda x: x @ torch.eye(60)])
def test_hook_that_calls_torch_gives_same_bits_alone_and_batched(act: Any) -> None:
    model = make_toy("llama", hidden_size=60, num_attention_heads=6)
    model.model.layers[1].mlp.register_forward_hook(lambda m, args, out: act(out))
    prompts, params = mixed_requests(9)
    with LLM(model, **SMALL) as llm:
        expected = all_facts(llm.generate(prompts, params))
        alone = [facts(llm.generate(p, q)[0]) for p, q in zip(prompts, params, strict=True)]
    assert alone == expected


class PerTensor(nn.Module):
    """A projection with one scale for all rows, as in dynamic quantization."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return self.linear(torch.round(x / scale) * scale)


def test_layer_that_mixes_rows_is_rejected() -> None:
    model = make_toy("llama")
    model.model.layers[1].mlp.up_proj = PerTensor(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModel, match="changed with the other rows of the batch"):
        LLM(model, **SMALL)


def test_changed_layer_count_or_dtype_of_live_module_raises() -> None:
    model = make_toy("llama")
    ids = torch.tensor([PROMPT])
    before = verbatim.generate(model, ids, max_new_tokens=4, temperature=0.0, ignore_eos=True)
    with LLM(model, **SMALL) as llm:
        model.model.layers.append(copy.deepcopy(model.model.layers[0]))
        model.config.num_hidden_layers = 4
        with pytest.raises(VerbatimError, match="the model's layers changed"):
            llm.generate(PROMPT, GREEDY)
        after = verbatim.generate(model, ids, max_new_tokens=4, temperature=0.0, ignore_eos=True)
        assert after.shape == before.shape and not torch.equal(after, before)
        del model.model.layers[-1]
        model.config.num_hidden_layers = 3
        assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 6
        model.to(torch.bfloat16)
        with pytest.raises(VerbatimError, match="the model's dtype changed"):
            llm.generate(PROMPT, GREEDY)


def test_tokenizer_with_ids_outside_vocabulary_is_rejected_before_forward() -> None:
    tokenizer = toy_tokenizers.byte_level()
    with LLM(make_toy("llama"), tokenizer=tokenizer.hf, **SMALL) as llm:
        with pytest.raises(InvalidRequest, match="belongs to another model"):
            llm.generate("日本語 the fox jumps")
        with pytest.raises(InvalidRequest, match="not Unicode"):
            llm.generate("half a pair: \ud800")
        assert llm.stats()["forwards"] == 0


def test_concurrent_asyncio_requests_run_in_one_batch() -> None:
    model, begun = make_toy("llama"), threading.Event()

    def hold(*_: Any) -> None:
        begun.wait()

    model.register_forward_hook(hold)

    async def one(llm: LLM) -> None:
        async for _ in llm.astream(PROMPT, GREEDY):
            pass

    async def all_of_them(llm: LLM) -> None:
        answers = [asyncio.create_task(one(llm)) for _ in range(12)]
        await asyncio.sleep(0)  # all begin
        begun.set()
        await asyncio.gather(*answers)

    with LLM(model, **SMALL) as llm:
        before = llm.stats()["forwards"]
        asyncio.run(all_of_them(llm))
        assert llm.stats()["forwards"] - before <= 9


def test_prompts_may_be_arrays_or_tensors() -> None:
    with LLM(make_toy("llama"), **SMALL) as llm:

        def prompts(given: Any) -> list[list[int]]:
            return [r.prompt_token_ids for r in llm.generate(given, SamplingParams(max_tokens=1))]

        assert prompts([np.array([3]), np.array([5])]) == [[3], [5]]
        assert prompts([torch.tensor([3, 4]), [5]]) == [[3, 4], [5]]
        assert prompts(np.array([[3, 4], [5, 6]])) == [[3, 4], [5, 6]]
        assert prompts(torch.tensor([3, 4])) == [[3, 4]]
        assert prompts([np.int64(3), np.int64(4)]) == [[3, 4]]
        assert prompts((3, 4)) == [[3, 4]]
        assert llm.score(np.array([3, 4]))[0] is None
        for wrong in (b"abc", {3, 4}, {"prompt": 1}, None, 5, torch.tensor(3), (i for i in [3])):
            with pytest.raises(InvalidRequest):
                llm.generate(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="must be a SamplingParams"):
            llm.generate([3], 5)  # type: ignore[arg-type]


def test_sampling_params_accept_arrays_and_numpy_numbers() -> None:
    params = SamplingParams(
        stop_token_ids=np.array([3, 4]),
        seed=np.int64(5),
        temperature=np.float32(0.5),
        top_k=np.int32(2),
    )
    assert params.stop_token_ids == ((3,), (4,)) and params.seed == 5 and params.top_k == 2


def test_engine_opened_in_inference_mode_works_outside_it() -> None:
    model = make_toy("llama")
    with torch.inference_mode():
        llm = LLM(model, **SMALL)
    with llm:
        assert len(llm.generate(PROMPT, GREEDY)) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "5"),
        ("config.json", "[]"),
        ("model.safetensors.index.json", '{"weight_map": {}}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}'),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": [[2]]}'),
        ("generation_config.json", '{"eos_token_id": "2"}'),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_damaged_file_raises_model_error_of_one_line(
    tmp_path: Path, name: str, content: str
) -> None:
    make_toy("llama").save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    if name.endswith("index.json"):  # the index is read only for sharded checkpoints
        (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(ModelError) as caught:
        LLM(tmp_path)
    assert "\n" not in str(caught.value)


def test_invalid_configs_and_weight_files_are_rejected(tmp_path: Path) -> None:
    make_toy("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changes = dict(hidden_size="64"), dict(hidden_act="no_such_thing"), dict(num_attention_heads=7)
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError):
            LLM(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float64"}))
    with pytest.raises(NotSupported, match="float64"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="a dangling link"):
        LLM(tmp_path)
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 99_999)
    with pytest.raises(ModelError, match="can't be loaded"):
        LLM(tmp_path)
