"""The `openai` package: chats, completions, responses, streams, tools, parsed answers, log-probs."""

from __future__ import annotations

import openai
from case import MESSAGES, MODEL, URL, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


class Animal(BaseModel):
    """An animal."""

    legs: int
    tame: bool


def chat_whole_and_streamed() -> None:
    ask = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 20, "seed": 3}
    whole = client.chat.completions.create(**ask)
    pieces = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(pieces)
    text = "".join(c.delta.content or "" for piece in pieces for c in piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage == whole.usage


def chat_log_probs() -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3, temperature=0
    )
    for entry in done.choices[0].logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def completions_with_echo() -> None:
    done = client.completions.create(
        model=MODEL, prompt="Once upon a time", echo=True, logprobs=2, max_tokens=3
    )
    logprobs = done.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert "".join(logprobs.tokens) == done.choices[0].text


def chat_parsed() -> None:
    done = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Animal)
    assert isinstance(done.choices[0].message.parsed, Animal)


def chat_tools() -> None:
    tools = [openai.pydantic_function_tool(Animal)]
    ask = {"model": MODEL, "tools": tools, "tool_choice": "required", "seed": 1}
    ask["parallel_tool_calls"] = False
    done = client.chat.completions.parse(**ask, messages=MESSAGES)
    (call,) = done.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Animal)
    with client.chat.completions.stream(**ask, messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    turn = done.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
    turn["tool_calls"][0]["function"].pop("parsed_arguments", None)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is a cat."}
    assert client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, turn, result], max_tokens=5
    )


def responses_whole_and_streamed() -> None:
    ask = {"model": MODEL, "input": "Hi", "max_output_tokens": 20, "extra_body": {"seed": 5}}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def responses_parsed() -> None:
    done = client.responses.parse(model=MODEL, input="Hi", text_format=Animal)
    assert isinstance(done.output_parsed, Animal)


def responses_tools() -> None:
    tool = openai.pydantic_function_tool(Animal)["function"] | {"type": "function"}
    done = client.responses.create(model=MODEL, input="Hi", tools=[tool], tool_choice="required")
    calls = [item for item in done.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": c.call_id, "output": "Yes."} for c in calls
    ]
    items = [*MESSAGES, *(call.model_dump(exclude_none=True) for call in calls), *results]
    assert client.responses.create(model=MODEL, input=items, max_output_tokens=5).output


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def errors_have_their_classes() -> None:
    for change, kind in (
        ({"model": "other"}, openai.NotFoundError),
        ({"prompt": [10**9]}, openai.BadRequestError),
    ):
        try:
            client.completions.create(**{"model": MODEL, "prompt": "x"} | change)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


run(
    models, chat_whole_and_streamed, chat_log_probs, chat_parsed, chat_tools, completions_with_echo,
    responses_whole_and_streamed, responses_parsed, responses_tools, errors_have_their_classes,
)  # fmt: skip
