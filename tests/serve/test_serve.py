"""The endpoints of `verbatim serve`: effects of each field, and the same tokens as `LLM.generate`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx
import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from support.programs import PATIENCE_S
from support.serving import Client, Served, serving
from support.toy_tokenizers import byte_level
from support.toys import make_toy
from verbatim import LLM, SamplingParams
from verbatim.sampling.json_schema import close_objects
from verbatim.serve.fields import ChatCompletions, Completions, Sampling
from verbatim.serve.responses import Responses

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
SEEDED: dict[str, Any] = {"seed": 7, "max_tokens": 24, "temperature": 1.0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LLM() as llm, serving(llm) as server:
        yield server


@pytest.fixture
def admitted(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """Collect the sampling parameters of all requests that a test makes."""
    found: list[SamplingParams] = []
    plain = served.llm.engine.admission.admit

    def admit(prompt: Any, params: SamplingParams, **rest: Any) -> Any:
        found.append(params)
        return plain(prompt, params, **rest)

    monkeypatch.setattr(served.llm.engine.admission, "admit", admit)
    return found


# ---- every sampling field: the value sent, and the expected value in SamplingParams

SENT: dict[str, tuple[Any, Any]] = {
    "temperature": (2.0, 2.0),
    "top_p": (0.3, 0.3),
    "n": (2, 2),
    "seed": (9, 9),
    "stop": (["a"], ("a",)),
    "presence_penalty": (-2.0, -2.0),
    "frequency_penalty": (-2.0, -2.0),
    "logit_bias": ({"100": 100.0}, {100: 100.0}),
    "top_k": (1, 1),
    "min_p": (0.9, 0.9),
    "typical_p": (0.01, 0.01),
    "repetition_penalty": (5.0, 5.0),
    "min_tokens": (5, 5),
    "stop_token_ids": ([[361]], ((361,),)),
    "bad_words": ([",", " there"], (",", " there")),
    "allowed_token_ids": ([100, 101], (100, 101)),
    "include_stop_str_in_output": (True, True),
    "ignore_eos": (True, True),
    "skip_special_tokens": (False, False),
    "any_whitespace": (True, True),
    "regex": ("[xyz]{4}", "[xyz]{4}"),
    "grammar": ('start: "b" "c"', 'start: "b" "c"'),
    "choice": (["red", "blue"], ("red", "blue")),
    "priority": (3, 3),
    "timeout_s": (50.0, 50.0),
    "cache_salt": ("s", "s"),
    "draft": (False, False),
}
# Fields that do not change the text of this prompt, or only do so together with another field.
SILENT = "n min_tokens ignore_eos skip_special_tokens priority timeout_s cache_salt draft".split()
SILENT += ["include_stop_str_in_output", "any_whitespace"]
NOT_SAMPLING = {"model", "user", "stream"}  # these have tests of their own
HARMLESS: dict[str, Any] = {
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "me",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
}


def test_every_sampling_field_has_a_test():
    assert SENT.keys() | NOT_SAMPLING | HARMLESS.keys() == Sampling.model_fields.keys()


@pytest.fixture(scope="module")
def plain(served: Served) -> Any:
    """The completion without any optional field."""
    return served.post("/v1/completions", prompt=PROMPT, **SEEDED, logprobs=0)["choices"][0]


@pytest.mark.parametrize("name", SENT)
def test_sampling_field_has_same_effect_as_in_params(served, admitted, plain, name):
    value, meant = SENT[name]
    served.post("/v1/chat/completions", messages=MESSAGES, max_tokens=12, **{name: value})
    if name == "n":
        assert served.refused("/v1/responses", {"input": "Hi", "n": 2})["param"] == "n"
    else:
        served.post("/v1/responses", input="Hi", max_output_tokens=12, **{name: value})
    assert all(getattr(params, name) == meant for params in admitted)
    admitted.clear()
    body = SEEDED | {name: value}
    answer = served.post("/v1/completions", prompt=PROMPT, **body, logprobs=0)
    assert getattr(admitted[0], name) == meant
    params = SamplingParams(**SEEDED | {"logprobs": 0} | {name: meant})
    assert admitted[0] == params
    (result,) = served.llm.generate([PROMPT], params)
    for choice, output in zip(answer["choices"], result.outputs, strict=True):
        assert choice["text"] == output.text
        assert choice["logprobs"]["token_logprobs"] == output.logprobs
        assert (choice["index"], choice["seed"]) == (output.index, output.seed)
    if name not in SILENT:
        assert answer["choices"][0]["text"] != plain["text"]


def test_completions_of_one_or_many_prompts_match_generate(served):
    """Prompts are text or token ids, one or several. The choices of one prompt are adjacent."""
    many = [PROMPT, "The dragon", "Lily and Ben went to the park. " * 20]
    ids = [served.llm.tokenizer.encode(text) for text in many]
    results = served.llm.generate(many, SamplingParams(**SEEDED, n=2))
    wanted = [output.text for result in results for output in result.outputs]
    for prompt in (many, ids):
        answer = served.post("/v1/completions", prompt=prompt, **SEEDED, n=2)
        assert [choice["text"] for choice in answer["choices"]] == wanted
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    for prompt in (many[0], ids[0]):
        answer = served.post("/v1/completions", prompt=prompt, **SEEDED, n=2)
        assert [choice["text"] for choice in answer["choices"]] == wanted[:2]


@pytest.mark.parametrize(
    ("body", "params"),
    [
        pytest.param({"json_schema": {"enum": ["x"]}}, {"json_schema": {"enum": ["x"]}}, id="json"),
        pytest.param({"num_beams": 3}, {"num_beams": 3}, id="beams"),
        pytest.param(
            {"num_beams": 3, "length_penalty": 3.0, "early_stopping": "never"},
            {"num_beams": 3, "length_penalty": 3.0, "early_stopping": "never"},
            id="beams-settled",
        ),
        pytest.param({"max_tokens": 3}, {"max_tokens": 3}, id="max-tokens"),
        pytest.param({"seed": -2}, {"seed": 2**64 - 2}, id="signed-seed"),
    ],
)
def test_completions_only_field_matches_generate(served, body, params):
    answer = served.post("/v1/completions", prompt=PROMPT, **SEEDED | body, logprobs=2)
    (result,) = served.llm.generate([PROMPT], SamplingParams(**SEEDED | params, logprobs=2))
    (output,) = result.outputs
    (choice,) = answer["choices"]
    assert (choice["text"], choice["seed"]) == (output.text, output.seed)
    assert choice["logprobs"]["token_logprobs"] == output.logprobs
    for best, found in zip(output.top_logprobs, choice["logprobs"]["top_logprobs"], strict=True):
        assert best[0][1] in found.values()
        assert 1 <= len(found) <= 3


def test_completions_default_to_16_tokens(served):
    answer = served.post("/v1/completions", prompt=PROMPT, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_echo_returns_prompt_with_logprobs_equal_to_score(served):
    body = SEEDED | {"echo": True, "logprobs": 1}
    answer = served.post("/v1/completions", prompt=PROMPT, **body)
    (choice,) = answer["choices"]
    (result,) = served.llm.generate([PROMPT], SamplingParams(**SEEDED))
    output = result.outputs[0]
    assert choice["text"] == PROMPT + output.text
    found = choice["logprobs"]
    ids = result.prompt_token_ids + output.token_ids
    assert found["token_logprobs"] == served.llm.score(ids)
    assert "".join(found["tokens"]) == choice["text"]
    assert found["top_logprobs"][0] is None
    for token, start in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][start:].startswith(token)
    scored = served.post("/v1/completions", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == found["token_logprobs"]
    assert scored["usage"]["completion_tokens"] == 0
    error = served.refused("/v1/completions", {"prompt": "x", "max_tokens": 0})
    assert error["param"] == "max_tokens"


def test_text_offset_leaves_out_tokens_without_text():
    backend = Backend.from_str(byte_level().hf.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    letters = hf("abc", add_special_tokens=False)["input_ids"]
    body = {"echo": True, "logprobs": 0, "seed": 1, "ignore_eos": True}
    body |= {"allowed_token_ids": [2, *letters]}
    with LLM(make_toy("llama", vocab_size=len(hf)), tokenizer=hf) as llm, serving(llm) as server:
        for prompt in ("the fox", hf("the fox")["input_ids"]):
            body["prompt"] = prompt
            (choice,) = server.post("/v1/completions", **body)["choices"]
            found, text = choice["logprobs"], choice["text"]
            assert "</s>" in found["tokens"][:-1]
            for token, start in zip(found["tokens"], found["text_offset"], strict=True):
                assert text[start:].startswith(token) or token in ("<s>", "</s>")
            (choice,) = server.post("/v1/completions", **body, return_tokens_as_token_ids=True)[
                "choices"
            ]
            assert choice["logprobs"]["text_offset"] == found["text_offset"]
            events = server.stream("/v1/completions", **body)[:-1]
            pieces = [event["choices"][0]["logprobs"]["text_offset"] for event in events]
            assert list(chain.from_iterable(pieces)) == found["text_offset"]


def test_text_offset_counts_a_character_of_several_tokens_once(served):
    body = {"prompt": "🦊 fox", "echo": True, "max_tokens": 0, "logprobs": 0}
    (choice,) = served.post("/v1/completions", **body)["choices"]
    assert choice["logprobs"]["tokens"][-1] == " fox"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1]


def test_stop_string_ends_text_and_is_reported(served):
    text = served.post("/v1/completions", prompt=PROMPT, **SEEDED)["choices"][0]["text"]
    stop = text.split()[-2]
    (choice,) = served.post("/v1/completions", prompt=PROMPT, **SEEDED, stop=stop)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == text[: text.index(stop)]
    kept = served.post(
        "/v1/completions", prompt=PROMPT, **SEEDED, stop=stop, include_stop_str_in_output=True
    )
    assert kept["choices"][0]["text"] == choice["text"] + stop


STREAMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "echo-logprobs": {"echo": True, "logprobs": 1},
    "echo-only": {"echo": True, "logprobs": 0, "max_tokens": 0},
    "several": {"prompt": [PROMPT, "The dragon", "A cat"], "n": 2, "logprobs": 0},
    "stop": {"stop": ["there"]},
    "beams": {"num_beams": 3, "n": 2},
    # Single bytes of characters.
    "emoji": {"allowed_token_ids": list(range(150, 260)), "logprobs": 1},
    "usage": {"stream_options": {"include_usage": True}},
    "no-usage": {"stream_options": {"include_usage": False}},
}


@pytest.mark.parametrize("name", STREAMED)
def test_completion_stream_joins_to_unstreamed_response(served, name):
    body = {"prompt": PROMPT} | SEEDED | STREAMED[name]
    pieces = served.stream("/v1/completions", **body)
    options = body.pop("stream_options", {})
    whole = served.post("/v1/completions", **body)
    assert pieces.pop() == "[DONE]"
    if options.get("include_usage"):
        last = pieces.pop()
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 24)
        assert all(piece["usage"] is None for piece in pieces)
    else:
        assert not any("usage" in piece for piece in pieces)
    for choice in whole["choices"]:
        mine = [c for piece in pieces for c in piece["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert all(piece["finish_reason"] is None for piece in mine[:-1])
        for key in ("finish_reason", "stop_reason", "seed"):
            assert mine[-1][key] == choice[key]
        if choice["logprobs"] is None:
            assert all(piece["logprobs"] is None for piece in mine)
            continue
        for key, entries in choice["logprobs"].items():
            if entries is not None:
                assert [e for piece in mine for e in piece["logprobs"][key] or []] == entries, key


# ---- chats


def test_chat_completion_matches_llm_chat(served):
    """Fields that are not set come from the model's generation_config, as in the chat command."""
    params = served.llm.default_params().replace(seed=3, max_tokens=10, logprobs=2)
    wanted = served.llm.chat(MESSAGES, params).outputs[0]
    body = {"messages": MESSAGES, "seed": 3, "logprobs": True, "top_logprobs": 2}
    for limit in ("max_tokens", "max_completion_tokens"):
        answer = served.post("/v1/chat/completions", **body, **{limit: 10})
        (choice,) = answer["choices"]
        assert choice["message"] == {
            "role": "assistant", "content": wanted.text, "refusal": None,
        }  # fmt: skip
        entries = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == wanted.logprobs
        assert b"".join(bytes(e["bytes"]) for e in entries).decode() == wanted.text
        tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
        assert tops == [[p for _, p in best] for best in wanted.top_logprobs]
    pieces = served.stream("/v1/chat/completions", **body, max_tokens=10, n=2)
    assert pieces.pop() == "[DONE]"
    mine = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == 0]
    assert mine[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(piece["delta"].get("content", "") for piece in mine) == wanted.text
    logprobs = [piece["logprobs"] for piece in mine if piece["logprobs"]]
    assert [entry for each in logprobs for entry in each["content"]] == entries
    assert mine[-1]["delta"] == {}
    assert mine[-1]["finish_reason"] == choice["finish_reason"]
    body |= {"max_tokens": 10, "stream_options": {"include_usage": True}}
    usage = served.stream("/v1/chat/completions", **body)[-2]
    assert (usage["choices"], usage["usage"]) == ([], answer["usage"])


def test_text_parts_are_joined_and_image_parts_rejected(served):
    def body(content: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}], "seed": 1, "max_tokens": 8}

    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story."}]
    joined = served.post("/v1/chat/completions", **body("Tell me a story."))
    assert served.post("/v1/chat/completions", **body(parts))["choices"] == joined["choices"]
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    error = served.refused("/v1/chat/completions", body(image))
    assert error["param"].startswith("messages.0.content")
    assert "'image_url'" in error["message"]


