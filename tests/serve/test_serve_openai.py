"""The unmodified `openai` package as a client of the server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from pydantic import BaseModel

from support.serving import Served, serving, talking
from support.tool_templates import HERMES, THINKING
from verbatim import LLM, SamplingParams
from verbatim.serve.settings import ServeSettings

KEY = "a-key-of-eight"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LLM() as llm, serving(llm, ServeSettings(api_keys=(KEY,), name="tales")) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_models_list_and_retrieve(client):
    assert [model.id for model in client.models.list()] == ["tales"]
    assert client.models.retrieve("tales").owned_by == "verbatim"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completions_whole_and_streamed(client, served):
    ask = {"model": "tales", "prompt": PROMPT, "max_tokens": 10, "seed": 3, "logprobs": 1}
    whole = client.completions.create(**ask)
    (result,) = served.llm.generate([PROMPT], SamplingParams(max_tokens=10, seed=3))
    assert whole.choices[0].text == result.outputs[0].text
    assert whole.choices[0].logprobs.token_logprobs == result.outputs[0].logprobs
    assert whole.usage.completion_tokens == 10
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    pieces = list(client.completions.create(**ask, **with_usage))
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
    assert pieces[-1].usage == whole.usage
    ours = client.completions.create(**ask, extra_body={"top_k": 1})
    assert ours.choices[0].text != whole.choices[0].text


def test_chats_whole_and_streamed(client):
    ask = {"model": "tales", "messages": MESSAGES, "max_completion_tokens": 10, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert len(whole.choices[1].logprobs.content[0].top_logprobs) == 2
    texts = ["", ""]
    for piece in client.chat.completions.create(**ask, stream=True):
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    ask |= {"n": 1, "stop": [texts[0][-2:]]}
    # It raises if the finish reason is length.
    with client.chat.completions.stream(**ask) as stream:
        text = stream.get_final_completion().choices[0].message.content
    assert texts[0].startswith(text)


def test_fields_that_may_be_ignored_are_accepted(client):
    """Agents and gateways send these fields."""
    ask = {"model": "tales", "max_tokens": 3, "seed": 1}
    plain = client.chat.completions.create(messages=MESSAGES, **ask).choices[0].message.content
    part = {"type": "text", "text": MESSAGES[0]["content"], "cache_control": {"type": "ephemeral"}}
    done = client.chat.completions.create(
        messages=[{"role": "user", "content": [part]}], **ask, modalities=["text"], logprobs=False,
        top_logprobs=0, prompt_cache_retention="24h", store=False, metadata={"a": "b"},
    )  # fmt: skip
    assert done.choices[0].message.content == plain
    earlier = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    assert client.chat.completions.create(messages=[*MESSAGES, earlier, *MESSAGES], **ask)
    schema = {"name": "n", "description": "d", "schema": {"type": "object"}}  # LangChain sends both
    form = {"type": "json_schema", "json_schema": schema}
    assert client.chat.completions.create(messages=MESSAGES, **ask, response_format=form)
    made = client.responses.create(
        model="tales", input="Hi", max_output_tokens=3, store=False, truncation="disabled",
        reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"], tools=[],
        tool_choice="auto", parallel_tool_calls=True,
    )  # fmt: skip
    assert made.output_text
    assert not made.output[0].content[0].logprobs


class Animal(BaseModel):
    tame: bool
    legs: bool


def test_structured_outputs_are_parsed(client):
    done = client.chat.completions.parse(
        model="tales", messages=MESSAGES, response_format=Animal, max_tokens=300, seed=1
    )
    assert isinstance(done.choices[0].message.parsed, Animal)
    made = client.responses.parse(
        model="tales", input="Hi", text_format=Animal, max_output_tokens=300
    )
    assert isinstance(made.output_parsed, Animal)


def test_responses_whole_and_streamed(client):
    ask = {"model": "tales", "input": "Hi", "max_output_tokens": 12, "extra_body": {"seed": 5}}
    whole = client.responses.create(**ask)
    assert whole.output_text
    assert whole.usage.output_tokens <= 12
    pieces = list(client.responses.create(**ask, stream=True))
    text = "".join(p.delta for p in pieces if p.type == "response.output_text.delta")
    assert text == whole.output_text
    with client.responses.stream(**ask) as stream:
        assert stream.get_final_response().output_text == text


class Weather(BaseModel):
    """The weather somewhere."""

    windy: bool


def test_tools_are_called_and_their_arguments_parsed():
    with talking(HERMES, added=True) as server:
        llm = server.llm
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            line_end = str(llm.tokenizer.encode("\n", special_tokens=False)[0])
            # Only line ends that the grammar requires.
            terse = {"logit_bias": {line_end: -100.0}, "seed": 1}
            ask = {
                "model": llm.name, "messages": MESSAGES, "tools": [openai.pydantic_function_tool(Weather)],
                "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400, **terse,
            }  # fmt: skip
            done = client.chat.completions.parse(**ask)
            (call,) = done.choices[0].message.tool_calls
            assert isinstance(call.function.parsed_arguments, Weather)
            assert done.choices[0].finish_reason == "tool_calls"
            with client.chat.completions.stream(**ask) as stream:
                final = stream.get_final_completion()
            (again,) = final.choices[0].message.tool_calls
            assert again.function.arguments == call.function.arguments
            turn = [*MESSAGES, done.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"}),
                    {"role": "tool", "tool_call_id": call.id, "content": "no"}]  # fmt: skip
            turn[1]["tool_calls"][0]["function"].pop("parsed_arguments", None)
            client.chat.completions.create(**ask | {"messages": turn, "max_tokens": 2})
            made = client.responses.create(
                model=llm.name, input="Hi", tool_choice="required", max_output_tokens=400,
                tools=[{"type": "function", "name": "f", "strict": True,
                        "parameters": Weather.model_json_schema()}],
                parallel_tool_calls=False, extra_body=terse,
            )  # fmt: skip
            (item,) = made.output
            assert json.loads(item.arguments).keys() == {"windy"}
            back = client.responses.create(
                model=llm.name, max_output_tokens=2, input=[
                    {"role": "user", "content": "Hi"}, item.model_dump(exclude_none=True),
                    {"type": "function_call_output", "call_id": item.call_id, "output": "yes"},
                ],
            )  # fmt: skip
            assert back.usage.output_tokens == 2


def test_python_blocks_of_serve_docs_run_in_order(capsys):
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    with talking(HERMES[: HERMES.index("{%- for")] + THINKING, added=True) as server:
        # The block that is left out starts the server.
        requests = (block for block in blocks if "run(llm" not in block)
        code = "\n".join(requests).replace("http://127.0.0.1:8000", server.url)
        exec(compile(code, "docs/serve.md", "exec"), {})
    out = capsys.readouterr().out
    assert "weather" in out and "reasoning_tokens" in out


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt": [10**9]}, openai.BadRequestError),
        ({"model": "gpt-4"}, openai.NotFoundError),
        ({"suffix": "x"}, openai.BadRequestError),
        ({"best_of": 2}, openai.BadRequestError),
    ],
    ids=["id", "model", "suffix", "best-of"],
)
def test_errors_map_to_openai_exception_classes(client, change, error):
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": "tales", "prompt": "x"} | change)
    assert caught.value.body["message"]


def test_wrong_key_is_an_authentication_error(served):
    stranger = openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong-key", max_retries=0)
    with stranger as client:  # noqa: SIM117
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
