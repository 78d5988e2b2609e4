"""`rl.rollout_func` as called by TRL's `GRPOTrainer`.

`benchmarks/clients/trl_grpo.py` runs the trainer itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.toys import make_toy
from verbatim import LLM, InvalidRequest, NotSupported, SamplingParams, rl, storyteller
from verbatim.rl.trl import _params

PROMPTS = ["Once upon a time", "Once upon a time", "One morning"]
TALK = [[{"role": "user", "content": "Tell me a story."}], [{"role": "user", "content": "Hi"}]]


@pytest.fixture(scope="module")
def trainer() -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = storyteller.path()
    args = SimpleNamespace(
        temperature=0.8, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
        max_completion_length=7, generation_kwargs={"seed": None},
    )  # fmt: skip
    return SimpleNamespace(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        args=args, tools=None, environment_factories=None, eos_token_ids=[2],
        chat_template=None, chat_template_kwargs={},
    )  # fmt: skip


def test_rollout_func_matches_rollout(trainer: Any) -> None:
    torch.manual_seed(3)
    output = rl.rollout_func(PROMPTS, trainer)
    torch.manual_seed(3)
    ids = [trainer.processing_class(text)["input_ids"] for text in PROMPTS]
    r = rl.rollout(trainer.model, ids, _params(trainer))
    assert output == {
        "prompt_ids": ids,
        "completion_ids": [result.outputs[0].token_ids for result in r.results],
        "logprobs": [result.outputs[0].sampled_logprobs for result in r.results],
    }
    # Equal prompts get different noise.
    assert output["completion_ids"][0] != output["completion_ids"][1]


def test_each_call_uses_the_current_module_weights(trainer: Any) -> None:
    """At temperature 1 the log-probs are bit-identical to `score`, also after an update."""
    params = SamplingParams(max_tokens=7)
    weight = trainer.model.lm_head.weight
    for scale in (1.0, 1.5, 1 / 1.5):
        with torch.no_grad():
            weight.mul_(scale)
        output = rl.rollout_func(PROMPTS, trainer, params=params)
        for prompt, completion, logprobs in zip(*output.values(), strict=True):
            scores = rl.score(trainer.model, torch.tensor([prompt + completion]))
            assert scores[0, len(prompt) :].tolist() == logprobs


def test_sampling_params_come_from_trainer_args(trainer: Any) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=7, stop_token_ids=[2])
    assert _params(trainer) == params
    trainer.args.generation_kwargs = {"top_k": 3}
    assert _params(trainer) == params.replace(top_k=3)
    trainer.args.generation_kwargs = {"num_beam": 3}
    with pytest.raises(TypeError, match="num_beams"):
        _params(trainer)
    trainer.args.generation_kwargs = None


def test_conversations_use_the_chat_template(trainer: Any) -> None:
    output = rl.rollout_func(TALK, trainer)
    for ids, messages in zip(output["prompt_ids"], TALK, strict=True):
        text = trainer.processing_class.decode(ids)
        assert messages[0]["content"] in text
        assert text == trainer.processing_class.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )


def test_messages_may_have_no_content(trainer: Any) -> None:
    trainer.chat_template = "{% for m in messages %}{{ m.role }} {% endfor %}"
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    (ids,) = rl.rollout_func([[*TALK[0], calls]], trainer)["prompt_ids"]
    assert trainer.processing_class.decode(ids) == "user assistant "
    trainer.chat_template = None


def test_prompts_outside_given_engine_vocabulary_are_rejected(trainer: Any) -> None:
    with LLM(make_toy("llama")) as llm, pytest.raises(InvalidRequest, match="outside 0 to 127"):
        rl.rollout_func(PROMPTS, trainer, llm=llm)  # it has a smaller vocabulary


def test_tools_and_images_are_rejected(trainer: Any) -> None:
    trainer.tools = [print]
    with pytest.raises(NotSupported, match="tools"):
        rl.rollout_func(PROMPTS, trainer)
    trainer.tools = None
    image = [[{"role": "user", "content": [{"type": "image", "image": None}]}]]
    with pytest.raises(NotSupported, match="images"):
        rl.rollout_func(image, trainer)