def test_response_format_json_object_or_text(served):
    for form in ("json_object", "text"):
        body = {"response_format": {"type": form}, "max_tokens": 4, "seed": 1}
        answer = served.post("/v1/chat/completions", messages=MESSAGES, **body)
        is_object = answer["choices"][0]["message"]["content"].startswith("{")
        assert is_object == (form == "json_object")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "age": 5}]}, "messages.0.age"),
        ({"messages": [{"role": "user", "content": "x", "name": "Bo"}]}, None),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": 0}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs.tokenizer"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None),  # not in the template
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, None),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_invalid_chat_field_is_rejected_by_name(served, change, param):
    error = served.refused("/v1/chat/completions", {"messages": MESSAGES} | change)
    if param is not None:
        assert error["param"] == param or error["message"].startswith(param), error
    name = next(iter(change))
    assert name.split("_")[0] in error["message"] or name in error["message"], error


# ---- requests rejected by every endpoint


ASKED: dict[str, tuple[type[Sampling], dict[str, Any]]] = {
    "/v1/completions": (Completions, {"prompt": "x"}),
    "/v1/chat/completions": (ChatCompletions, {"messages": MESSAGES}),
    "/v1/responses": (Responses, {"input": "x"}),
}


@pytest.mark.parametrize("path", ASKED)
def test_unknown_field_and_unknown_model_are_rejected(served, path):
    own, body = ASKED[path]
    for name in ("suffix", "best_of", "int", "Mode", "a[b"):
        error = served.refused(path, body | {name: 1})
        assert error["param"] == name
        assert name in error["message"]
    meanings = {"temprature": "temperature", "guided_regex": "regex", "zzz": None}
    meanings["guided_json"] = next(n for n in STRUCTURED if n in own.model_fields)
    for name, meant in meanings.items():
        hint = "" if meant is None else f"; did you mean {meant!r}?"
        message = served.refused(path, body | {name: 1})["message"]
        assert message == f"unsupported field {name!r}{hint}"
    answer = httpx.post(f"{served.url}{path}", json=body, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert len(served.refused(path, body | {"model": "x" * 5000}, 404)["message"]) < 300
    assert len(served.refused(path, body | {"x" * 5000: 1})["param"]) < 3000
    error = served.refused(path, body | {"model": "gpt-4"}, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert served.post(path, **body, model="storyteller", temperature=0.0, stop=["a"])


STRUCTURED = ("json_schema", "response_format", "text")


@pytest.mark.parametrize("path", ASKED)
def test_ignored_openai_fields_change_nothing(served, path):
    body = ASKED[path][1] | {"seed": 1}
    plain, answer = served.post(path, **body), served.post(path, **body, **HARMLESS)
    changing = {"id", "created", "created_at", "completed_at"}
    if path == "/v1/responses":
        shown = HARMLESS | {"store": False, "service_tier": "default"}
        assert {name: answer[name] for name in HARMLESS} == shown
        changing |= HARMLESS.keys() | {"output"}
        assert answer["output"][0]["content"] == plain["output"][0]["content"]
    for name in (answer.keys() | plain.keys()) - changing:
        assert answer[name] == plain[name], name


WRONG: dict[str, list[Any]] = {
    "temperature": [-1, "1", float("nan"), 10**400, True],
    "top_p": [0, 1.5], "min_p": [-0.1], "typical_p": [0], "top_k": [-1, 1.5], "n": [0, 10**9],
    "seed": [2**64, -(2**63) - 1], "max_tokens": [-1, "5", 5.5], "min_tokens": [-1],
    "presence_penalty": [3], "frequency_penalty": [-3], "repetition_penalty": [0],
    "stop": [5, [""], ["x"] * 65, [5]], "stop_token_ids": [["a"], [-1], [[]]],
    "bad_words": ["x", [""]], "allowed_token_ids": [[], [10**9], [-1]],
    "logit_bias": [{"x": 1}, {"5": "a"}, {"-1": 1}, {"99999999": 1}, [1]],
    "regex": ["", "("], "grammar": ["start: ("], "choice": [[], [""], "a"],
    "json_schema": [{"type": "x"}, {"not": {}}], "priority": [10**9, "x"], "timeout_s": [0, -1],
    "logprobs": [-1, 2000, True], "echo": ["yes"], "num_beams": [0, 65], "stream": ["x"],
    "cache_salt": [5], "draft": ["x"], "skip_special_tokens": [1], "any_whitespace": ["x"], "user": [5],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_field_of_wrong_type_or_range_is_rejected_by_name(served, name):
    for value in WRONG[name]:
        body = json.dumps({"model": "storyteller", "prompt": "x", name: value})
        headers = {"content-type": "application/json"}
        answer = served.client.post("/v1/completions", content=body, headers=headers)
        error = answer.json()["error"]
        assert answer.status_code == 400, (value, answer.text)
        assert (error["param"] or "").split(".")[0] == name, (value, error)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [-1], [10**9], [1.5], [True], ["a", 5], None, {}],
                         ids=repr)  # fmt: skip
def test_invalid_prompt_is_rejected(served, prompt):
    assert served.refused("/v1/completions", {"prompt": prompt})["param"].startswith("prompt")


def test_too_long_prompt_and_too_many_choices_are_rejected(served):
    error = served.refused("/v1/completions", {"prompt": [5] * 3000})
    assert error["code"] == "context_length_exceeded"
    assert "3000" in error["message"]
    error = served.refused("/v1/completions", {"prompt": ["x"] * 100, "n": 2})
    assert "128" in error["message"]
    error = served.refused("/v1/chat/completions", {"messages": MESSAGES, "n": 10**6})
    assert error["param"] == "n"


def test_request_that_bans_every_token_is_a_client_error(served):
    body = {"prompt": "x", "allowed_token_ids": [5], "bad_words": [[5]]}
    assert "no token can be drawn" in served.refused("/v1/completions", body)["message"]
    served.until_idle()


# ---- Verbatim's own endpoints


NATIVE: list[dict[str, Any]] = [
    dict(n=2, logprobs=2, prompt_logprobs=1, hidden_states=True, support=True, top_k=9),
    {"num_beams": 2, "length_penalty": 2.0, "early_stopping": True, "stop_token_ids": [[361]]},
    {"json_schema": {"enum": [1]}, "logit_bias": {"100": 1.5}},
]


@pytest.mark.parametrize("fields", NATIVE, ids=lambda fields: next(iter(fields)))
def test_generate_endpoint_matches_llm_generate(served, admitted, fields):
    fields = {"seed": 5, "max_tokens": 6} | fields
    answer = served.post("/v1/generate", prompt=PROMPT, params=fields)
    params = SamplingParams(**fields)
    assert admitted == [params]
    (result,) = served.llm.generate([PROMPT], params)
    assert answer["prompt_token_ids"] == result.prompt_token_ids
    assert answer["prompt_logprobs"] == result.prompt_logprobs
    for found, output in zip(answer["outputs"], result.outputs, strict=True):
        for key in ("token_ids", "logprobs", "sampled_logprobs", "text", "seed", "sample_index"):
            assert found[key] == getattr(output, key), key
        assert found["finish_reason"] == output.finish_reason.value
        if "hidden_states" in fields:
            assert found["hidden_states"] == output.hidden_states.tolist()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"adapter": "law"}, "adapter='law': none is loaded"),
        ({"record_routing": True}, "experts"),
        ({"replay_routing": [[[0]]]}, "experts"),
        ({"record_indices": True}, "indexer"),
        ({"replay_indices": [[[0]]]}, "indexer"),
    ],
)
def test_generate_rejects_features_the_model_lacks(served, fields, said):
    assert said in served.refused("/v1/generate", {"prompt": PROMPT, "params": fields})["message"]


