"""`litellm`, as a client of OpenAI's and of Anthropic's endpoints."""

from __future__ import annotations

import litellm
from case import MESSAGES, MODEL, URL, run

OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
SCHEMA = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
TOOL = {
    "type": "function",
    "function": {"name": "animal", "description": "A", "parameters": SCHEMA},
}


def chat_whole_and_streamed() -> None:
    ask = OPENAI | {"messages": MESSAGES, "max_tokens": 20, "seed": 3}
    whole = litellm.completion(**ask).choices[0].message.content
    pieces = litellm.completion(**ask, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole


def chat_tools() -> None:
    done = litellm.completion(**OPENAI, messages=MESSAGES, tools=[TOOL], tool_choice="required")
    assert done.choices[0].message.tool_calls[0].function.name == "animal"


def text_completion() -> None:
    ask = OPENAI | {"model": f"text-completion-openai/{MODEL}", "prompt": "Once", "max_tokens": 5}
    assert litellm.text_completion(**ask).choices[0].text


def responses() -> None:
    assert litellm.responses(**OPENAI, input="Hi", max_output_tokens=10).output


def messages_whole_and_streamed() -> None:
    ask = ANTHROPIC | {"messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = litellm.completion(**ask).choices[0].message.content
    pieces = litellm.completion(**ask, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole


def messages_tools() -> None:
    done = litellm.completion(
        **ANTHROPIC, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=200
    )
    assert done.choices[0].message.tool_calls[0].function.name == "animal"


run(
    chat_whole_and_streamed, chat_tools, text_completion, responses, messages_whole_and_streamed,
    messages_tools,
)  # fmt: skip
