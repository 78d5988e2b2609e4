"""`RemoteGenerationMixin`: `generate` and sessions for whatever has an open engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verbatim.compat.petals.following import following
from verbatim.compat.petals.given import Columns, first_column, given_columns
from verbatim.compat.petals.session import InferenceSession, active_session, enter, leave
from verbatim.compat.petals.settings import Settings
from verbatim.compat.petals.turn import Turn, Wish
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM
from verbatim.params import SamplingParams

_NOT_DONE = {
    "assistant_model": 'drafts belong to the model: open it with draft=, a folder or "ngram"',
    "negative_prompt_ids": "a second, unconditional prompt is not run beside the first",
    "negative_prompt_attention_mask": "a second, unconditional prompt is not run beside the first",
    "custom_generate": "the loop over tokens is the engine's",
    "inputs_embeds": "ids go in; embeddings are the first stage's own",
    "past_key_values": "K and V stay where they were computed; to go on, use a session",
    "position_ids": "positions are those of a row's tokens, without its pads",
}


class RemoteGenerationMixin:
    """`generate` and `inference_session`.

    Attributes:
        llm: the engine; a class that mixes this in has it.
    """

    llm: LLM

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
            inputs: `[B, P]` integers, also as `input_ids=`, padded on the left. None goes on from the last
                token of the session; at the beginning it starts from the model's BOS.
            generation_config: values for what the call does not name; then the model's own count, then
                transformers' defaults.
            logits_processor: a list of transformers' processors or of functions of `input_ids` `[1, L]` and
                `scores` `[1, V]`, a row at a time, without its pads. Pure ones: each is called once for a
                token, in any order of rows.
            stopping_criteria: a list of functions of `input_ids` `[1, L]` and `scores` (None without
                `output_scores`), called for each new token of a row; True ends the row.
            prefix_allowed_tokens_fn: `f(row, ids)`, the ids that may come next.
            synced_gpus: False or None.
            assistant_model: None; drafts belong to the model.
            streamer: gets the inputs, then each new column `[B]`, through `put`, and `end()`.
            session: None takes the one of the `with` block around the call, if there is one.
            seed: ours. Row b draws with it and with sample index b. Without, a session takes one number from
                torch's default generator at its first call, and a call without a session one when it
                samples.
            kwargs: transformers' generation parameters (`verbatim.compat.petals.settings.DONE` has their
                names); `attention_mask` `[B, P]`, without which leading pads are masked; `tokenizer`, for
                `stop_strings`. `max_length` counts pads and what the session had before. Exactly one of
                `max_length` and `max_new_tokens`.

        Returns:
            `[B, P + N]` int64 on the inputs' device: what this call was given and what it made, pads behind
            a row's end. With `return_dict_in_generate` transformers' output, whose `past_key_values` is a
            `RemotePastKeyValues`.

        Raises:
            InvalidRequest, NotSupported, PromptTooLong: before any token is made (all are ValueErrors); a
                session is as before.
            OutOfBlocks: no room for a session's rows. SessionBusy, EngineClosed.
            RequestFailed: a row from which nothing can be drawn.
        """
        kwargs |= {"assistant_model": assistant_model}
        kwargs = _plain(kwargs, synced_gpus)
        ids, mask = kwargs.pop("input_ids", None), kwargs.pop("attention_mask", None)
        tok = kwargs.pop("tokenizer", None)
        if inputs is not None and ids is not None:
            raise InvalidRequest("inputs and input_ids are both given; they are the same thing")
        inputs = ids if inputs is None else inputs
        session = self._session(session)
        settings = Settings(self.llm, kwargs, generation_config)
        SamplingParams(seed=seed)  # which checks it
        given = self._given(settings, inputs, mask, session)
        wish = Wish(
            settings,
            following(self.llm, settings, stopping_criteria, streamer, tok),
            logits_processor,
            prefix_allowed_tokens_fn,
        )
        if session is not None:
            made = session._generate(wish, given, seed)
        else:
            assert given is not None
            if seed is None:
                seed = int(torch.randint(2**53, ())) if settings["do_sample"] else 0
            made = Turn(self.llm, wish, Columns.empty(given.num_rows), given, seed=seed).run()
        return made if inputs is None else _on_device(made, inputs.device)

    def inference_session(
        self, max_length: int | None = None, *, seed: int | None = None
    ) -> InferenceSession:
        """Open a session, best in a `with` block; inside, `session=` may be left out.

        Args:
            max_length: columns that it may come to, given and made; None takes the engine's limit. Room for
                so many is reserved for each row.
            seed: of all its draws; None takes one from torch's default generator at its first call.

        Raises:
            InvalidRequest: a value out of range.
        """
        length = self.llm.max_length if max_length is None else max_length
        return InferenceSession(self.llm, max_length=length, seed=seed)

    @property
    def active_session(self) -> InferenceSession | None:
        """The session that a call without `session=` belongs to."""
        return active_session(self.llm)

    @contextmanager
    def use_session(self, session: InferenceSession | None) -> Iterator[InferenceSession | None]:
        """Make `session` the active one in a `with` block, and leave it open; None: there is none."""
        entered = None if session is None else self._session(session)
        enter(self.llm, entered)
        try:
            yield session
        finally:
            leave(self.llm, entered)

    def _session(self, session: Any) -> InferenceSession | None:
        if session is None:
            return self.active_session
        if not isinstance(session, InferenceSession):
            raise InvalidRequest(f"session={session!r}: must be an InferenceSession or None")
        if session._llm is not self.llm:
            raise InvalidRequest("session: it is another model's")
        return session

    def _given(
        self, settings: Settings, inputs: Any, mask: Any, session: InferenceSession | None
    ) -> Columns | None:
        if inputs is not None:
            return given_columns(inputs, mask, settings.pad_id)
        if mask is not None:
            raise InvalidRequest("attention_mask without inputs: there is nothing to mask")
        if session is not None and session.position:
            return None
        opened, tokenizer = self.llm.engine, self.llm.tokenizer
        known = getattr(opened.config, "bos_token_id", None)
        if known is None and tokenizer is not None:
            known = tokenizer.bos_id
        return first_column(settings["bos_token_id"], known, self.llm.engine.admission.vocab_size)


def _plain(kwargs: dict[str, Any], synced_gpus: Any) -> dict[str, Any]:
    """What is left when what is not done is refused, and what means nothing is taken out."""
    if synced_gpus:
        raise NotSupported("synced_gpus=True: ranks with a call each are LLM.generate's")
    for name, why in _NOT_DONE.items():
        if kwargs.pop(name, None) is not None:
            raise NotSupported(f"{name}: {why}")
    types = kwargs.pop(
        "token_type_ids", None
    )  # tokenizers hand them out for models without segments
    if types is not None and not (isinstance(types, Tensor) and not types.any()):
        raise NotSupported("token_type_ids: there is one segment, 0")
    return kwargs


def _on_device(made: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return made
    if isinstance(made, Tensor):
        return made.to(device)
    made.sequences = made.sequences.to(device)
    return made