def test_generate_streams_deltas_that_end_with_the_result(served):
    fields = {"seed": 5, "max_tokens": 6}
    ids = served.llm.tokenizer.encode(PROMPT)
    whole = served.post("/v1/generate", prompt=ids, params=fields)
    pieces = served.stream("/v1/generate", prompt=ids, params=fields)
    assert [i for piece in pieces for i in piece["token_ids"]] == whole["outputs"][0]["token_ids"]
    assert pieces[-1]["result"]["outputs"][0]["text"] == whole["outputs"][0]["text"]
    assert all(piece["numerics_key"] == whole["numerics_key"] for piece in pieces)
    for name in ("logits_processors", "nope"):
        error = served.refused("/v1/generate", {"prompt": "x", "params": {name: []}})
        assert name in error["message"]
    for long in ({"max_tokens": "x" * 10**6}, {"x" * 10**6: 1}, {"choice": {"x": "y" * 10**6}}):
        error = served.refused("/v1/generate", {"prompt": "x", "params": long})
        assert len(error["message"]) < 3000


def test_logprobs_endpoint_matches_llm_score(served):
    texts = [PROMPT, "The cat"]
    ids = [served.llm.tokenizer.encode(text) for text in texts]
    wanted = served.llm.score(texts)
    for prompts in (texts, ids):
        answer = served.post("/v1/logprobs", prompts=prompts, top_logprobs=2)
        assert [score["logprobs"] for score in answer["scores"]] == wanted
        assert [score["ids"] for score in answer["scores"]] == ids
        assert len(answer["scores"][0]["top_logprobs"][1]) == 2
    assert served.post("/v1/logprobs", prompts=texts)["scores"][0]["top_logprobs"] is None
    assert served.refused("/v1/logprobs", {"prompts": []})["param"] == "prompts"
    wrong = {"prompts": ["x"], "top_logprobs": -1}
    assert served.refused("/v1/logprobs", wrong)["param"] == "top_logprobs"


