"""`langchain-openai`: chats, streams, tools, structured output, log-probs, the Responses API."""

from __future__ import annotations

from case import MODEL, URL, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

CLIENT_OPTIONS = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_retries": 0}
chat = ChatOpenAI(**CLIENT_OPTIONS, max_tokens=300, seed=3)


class Animal(BaseModel):
    """An animal."""

    legs: int
    tame: bool


@tool
def weather(windy: bool) -> str:
    """Return the weather."""
    return "windy" if windy else "calm"


def chat_whole_and_streamed() -> None:
    whole = chat.invoke("Tell me a story.").content
    assert "".join(piece.content for piece in chat.stream("Tell me a story.")) == whole


def chat_log_probs() -> None:
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]
    assert len(logprobs["content"][0]["top_logprobs"]) == 2


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Animal, method=method).invoke("Hi"), Animal)
    assert isinstance(
        chat.with_structured_output(Animal, method="json_schema").invoke("Hi"), Animal
    )


def tools() -> None:
    bound = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    done = bound.invoke("Hi")
    (call,) = done.tool_calls
    turns = [HumanMessage("Hi"), done, ToolMessage("calm", tool_call_id=call["id"])]
    assert bound.invoke(turns) is not None


def responses_api() -> None:
    responses = ChatOpenAI(**CLIENT_OPTIONS, max_tokens=20, use_responses_api=True)
    assert responses.invoke("Hi").content
    assert list(responses.stream("Hi"))


def text_completion() -> None:
    assert OpenAI(**CLIENT_OPTIONS, max_tokens=5).invoke("Once upon a time")


run(
    chat_whole_and_streamed, chat_log_probs, structured_output, tools, responses_api, text_completion
)  # fmt: skip
