"""`RemoteGenerationMixin`: `generate` and sessions on an open engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verbatim.api.llm import LLM
from verbatim.api.padded import PaddedRows, check_padded
from verbatim.api.tensors import draw_seed
from verbatim.common.checks import check_kind
from verbatim.compat.petals.call import GenerateCall
from verbatim.compat.petals.session import InferenceSession, active_session, entered
from verbatim.compat.petals.settings import UNSUPPORTED_BY_TRANSFORMERS, Settings, is_off
from verbatim.compat.shared import declared_pad_id
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.options import on_cpu
from verbatim.params import SamplingParams

_log = logging.getLogger("verbatim.compat.petals")


class RemoteGenerationMixin:
    """`generate` and `inference_session`."""

    llm: LLM  # provided by the subclass

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], Any] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        *,
        session: InferenceSession | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Tensor | Any:
        """Continue each row of `inputs`.

        Args:
            inputs: `[B, P]` integers, also as `input_ids=`, padded on the left. None continues the
                session, or starts from the model's BOS if there is no session or it is empty.
            generation_config: values for parameters that the call leaves out. Then those of the model apply,
                then transformers' defaults.
            logits_processor: transformers' processors or functions of `input_ids` `[1, L]` and `scores`
                `[1, V]`, called once per token and row, without pads, rows in any order. They must be pure.
            stopping_criteria: functions of `input_ids` `[1, L]` and `scores` (None without
                `output_scores`), called for each new token of a row; True ends the row.
            prefix_allowed_tokens_fn: `f(row, ids)` returns the allowed next ids.
            synced_gpus, assistant_model: only False and None; drafting is set when the model is opened.
            streamer: its `put` is called with the inputs, then with each new column `[B]`, and then `end`.
            session: None takes the session of the enclosing `with` block, if any.
            seed: an extension. Row b draws with this seed and sample index b. By default it is drawn from
                torch's default generator: once per session, at its first call, or once per sampling call
                without a session.
            kwargs: transformers' generation parameters (`verbatim.compat.petals.settings.SUPPORTED` names
                those that the engine runs). With others, the model's own `generate` runs, while all engines
                of this process wait, if transformers' module is in this process and there is no session.
                `attention_mask` `[B, P]`, without which leading pads are masked; `tokenizer`, for
                `stop_strings`. `max_length` counts pads and earlier columns of the session. Exactly one of
                `max_length` and `max_new_tokens` is required.

        Returns:
            `[B, P + N]` int64 on the inputs' device: this call's prompt and completion, with pads after
            a row's end. With `return_dict_in_generate` transformers' output, with a
            `RemotePastKeyValues` as its `past_key_values`.

        Raises:
            InvalidRequest, NotSupported, PromptTooLong: before any token is generated (all ValueErrors); a
                session is unchanged.
            OutOfBlocks: too few blocks for a session's rows. SessionBusy, EngineClosed.
            RequestFailed: no token can be drawn for a row.
        """
        ids = kwargs.pop("input_ids", None)
        if inputs is not None and ids is not None:
            raise InvalidRequest("inputs and input_ids are both given; they are the same thing")
        inputs = ids if inputs is None else inputs
        if inputs is not None:
            check_padded(inputs, None, name="inputs")
        session = self._session(session)
        SamplingParams(seed=seed)  # validates it
        arguments = {
            **kwargs,
            "generation_config": generation_config,
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "assistant_model": assistant_model,
            "streamer": streamer,
        }
        if synced_gpus:
            raise NotSupported("synced_gpus=True: not supported; call LLM.generate on each rank")
        try:
            with on_cpu():
                run = self._engine_call(inputs, session, seed, **arguments)
        except NotSupported as why:
            module = self._whole_module()
            if module is None or session is not None or _is_unsupported(arguments):
                raise
            _log.info("generate runs in the model's own loop: %s", why)
            engine, rows = self.llm.engine, None if inputs is None else inputs.to(module.device)
            has_mask = kwargs.get("attention_mask") is not None
            if rows is not None and not has_mask and kwargs.get("inputs_embeds") is None:
                # transformers would mask pad ids within a prompt, or none if the pad is an EOS id.
                configs = SimpleNamespace(**kwargs), generation_config, engine.generation_config
                tokenizer = getattr(self.llm.tokenizer, "hf", None)
                pad_id = declared_pad_id(*configs, engine.config, tokenizer)
                mask = rows != (-1 if pad_id is None else pad_id)
                mask[:, -1:] = True  # a prompt may be one BOS id that is also the pad id
                arguments["attention_mask"] = mask.long().cummax(1).values
            output = engine.call_module("generate", rows, seed=seed, **arguments)
        else:
            with on_cpu():
                output = run()
        return output if inputs is None else _on_device(output, inputs.device)

    def _engine_call(
        self,
        inputs: Tensor | None,
        session: InferenceSession | None,
        seed: int | None,
        *,
        generation_config: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        prefix_allowed_tokens_fn: Any,
        streamer: Any,
        attention_mask: Any = None,
        tokenizer: Any = None,
        **parameters: Any,
    ) -> Callable[[], Any]:
        """Return a function that runs a call on the engine; raise NotSupported if the engine can't run it."""
        settings = Settings(self.llm, parameters, generation_config)
        columns = self._new_columns(settings, inputs, attention_mask, session)
        functions = stopping_criteria, streamer, tokenizer, logits_processor
        begin = partial(GenerateCall, self.llm, settings, *functions, prefix_allowed_tokens_fn)
        if session is not None:
            return partial(session._generate, begin, settings, columns, seed)
        assert columns is not None
        drawn = draw_seed() if seed is None and settings["do_sample"] else seed or 0
        return begin(columns, seed=drawn).run

    def inference_session(
        self, max_length: int | None = None, *, seed: int | None = None
    ) -> InferenceSession:
        """Open a session, preferably in a `with` block, in which `session=` can be omitted.

        Args:
            max_length: maximum number of columns, prompts included; None takes the engine's limit. Blocks for
                all of them are reserved for each row.
            seed: seed of all draws; None takes one from torch's default generator at the first call.

        Raises:
            InvalidRequest: a value out of range.
        """
        length = self.llm.max_length if max_length is None else max_length
        return InferenceSession(self.llm, max_length=length, seed=seed)

    @property
    def active_session(self) -> InferenceSession | None:
        """The session that a call without `session=` uses."""
        return active_session(self.llm)

    def use_session(
        self, session: InferenceSession | None
    ) -> AbstractContextManager[InferenceSession | None]:
        """Make `session` the active one in a `with` block, without closing it; None deactivates."""
        return entered(self.llm, None if session is None else self._session(session))

    def _whole_module(self) -> Any:
        """Return transformers' module if all of it is in this process, else None."""
        module = self.llm.engine.module
        return module if hasattr(module, "generate") else None

    def _session(self, session: Any) -> InferenceSession | None:
        check_kind("session", session, InferenceSession | None, "an InferenceSession or None")
        if session is not None and session._llm is not self.llm:
            raise InvalidRequest("session: belongs to another model")
        return session or self.active_session

    def _new_columns(
        self, settings: Settings, inputs: Any, mask: Any, session: InferenceSession | None
    ) -> PaddedRows | None:
        if inputs is not None:
            columns = PaddedRows.of(inputs, mask, name="inputs", pad_id=settings.pad_id, left=True)
            if not columns.ids.numel():
                shape = list(columns.ids.shape)
                raise InvalidRequest(f"inputs has shape {shape}: at least one token is needed")
            return columns
        if mask is not None:
            raise InvalidRequest("attention_mask without inputs: there is nothing to mask")
        if session is not None and session.position:
            return None
        bos_id = settings["bos_token_id"]
        if bos_id is None:
            bos_id = self.llm.engine.bos_id
        if bos_id is None or bos_id >= self.llm.engine.admission.vocab_size:
            raise InvalidRequest(
                "inputs=None at the beginning starts from the model's BOS, and this one has none; give "
                "inputs or bos_token_id"
            )
        return PaddedRows.of(torch.tensor([[bos_id]]), None)


def _is_unsupported(arguments: dict[str, Any]) -> bool:
    """Return whether a call has a parameter that transformers' own `generate` does not support either."""
    config = arguments["generation_config"]
    return any(
        not is_off(name, value)
        for name in UNSUPPORTED_BY_TRANSFORMERS
        for value in (arguments.get(name), getattr(config, name, None))
    )


def _on_device(output: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return output
    if isinstance(output, Tensor):
        return output.to(device)
    output.sequences = output.sequences.to(device)
    return output