def test_tokenize_and_detokenize(served):
    text = "Once there was a 🦊."
    tokenizer = served.llm.tokenizer
    answer = served.post("/tokenize", text=text, return_tokens=True)
    assert answer["ids"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_length"]) == (len(answer["ids"]), served.llm.max_length)
    assert len(answer["tokens"]) == answer["count"]
    assert served.post("/detokenize", ids=answer["ids"]) == {"text": text}
    ids = served.post("/tokenize", messages=MESSAGES)["ids"]
    assert ids == served.llm._chat_ids(MESSAGES)
    assert served.post("/detokenize", ids=ids)["text"].startswith("<|im_start|>")
    assert not served.post("/detokenize", ids=ids, skip_special_tokens=True)["text"].startswith("<")
    bare = served.post("/tokenize", text=text, add_special_tokens=False)["ids"]
    assert bare == tokenizer.encode(text, special_tokens=False)
    messages: dict[str, Any] = {"messages": MESSAGES}
    for body in ({}, messages | {"text": "x"}, messages | {"add_special_tokens": True}):
        served.refused("/tokenize", body)
    for ids in ([-1], [10**6], [2**40]):
        assert str(ids[0]) in served.refused("/detokenize", {"ids": ids})["message"]


def test_models_health_and_engine_endpoints(served):
    (model,) = served.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("storyteller", served.llm.max_length)
    assert model["numerics_key"] == served.llm.info()["numerics_key"]
    assert served.client.get("/v1/models/storyteller").json() == model
    assert served.client.get("/v1/models/a/b").status_code == 404
    assert served.client.get("/health").json() == {"status": "ok"}
    assert served.client.get("/ready").json() == {"status": "ready"}
    for path in ("/health", "/ready"):  # as load balancers ask
        assert served.client.head(path).status_code == 200
    engine = served.client.get("/v1/engine").json()
    assert engine["info"]["architecture"] == "Qwen3ForCausalLM"
    assert engine["stats"]["blocks_used"] == 0
    assert engine["under_way"] == 0


def test_metrics_count_tokens_requests_and_answers(served):
    def figures() -> dict[tuple[str, ...], float]:
        text = served.client.get("/metrics").text
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    before = figures()
    served.post("/v1/completions", prompt=[5, 6, 7], max_tokens=5, n=2, ignore_eos=True)
    served.stream("/v1/completions", prompt=[[5, 6, 7], [5, 6, 8]], max_tokens=5, ignore_eos=True)
    served.refused("/v1/completions", {"prompt": "x", "nope": 1})
    after = figures()

    def grown(*key: str) -> float:
        return after[key] - before.get(key, 0.0)

    assert grown("verbatim_completion_tokens_total") == 20
    assert grown("verbatim_prompt_tokens_total") == 9
    assert grown("verbatim_completions_total", "length") == 4
    assert grown("verbatim_http_answers_total", "/v1/completions", "200") == 2
    assert grown("verbatim_http_answers_total", "/v1/completions", "400") == 1
    assert grown("verbatim_request_seconds_count") == 3
    assert after[("verbatim_running",)] == 0


def test_user_field_is_logged_and_returned(served, caplog):
    with caplog.at_level("INFO", "verbatim.serve"):
        answer = served.post("/v1/completions", prompt="x", max_tokens=1, user="Bo\n")
        response = served.post("/v1/responses", input="x", max_output_tokens=1, user="Li")
    assert [answer["id"] in record.getMessage() for record in caplog.records] == [True, False]
    assert "Bo\\n" in caplog.text
    assert response["user"] == "Li"


# ---- responses


def test_response_matches_chat_of_the_same_messages(served):
    items = [
        {"role": "user", "content": "Hi"},
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "Hello!", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "A story"}]},
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "A story"},
    ]  # fmt: skip
    body = {"seed": 4, "temperature": 0.9}
    wanted = served.post("/v1/chat/completions", messages=messages, **body, max_tokens=12)
    answer = served.post(
        "/v1/responses", input=items, instructions="Be short.", **body, max_output_tokens=12,
        include=["message.output_text.logprobs"], top_logprobs=1, metadata={"a": "b"}, store=False,
        truncation="disabled",
    )  # fmt: skip
    (item,) = answer["output"]
    assert item["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    assert len(item["content"][0]["logprobs"]) == answer["usage"]["output_tokens"] == 12
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (answer["metadata"], answer["instructions"]) == ({"a": "b"}, "Be short.")
    always = {
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tool_calls": None, "background": False,
        "reasoning": {"effort": None, "summary": None}, "service_tier": "default",
        "safety_identifier": None, "prompt_cache_key": None,
    }  # fmt: skip
    assert answer.items() >= always.items()
    text = {"format": {"type": "json_schema", "name": "x"}}
    assert (
        served.refused("/v1/responses", {"input": "x", "text": text})["param"]
        == "text.format.schema"
    )
    for wrong in ("previous_response_id", "background"):
        assert served.refused("/v1/responses", {"input": "x", wrong: "y"})["param"] == wrong
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}
    assert served.refused("/v1/responses", {"input": [call]})["param"] == "input.0.arguments"


