"""Errors about unknown argument names suggest the intended name."""

from __future__ import annotations

import inspect

import pytest

from verbatim import LLM, SamplingParams
from verbatim.common.spelling import did_you_mean


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_model_len", "max_length"), ("tensor_parallel_size", "placement"), ("dtyp", "dtype")],
)
def test_unknown_llm_option_suggests_a_known_one(name, meant):
    with pytest.raises(TypeError, match=rf"has no argument '{name}'; did you mean '{meant}'\?"):
        LLM(**{name: 1})


def test_unknown_parameter_suggests_a_known_one():
    for name, meant in (("guided_json", "json_schema"), ("temprature", "temperature")):
        with pytest.raises(TypeError, match=f"SamplingParams.*{name}.*{meant}"):
            SamplingParams(**{name: {}})
    with LLM() as llm:
        for name, meant in (("prompt_token_ids", "prompts"), ("max_tokens", "params")):
            with pytest.raises(TypeError, match=f"{name}.*'{meant}'"):
                llm.generate(**{name: [1]})
    assert "temperature" in inspect.signature(SamplingParams).parameters


def test_dissimilar_name_gets_no_suggestion():
    assert did_you_mean("zzz", ["temperature"]) == ""
    assert did_you_mean("t" * 100_000, ["temperature"]) == ""
