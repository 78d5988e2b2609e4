"""The checked arguments of one call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verbatim.compat.batches import prompt_mask
from verbatim.compat.integers import integer
from verbatim.errors import InvalidRequest, NotSupported, PromptTooLong
from verbatim.params import SamplingParams
from verbatim.tensors import check_padded, rows_of

_OPTIONS = ("max_new_tokens", "stop_token_ids", "stream_interval", "attention_mask", "seed")
_OF_A_CACHE = ("use_cache", "cache_position")
_LARGEST_ID = 2**63 - 1  # of int64


@dataclass(frozen=True, slots=True)
class GenerateArguments:
    """The arguments of one `generate` or `generate_streaming`.

    Attributes:
        input_ids: `[B, P]` int64.
        attention_mask: `[B, P]`, 0 on padding; the caller's, or 0 for leading pads.
        prompts: the rows without padding.
        new_tokens: maximum per row.
        to_the_end: pad all rows to `new_tokens`.
        stops: id sequences that end a row, without the end of sequence.
        eos_id, pad_id: None if unspecified.
        interval: tokens between two tensors of a stream.
        sampling: the fields of `SamplingParams` that control sampling.
        model_kwargs: arguments for the model or the hooks.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompts: list[list[int]]
    new_tokens: int
    to_the_end: bool
    stops: tuple[tuple[int, ...], ...]
    eos_id: int | None
    pad_id: int | None
    interval: int
    seed: int | None
    sampling: Mapping[str, Any]
    model_kwargs: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        input_ids: Any,
        tokenizer: Any,
        max_length: Any,
        num_beams: Any,
        do_sample: Any,
        early_stopping: Any,
        top_k: Any,
        top_p: Any,
        temperature: Any,
        model_kwargs: dict[str, Any],
    ) -> GenerateArguments:
        """Check the arguments of a call.

        Raises:
            InvalidRequest, NotSupported: the message names the argument.
            PromptTooLong: `input_ids` is wider than `max_length`.
        """
        side = getattr(tokenizer, "padding_side", None)
        if side != "left":
            raise InvalidRequest(
                f"tokenizer.padding_side is {side!r}: must be 'left', or prompts do not end where "
                "generation begins"
            )
        for name, value in (("do_sample", do_sample), ("early_stopping", early_stopping)):
            if not isinstance(value, int) or value not in (0, 1):
                raise InvalidRequest(f"{name}={value!r}: must be True or False")
        kwargs = dict(model_kwargs)
        for name in ("use_cache", "apply_loss_mask"):
            if not isinstance(kwargs.get(name), bool | None):
                raise InvalidRequest(f"{name}={kwargs[name]!r}: must be True, False or None")
        kwargs.pop("apply_loss_mask", None)  # Coati's trainer passes it on to every call
        options = {name: kwargs.pop(name, None) for name in _OPTIONS}
        eos_id = _id("tokenizer.eos_token_id", getattr(tokenizer, "eos_token_id", None))
        pad_id = _id("tokenizer.pad_token_id", getattr(tokenizer, "pad_token_id", None))
        if (override := _id("pad_token_id", kwargs.pop("pad_token_id", None))) is not None:
            pad_id = override
        mask = options["attention_mask"]
        check_padded(input_ids, mask)
        mask = prompt_mask(input_ids, mask, pad_id)
        interval = options["stream_interval"]
        seed = options["seed"]
        sampling = _sampling(num_beams, bool(do_sample), top_k, top_p, temperature)
        SamplingParams(seed=seed, **sampling)  # validates them
        return cls(
            input_ids=input_ids.long(),
            attention_mask=mask,
            prompts=rows_of(input_ids, mask),
            new_tokens=_new_tokens(input_ids.shape[1], max_length, options["max_new_tokens"]),
            to_the_end=not early_stopping,
            stops=_stops(options["stop_token_ids"]),
            eos_id=eos_id,
            pad_id=eos_id if pad_id is None else pad_id,
            interval=2 if interval is None else integer("stream_interval", interval, 1),
            seed=seed,
            sampling=sampling,
            model_kwargs=kwargs,
        )

    @property
    def num_beams(self) -> int:
        return int(self.sampling["num_beams"])

    @property
    def model_constants(self) -> dict[str, Any]:
        """`model_kwargs` for a model without hooks, whose cache is not the caller's."""
        return {name: value for name, value in self.model_kwargs.items() if name not in _OF_A_CACHE}

    def clamp(self, limit: int, source: str, prompt_length: int) -> GenerateArguments:
        """Return arguments whose rows stay within the model's limit; warn if they are shorter.

        Args:
            source: where the limit comes from.
            prompt_length: of the longest row; one over the limit is refused later.
        """
        room = limit - prompt_length
        if self.new_tokens <= room or room < 0:
            return self
        warnings.warn(
            f"max_length leaves {self.new_tokens} new tokens after a prompt of {prompt_length}, "
            f"{self.new_tokens + prompt_length} together; the model's limit is {limit} ({source}), so "
            f"at most {room} are generated",
            stacklevel=2,
        )
        return replace(self, new_tokens=room)

    def params(self, vocab_size: int) -> SamplingParams:
        """Return the engine's parameters; without a seed, draw one from torch's default generator.

        Args:
            vocab_size: an end of sequence beyond it is left out.
        """
        ends = () if self.eos_id is None or self.eos_id >= vocab_size else ((self.eos_id,),)
        seed = self.seed
        if seed is None and self.sampling["temperature"] > 0:
            seed = int(torch.randint(2**53, ()))
        return SamplingParams(
            max_tokens=self.new_tokens,
            stop_token_ids=(*ends, *self.stops),
            ignore_eos=True,  # only the tokenizer's counts, as a stop id
            seed=seed,
            **self.sampling,
        )