def test_response_events_come_in_order(served):
    body = {"input": "Hi", "seed": 2, "max_output_tokens": 40}
    body["include"] = ["message.output_text.logprobs"]
    whole = served.post("/v1/responses", **body)
    events = served.stream("/v1/responses", **body)
    kinds = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    frame = [kind for kind in kinds if kind != "response.output_text.delta"]
    assert frame == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", f"response.{whole['status']}",
    ]  # fmt: skip
    content = whole["output"][0]["content"][0]
    assert "".join(event["delta"] for event in deltas) == content["text"]
    done = events[-1]["response"]["output"][0]["content"][0]
    assert (done["text"], done["logprobs"]) == (content["text"], content["logprobs"])
    assert len(done["logprobs"]) == whole["usage"]["output_tokens"]


def test_openapi_document_has_endpoints_and_field_limits(served):
    document = served.client.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/tokenize",
            "/detokenize", "/v1/logprobs", "/v1/generate", "/health", "/ready", "/metrics",
            "/v1/engine"} <= document["paths"].keys()  # fmt: skip
    assert served.client.get("/docs").status_code == 200
    fields = document["components"]["schemas"]["ChatCompletions"]["properties"]
    assert fields["max_tokens"]["minimum"] == 1 and fields["timeout_s"]["exclusiveMinimum"] == 0
    assert fields["seed"]["minimum"] == -(2**63)
    assert "negative ones" in fields["seed"]["description"]
    assert "only where the server allows it" in fields["priority"]["description"]


