"""A scripted engine, and a function to run CLI commands against it.

A word takes one second, all beams are equal and arrive at the end, and one layer has two experts.
"""

from __future__ import annotations

import signal

import pytest
import torch
from typer.testing import CliRunner

import verbatim
import verbatim.kernels
from verbatim.cli.commands import app
from verbatim.core import Completion, Delta, FinishReason, Metrics, Result
from verbatim.errors import InvalidRequest, ModelError, PromptTooLong
from verbatim.params import SamplingParams


class ScriptedLLM:
    """An engine that always generates WORDS, one token each, and records its prompts and params."""

    WORDS = ("Once ", "there ", "was ", "a 🦊.")
    num_found = 4096  # maximum number of beams that a search finds
    last = None

    def __init__(self, model=None, **settings):
        if model == "missing":
            raise ModelError("no folder 'missing':\n  and no such model on the hub")
        self.model, self.settings = model, settings
        self.asked, self.params, self.closed, self.aborted = [], [], False, False
        self.interrupt_after = None
        self.defaults = SamplingParams(temperature=0.7, top_k=20)
        ScriptedLLM.last = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def default_params(self):
        return self.defaults

    def info(self):
        return {"model": "scripted", "weight_bytes": 1_500_000, "probe": {"padding": 2}, "eos": [1]}

    def stream(self, prompt, params):
        self.asked.append(prompt)
        self.params.append(params)
        if prompt in ("", []):
            raise InvalidRequest("the prompt is empty: it must have at least one token")
        if len(prompt) > 1000:
            raise PromptTooLong(f"the prompt has {len(prompt)} tokens; the limit is 1000")
        if isinstance(prompt, list) and max(prompt) > 100:
            raise InvalidRequest(f"token id {max(prompt)} is outside the vocabulary of 100")
        return self._deltas(prompt, params)

    def chat_stream(self, messages, params):
        if len(messages) > 6 or len(messages[-1]["content"]) > 1000:
            raise PromptTooLong("the conversation has 2000 tokens; the limit is 1000")
        self.asked.append(messages)
        self.params.append(params)
        return self._deltas("chat", params)

    def _deltas(self, prompt, params):
        in_time = len(self.WORDS) if params.timeout_s is None else int(params.timeout_s)
        words = self.WORDS[: params.max_tokens][:in_time]
        beams = params.num_beams > 1
        found = range(min(params.n, self.num_found) if beams else params.n)
        try:
            for number, word in enumerate(words):
                if number + 1 == self.interrupt_after:
                    signal.raise_signal(signal.SIGINT)
                for index in () if beams else found:
                    yield Delta("r", index, word, [number], [-0.5], [0.0], None)
            for index in found if beams else ():
                yield Delta("r", index, "".join(words), list(range(len(words))), [], None, None)
            outputs = [self._completion(index, words, params) for index in found]
            ids = prompt if isinstance(prompt, list) else [1, 2]
            yield Delta("r", 0, "", [], [], [], None,
                        result=Result("r", None, ids, None, None, outputs, 0, Metrics(), 0))  # fmt: skip
        except GeneratorExit:
            self.aborted = True
            raise

    def _completion(self, index, words, params):
        if words == self.WORDS:
            reason = FinishReason.STOP
        elif params.max_tokens is not None and len(words) == params.max_tokens:
            reason = FinishReason.LENGTH
        else:
            reason = FinishReason.TIMEOUT
        beams = params.num_beams > 1
        return Completion(
            index=index,
            sample_index=index,
            text="".join(words),
            token_ids=list(range(len(words))),
            logprobs=[-0.5] * len(words),
            sampled_logprobs=None if beams else [0.0] * len(words),
            top_logprobs=[[(3, float("-inf"))]],
            finish_reason=reason,
            stop_reason=(5, 6),
            seed=11 if params.seed is None else params.seed,
            weight_versions=[0] * len(words),
            score=-0.5 if beams else None,
            routing=torch.ones(2, 1, 2, dtype=torch.int16) if params.record_routing else None,
        )


def interrupted_after(words):
    """Return an engine class in which Ctrl-C interrupts the first answer after so many words."""

    class Interrupted(ScriptedLLM):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.interrupt_after = words

        def chat_stream(self, messages, params):
            self.interrupt_after = words if not self.asked else None
            return super().chat_stream(messages, params)

    return Interrupted


def run(*args, input=b"", engine=ScriptedLLM, kernels=("generic",)):
    """Run a CLI command against the scripted engine."""
    with pytest.MonkeyPatch.context() as patch:
        # setattr would import torch to save the old value.
        patch.setitem(vars(verbatim), "LLM", engine)
        patch.setattr("verbatim.kernels.available", lambda: kernels)
        return CliRunner().invoke(app, list(args), input=input)
