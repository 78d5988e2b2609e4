"""`instructor`, in its modes for tools and JSON schemas, and with the `anthropic` package."""

from __future__ import annotations

import anthropic
import instructor
import openai
from case import MESSAGES, MODEL, URL, run
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal."""

    legs: int
    tame: bool


def _ask(mode: instructor.Mode) -> None:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=mode)
    animal = client.create(model=MODEL, messages=MESSAGES, response_model=Animal, max_retries=0)
    assert isinstance(animal, Animal)


def tools() -> None:
    _ask(instructor.Mode.TOOLS)


def json_schema() -> None:
    _ask(instructor.Mode.JSON_SCHEMA)


def anthropic_tools() -> None:
    plain = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    client = instructor.from_anthropic(plain, mode=instructor.Mode.ANTHROPIC_TOOLS)
    animal = client.create(
        model=MODEL, messages=MESSAGES, response_model=Animal, max_retries=0, max_tokens=300
    )
    assert isinstance(animal, Animal)


run(tools, json_schema, anthropic_tools)