def test_http_and_in_process_calls_at_once_get_the_same_tokens(served):
    """A stream over HTTP and `LLM.generate` in another thread share the engine."""
    alone = served.post("/v1/completions", prompt=PROMPT, **SEEDED)["choices"]
    long = {"prompt": "x", "max_tokens": 300, "stream": True}
    with (
        Client(base_url=served.url) as other,
        other.stream("POST", "/v1/completions", json=long) as stream,
    ):
        next(stream.iter_lines())
        (result,) = served.llm.generate([PROMPT], SamplingParams(**SEEDED))
        again = served.post("/v1/completions", prompt=PROMPT, **SEEDED)["choices"]
    assert alone == again
    assert result.outputs[0].text == alone[0]["text"]
    served.until_idle()


# ---- JSON output is compact: no extra whitespace, no properties that the schema does not name

SCHEMA: dict[str, Any] = {  # as written by pydantic, which does not forbid other properties
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "tame": {"type": "boolean"},
    },
    "required": ["name", "legs", "tame"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
MANY = {"n": 20, "seed": 1}


def texts_of(served: Served, path: str, **body: Any) -> list[str]:
    body |= {"max_tokens": 80}
    if path == "/v1/generate":
        outputs = served.post(path, prompt="An animal:", params=MANY | body)["outputs"]
        return [output["text"] for output in outputs]
    if path == "/v1/messages":
        return [served.post(path, messages=MESSAGES, seed=1, **body)["content"][0]["text"]]
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
        (item,) = served.post(path, input="Hi", seed=1, **body)["output"]
        return [item["content"][0]["text"]]
    body |= {"messages": MESSAGES} if "chat" in path else {"prompt": "An animal:"}
    choices = served.post(path, **MANY, **body)["choices"]
    return [c["message"]["content"] if "chat" in path else c["text"] for c in choices]


@pytest.mark.parametrize(
    ("path", "structure"),
    [
        ("/v1/chat/completions", {"response_format": FORM}),
        ("/v1/completions", {"json_schema": SCHEMA | {"additionalProperties": False}}),
        ("/v1/generate", {"json_schema": SCHEMA | {"additionalProperties": False}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_small_json_document_fits_in_80_tokens(served, path, structure):
    for text in texts_of(served, path, **structure):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert json.loads(text).keys() == SCHEMA["properties"].keys()


def test_json_object_mode_writes_no_extra_whitespace(served):
    texts = texts_of(served, "/v1/chat/completions", response_format={"type": "json_object"})
    assert all(text.startswith("{") for text in texts)
    for text in texts:  # ignore string contents; the last string may be cut
        assert not re.search(r"\s\s|[\n\t]", re.sub(r'"(\\.|[^"\\])*("|\\?$)', "", text))


def test_explicit_additional_properties_are_generated(served):
    schema = {
        "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
        "additionalProperties": {"const": 2},
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    texts = texts_of(served, "/v1/chat/completions", response_format=form)
    assert any(text.count(":") > 1 for text in texts)


OPEN: list[dict[str, Any]] = [
    {"type": "object"},
    {"properties": {"a": {}}, "additionalProperties": True},
    {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
    {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
    {
        "$defs": {"A": {"properties": {"a": {}}}},
        "allOf": [{"$ref": "#/$defs/A"}, {"required": ["b"]}],
    },
]


@pytest.mark.parametrize("schema", OPEN, ids=range(len(OPEN)))
def test_open_or_composed_schema_is_not_closed(schema):
    assert close_objects(schema) == schema


def test_nested_object_schemas_are_closed():
    node = {"properties": {"v": {}}}
    schema = {"items": node, "$defs": {"Node": node}, "const": node}
    shut = node | {"additionalProperties": False}
    assert close_objects(schema) == {"items": shut, "$defs": {"Node": shut}, "const": node}
    assert node == {"properties": {"v": {}}}
