"""The built-in model: its training grammar, checkpoint folder, stories, chats and draft layer."""

from __future__ import annotations

import importlib
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel

from support.pairwise import slow_but
from verbatim import storyteller

TOOLS = Path(__file__).parents[2] / "tools" / "storyteller"
MODULES = ("lexicon", "plots", "grammar", "chats", "check", "tokenizer", "data", "network")
SURPRISES = [
    "héllo wörld",
    "🦊🪁 👩‍👩‍👧",
    "むかしむかし、狐がいました。",
    "a\tb\r\n\x00 c  ",
    "<b>&amp;</b>",
]


class Tools(NamedTuple):
    """The modules of `tools/storyteller`, which is a folder of scripts and not a package."""

    grammar: ModuleType
    chats: ModuleType
    check: ModuleType
    data: ModuleType
    network: ModuleType


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    hidden = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(TOOLS))
    try:
        yield Tools(*(importlib.import_module(name) for name in Tools._fields))
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
        sys.path[:] = [entry for entry in sys.path if entry != str(TOOLS)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(storyteller.path())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(storyteller.path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def mtp(model: Any) -> Any:
    last = model.config.num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{last}\."]
    return MtpModel.from_pretrained(model).float().eval()


def greedy(model: Any, ids: list[int], max_new_tokens: int = 400) -> torch.Tensor:
    prompt = torch.tensor([ids])
    settings = {"do_sample": False, "temperature": None, "top_p": None}
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **settings
    )[0]


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text)["input_ids"]
    row = greedy(model, ids)
    assert row[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>"), "the turn did not end"
    return str(tokenizer.decode(row[len(ids) : -1]))


# The grammar


def test_same_seed_generates_the_same_story(tools: Tools) -> None:
    texts = [tools.grammar.story(random.Random(seed)).text for seed in range(50)]
    assert texts == [tools.grammar.story(random.Random(seed)).text for seed in range(50)]
    assert len(set(texts)) == 50


def test_stories_of_the_grammar_pass_the_coherence_check(tools: Tools) -> None:
    for seed in range(500):
        text = tools.grammar.story(random.Random(seed)).text
        assert tools.check.problems(text) == [], text
        assert not set(text) & set("{}[]|"), text


def test_coherence_check_detects_broken_stories(tools: Tools) -> None:
    story = tools.grammar.story(random.Random(3))
    text, friend = story.text, story.friend.name
    assert tools.check.problems(text.replace(friend, "Zoe", 1))
    assert tools.check.problems(text[: len(text) // 2])
    assert tools.check.problems(text.replace(story.thing.noun, "thing"))


def test_story_of_the_grammar_mentions_its_topic(tools: Tools) -> None:
    rng = random.Random(0)
    for _ in range(300):
        _, topic = tools.chats.topic(rng)
        story = tools.grammar.story(rng, topic)
        for kind in (topic.hero, topic.friend):
            assert kind is None or kind.noun in story.text
        assert topic.thing is None or topic.thing.noun in story.text
        assert topic.name is None or topic.name in story.text


def test_training_batch_is_determined_by_its_name(tools: Tools, tokenizer: Any) -> None:
    one = tools.data.packed("train:0:1", tokenizer, rows=2, length=512)
    again = tools.data.packed("train:0:1", tokenizer, rows=2, length=512)
    other = tools.data.packed("held-out:1", tokenizer, rows=2, length=512)
    assert torch.equal(one.ids, again.ids)
    assert not torch.equal(one.ids, other.ids)


# The checkpoint folder


def test_checkpoint_folder_is_complete_and_below_12_mb() -> None:
    files = {file.name: file.stat().st_size for file in storyteller.path().iterdir()}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert wanted <= files.keys()
    assert sum(files.values()) < 12e6


def test_storyteller_path_does_not_import_torch() -> None:
    code = (
        "import runpy, sys; "
        f"made = runpy.run_path({str(storyteller.path() / '__init__.py')!r}); "
        "assert (made['path']() / 'config.json').exists() and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_transformers_loads_every_weight_except_the_draft_layer(model: Any) -> None:
    last = model.config.num_hidden_layers
    _, info = AutoModelForCausalLM.from_pretrained(storyteller.path(), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert info["unexpected_keys"]
    assert all(key.startswith(f"model.layers.{last}.") for key in info["unexpected_keys"])


def test_generation_config_lists_all_eos_ids(model: Any, tokenizer: Any) -> None:
    ends = ["<|endoftext|>", "<|im_end|>"]
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(ends)


@pytest.mark.parametrize("text", SURPRISES)
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer)


def test_chat_template_renders_chats_as_in_training(tools: Tools, tokenizer: Any) -> None:
    for seed in range(20):
        chat = tools.chats.conversation(random.Random(seed))
        for prompt in (False, True):
            assert tools.chats.render(chat, add_generation_prompt=prompt) == (
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            )


# The stories


def lapses(tools: Tools, text: str) -> list[str]:
    """Problems of a story except those with names, a known weakness (docs/storyteller.md): the most
    likely name of the second character is often that of the first."""
    found = tools.check.problems(text)
    return [p for p in found if "named" not in p and "story about" not in p and " is [" not in p]


@pytest.mark.parametrize(
    "prompt", slow_but(["Once upon a time"], ["Once upon a time", "One day", "In a small village"])
)
def test_greedy_story_is_coherent_and_ends(
    tools: Tools, model: Any, tokenizer: Any, prompt: str
) -> None:
    row = greedy(model, tokenizer(prompt)["input_ids"])
    assert row[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(row, skip_special_tokens=True)
    assert text.startswith(prompt)
    assert lapses(tools, text) == [], text
    hero = re.search(r"named (\w+)", text)
    assert hero is not None
    assert text.count(hero[1]) > 3


@pytest.mark.slow
def test_half_of_the_sampled_stories_pass_the_whole_coherence_check(
    tools: Tools, model: Any, tokenizer: Any
) -> None:
    prompt = torch.tensor([tokenizer("Once upon a time")["input_ids"]] * 16)
    torch.manual_seed(1)
    rows = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=400)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    coherent = sum(tools.check.problems(text) == [] for text in texts)
    assert coherent >= 8, texts
    assert len(set(texts)) == 16


@pytest.mark.slow
def test_chat_request_is_answered_with_a_story_on_its_topic(
    tools: Tools, model: Any, tokenizer: Any
) -> None:
    ask = {"role": "user", "content": "Tell me a story about a fox and a kite."}
    story = answer(model, tokenizer, [ask])
    assert "fox" in story
    assert "kite" in story
    assert lapses(tools, story) == [], story
    more = {"role": "user", "content": "Can you tell another one?"}
    again = answer(model, tokenizer, [ask, {"role": "assistant", "content": story}, more])
    assert lapses(tools, again) == [], again


def test_small_talk_gets_a_short_answer(model: Any, tokenizer: Any) -> None:
    reply = answer(model, tokenizer, [{"role": "user", "content": "Who are you?"}])
    assert "language model" in reply
    assert len(reply) < 200


def test_unknown_topic_is_declined(model: Any, tokenizer: Any) -> None:
    ask = {"role": "user", "content": "Tell me a story about a robot."}
    reply = answer(model, tokenizer, [ask])
    assert reply.startswith("I do not know a story about")
    assert "Would you like one about" in reply


# The draft layer


def test_most_drafts_equal_the_models_greedy_tokens(
    tools: Tools, model: Any, mtp: Any, tokenizer: Any
) -> None:
    prompt = tokenizer("Once upon a time")["input_ids"]
    row = greedy(model, prompt)
    document = torch.zeros(1, len(row), dtype=torch.long)
    batch = tools.data.Batch(row[None], document, torch.arange(len(row))[None])
    with torch.no_grad():
        hidden = tools.network.hidden_states(model, batch)
        drafts = tools.network.draft_logits(mtp, hidden, batch)[0, :-1].argmax(-1)
    accepted = drafts[len(prompt) - 1 :] == row[len(prompt) + 1 :]
    assert accepted.float().mean() > 0.5
