"""`SamplingParams` with Megatron's fields."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from verbatim.checks import integer, switch
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.params import SamplingParams as EngineParams

# The lowest and the highest value of each integer field.
_INTEGERS = {
    "top_k": (0, None),
    "top_n_logprobs": (0, None),
    "min_tokens": (0, None),
    "streaming_interval": (1, None),
    "num_tokens_to_generate": (0, None),
    "num_tokens_total": (0, None),
    "termination_id": (-1, None),
    "seed": (0, 2**63 - 1),
}
# Fields that only matter between Megatron's processes: the accepted value, and the reason.
_REFUSED: dict[str, tuple[Any, str]] = {
    "streaming": (False, "there is no reply socket; pass an AsyncStream in active_streams"),
    "do_kv_handoff": (False, "KV blocks are not handed to another engine"),
}


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one request, under Megatron's names.

    Fields may be changed until the request is submitted, when they are checked again. A name that is
    not a field can't be set.

    Attributes:
        temperature: logits are divided by it; 0 takes the largest logit.
        top_k: keep the k largest logits; 0 keeps all; 1 takes the largest, whatever the temperature.
        top_p: keep the fewest tokens that reach this probability; 0.0 and 1.0 keep all. With
            `top_k`, the k largest are selected first.
        return_log_probs: report log-probs of the raw distribution, for prompt and completion.
        skip_prompt_log_probs: leave the prompt's top-n out, and its log-probs out of a dynamic request.
        return_segments: report the text of every token, `segments` and `generated_segments`.
        num_tokens_to_generate: maximum of new tokens, 0 included; more than the length limit leaves
            is clamped with a warning. None means up to the limit.
        num_tokens_total: the same for prompt and completion together; only one of both may be given.
        termination_id: ends the completion; None takes the tokenizer's `eod`, -1 none.
        top_n_logprobs: report the n likeliest tokens of every position as {text: log-prob}.
        return_prompt_top_n_logprobs: deprecated; follows from top_n_logprobs and skip_prompt_log_probs.
        add_BOS: begin a text prompt with the tokenizer's `bos`; by default it has none.
            Prompts given as ids are not changed.
        min_tokens: the termination id is not drawn before so many tokens.
        stop_words: strings that end the completion. The text is cut before them, the ids are not.
        detokenize_stop_sequence: leave the stop word, or the `eod`, in the text.
        return_prompt_tokens: accepted; a finished request always holds its prompt's ids.
        detokenize_generations: False leaves the text to the caller.
        streaming, do_kv_handoff: only the defaults are accepted. `streaming_interval` has no effect: an
            `AsyncStream` gets every step's tokens.
        seed: in [0, 2**63); None draws one number per batch from torch's default generator.
        no_early_termination: go on past the termination id.
        no_detokenize_streaming_text: send ids and no text to streams.

    Raises:
        InvalidRequest: a value out of range, or contradicting values.
        NotSupported: an unsupported field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    return_segments: bool = False
    num_tokens_to_generate: int | None = None
    num_tokens_total: int | None = None
    termination_id: int | None = None
    top_n_logprobs: int = 0
    return_prompt_top_n_logprobs: bool = False
    add_BOS: bool = False  # noqa: N815
    min_tokens: int = 0
    stop_words: list[str] | None = None
    detokenize_stop_sequence: bool = False
    return_prompt_tokens: bool = False
    detokenize_generations: bool = True
    streaming: bool = False
    streaming_interval: int = 1
    do_kv_handoff: bool = False
    seed: int | None = None
    no_early_termination: bool = False
    no_detokenize_streaming_text: bool = False

    def __post_init__(self) -> None:
        self._resolve(prompt_top_n_requested=self.return_prompt_top_n_logprobs)

    def add_attributes(self, attribute_value_pair: Mapping[str, Any]) -> None:
        """Set several fields at once.

        Raises:
            NotSupported: an unknown field; nothing is set.
        """
        if not isinstance(attribute_value_pair, Mapping):
            raise InvalidRequest(f"{attribute_value_pair!r}: must be a dict of fields and values")
        known = {field.name for field in dataclasses.fields(self)}
        for name in attribute_value_pair:
            if name not in known:
                raise NotSupported(f"{name}: not a field; there are {', '.join(sorted(known))}")
        for name, value in attribute_value_pair.items():
            setattr(self, name, value)
        self._resolve(
            prompt_top_n_requested=bool(attribute_value_pair.get("return_prompt_top_n_logprobs"))
        )

    @classmethod
    def of(cls, params: Any) -> SamplingParams:
        """Return checked parameters; None are the defaults.

        Raises:
            InvalidRequest: of another type. As `check`.
        """
        if params is None:
            return cls()
        if not isinstance(params, cls):
            raise InvalidRequest(f"sampling_params={params!r}: must be Megatron's SamplingParams")
        params.check()
        return params

    def serialize(self) -> dict[str, Any]:
        """Return the values of all fields."""
        return dataclasses.asdict(self)

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a `serialize`."""
        params = cls()
        # It follows from others, and is deprecated where it is set.
        params.add_attributes({**data, "return_prompt_top_n_logprobs": False})
        return params

    def check(self) -> None:
        """Raise for invalid values; called again when a request is submitted.

        Other numeric types, such as numpy's, are converted to Python's.
        """
        for field in dataclasses.fields(self):
            if field.type == "bool":
                switch(field.name, getattr(self, field.name))
        for name, (allowed, why) in _REFUSED.items():
            if getattr(self, name) != allowed:
                raise NotSupported(f"{name}={getattr(self, name)!r}: {why}; leave it at {allowed}")
        off = isinstance(self.top_p, Real) and self.top_p is not False and self.top_p == 0
        checked = EngineParams(temperature=self.temperature, top_p=1.0 if off else self.top_p)
        self.temperature, self.top_p = checked.temperature, 0.0 if off else checked.top_p
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or isinstance(self.__dataclass_fields__[name].default, int):
                setattr(self, name, integer(name, value, low, high))
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise InvalidRequest(
                f"num_tokens_to_generate={self.num_tokens_to_generate} and "
                f"num_tokens_total={self.num_tokens_total}: give one of them"
            )
        if self.stop_words is not None and not isinstance(self.stop_words, list | tuple):
            raise InvalidRequest(f"stop_words={self.stop_words!r}: must be a list of strings")

    def prompt_outputs(self, dynamic: bool) -> tuple[bool, bool]:
        """Return whether log-probs of the prompt are reported, and whether its top-n is."""
        skips = self.skip_prompt_log_probs
        logprobs = self.return_log_probs and not (skips and dynamic)
        return logprobs, self.top_n_logprobs > 0 and not skips

    def sampling(self) -> dict[str, Any]:
        """Return temperature, top-k and top-p as Verbatim's fields."""
        if self.top_k == 1:
            return {"temperature": 0.0}
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p or 1.0}

    def to_engine(
        self,
        *,
        max_tokens: int | None,
        termination_id: int | None,
        seed: int,
        prompt: bool,
        routing: bool,
    ) -> EngineParams:
        """Return Verbatim's `SamplingParams`, which checks the rest."""
        top_n = self.top_n_logprobs
        return EngineParams(
            **self.sampling(),
            max_tokens=max_tokens,
            stop=tuple(self.stop_words or ()),
            stop_token_ids=() if termination_id is None else (termination_id,),
            min_tokens=self.min_tokens,
            include_stop_str_in_output=self.detokenize_stop_sequence,
            ignore_eos=True,  # only the termination id ends a completion
            seed=seed,
            logprobs=top_n or None,
            prompt_logprobs=top_n if prompt else None,
            record_routing=routing,
        )

    def _resolve(self, *, prompt_top_n_requested: bool) -> None:
        self.check()
        follows = self.top_n_logprobs > 0 and not self.skip_prompt_log_probs
        if prompt_top_n_requested:
            if not follows:
                raise InvalidRequest(
                    "return_prompt_top_n_logprobs=True needs top_n_logprobs above 0 and "
                    f"skip_prompt_log_probs=False; they are {self.top_n_logprobs} and "
                    f"{self.skip_prompt_log_probs}"
                )
            warnings.warn(
                "return_prompt_top_n_logprobs is deprecated: it follows from top_n_logprobs and "
                "skip_prompt_log_probs",
                DeprecationWarning,
                stacklevel=4,
            )
        self.return_prompt_top_n_logprobs = follows