def _sampling(
    num_beams: Any, do_sample: bool, top_k: Any, top_p: Any, temperature: Any
) -> dict[str, Any]:
    """Return the sampling fields of `SamplingParams`; None disables a filter."""
    beams = integer("num_beams", num_beams, 1)
    if beams > 1 and do_sample:
        raise NotSupported(
            f"num_beams={beams} with do_sample=True: beams search and do not sample; set do_sample=False"
        )
    fields: dict[str, Any] = {
        "num_beams": beams,
        "top_k": 0 if top_k is None or (isinstance(top_k, int) and top_k == -1) else top_k,
        "top_p": 1.0 if top_p is None else top_p,
        "temperature": 1.0 if temperature is None else temperature,
    }
    if SamplingParams(**fields).temperature == 0:
        raise InvalidRequest(
            f"temperature={temperature!r}: must be above 0; the likeliest token is do_sample=False"
        )
    if not do_sample and beams == 1:
        fields["temperature"] = 0.0  # the likeliest token is in every filter
    return fields


def _new_tokens(prompt_width: int, max_length: Any, max_new_tokens: Any) -> int:
    length = integer("max_length", max_length, 0)
    if prompt_width > length:
        raise PromptTooLong(f"input_ids is {prompt_width} tokens wide, and max_length={length}")
    if max_new_tokens is None:
        return length - prompt_width
    return min(integer("max_new_tokens", max_new_tokens, 0), length - prompt_width)


def _stops(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return sequences of ids: [[20, 21], [10]] are two, [20, 21] is one, and so is 20."""
    if value is None:
        return ()
    value = value.tolist() if hasattr(value, "tolist") else value
    many = list(value) if isinstance(value, list | tuple) else [value]
    nested = [hasattr(entry, "__len__") for entry in many]
    if any(nested) and not all(nested):
        raise InvalidRequest(
            f"stop_token_ids={value!r}: must be sequences of ids ([[20, 21], [10]]), or a single one "
            "([20, 21]), but not both"
        )
    if not any(nested):
        many = [many] if many else []
    return SamplingParams(stop_token_ids=many).stop_token_ids  # type: ignore[return-value]


def _id(name: str, value: Any) -> int | None:
    token_id = None if value is None else integer(name, value, 0)
    if token_id is not None and token_id > _LARGEST_ID:
        raise InvalidRequest(f"{name}={token_id}: must be at most {_LARGEST_ID}, the largest int64")
    return token_id
