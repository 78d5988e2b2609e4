"""transformers' logits processors for one row, and those that the engine's sampler implements."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verbatim.compat.batches import accepts
from verbatim.compat.petals.settings import Settings
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.params import SamplingParams

# Parameters that only transformers' processors implement. (The engine's sampler implements the
# others, with the same results; for filters: on logits without ties.)
_CHAINED = (
    "sequence_bias encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values begin_suppress_tokens "
    "output_scores output_logits"
).split()
_FILTERS = ("top_h", "epsilon_cutoff", "eta_cutoff")  # where tokens are sampled
_BEAMS = ("renormalize_logits",)  # where beams are searched for
# The filters of the engine's sampler, with the value that None stands for.
_NATIVE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "temperature": 1.0}


class Kept(dict[int, Tensor]):
    """A processor that stores the logits `[V]` float32 of each call, by position."""

    def __call__(self, ids: Tensor, row: Tensor) -> Tensor:
        self[len(ids)] = row.float().clone()
        return row


def _batched(processor: Any) -> Callable[[Tensor, Tensor], Any]:
    """Return a processor of transformers as one of the engine, called for a batch of one row."""

    def process(ids: Tensor, row: Tensor) -> Any:
        scores = processor(ids[None], row.float()[None])
        is_batch = isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == 1
        return scores[0] if is_batch else scores  # the engine refuses anything else

    process.__name__ = getattr(processor, "__name__", type(processor).__name__)
    return process


class Processors:
    """The processors of a call: the engine's sampler implements them all, or transformers' are chained.

    Args:
        custom, prefix_fn: the caller's logits processors and `prefix_allowed_tokens_fn`.

    Attributes:
        chained: transformers' are.
        native: fields of `SamplingParams`.
    """

    def __init__(
        self,
        settings: Settings,
        custom: Any,
        prefix_fn: Any,
        *,
        min_tokens: int,
        vocab_size: int,
    ) -> None:
        self._settings, self._min_tokens, self._vocab_size = settings, min_tokens, vocab_size
        self._custom = _checked(custom)
        if prefix_fn is not None and not callable(prefix_fn):
            raise InvalidRequest(f"prefix_allowed_tokens_fn={prefix_fn!r}: must be a function")
        self._prefix_fn = prefix_fn
        self._watermark = _watermark(settings["watermarking_config"])
        samples, beams = settings["do_sample"], settings.num_beams
        # In a sample, no token depends on the sum of the probabilities.
        names = [*_CHAINED, *(_FILTERS if samples else ()), *(_BEAMS if beams > 1 else ())]
        names += ["exponential_decay_length_penalty"] if settings.eos_ids else []
        functions = self._custom or prefix_fn or self._watermark
        self.chained = bool(functions or any(map(settings.is_on, names)))
        self.native: dict[str, Any] = {}
        if samples:
            self.native = _NATIVE | {n: settings[n] for n in _NATIVE if settings[n] is not None}
            if settings["top_p"] == 0:  # transformers keeps the likeliest
                self.native |= {"top_p": 1.0, "top_k": 1}
        SamplingParams(**self.native)  # validates them
        self.chain(0, [0], 1)  # validates the parameters
        self.native = {} if self.chained else self.native | self._native_edits()
        if not samples and beams == 1:
            self.native["temperature"] = 0.0

    def _native_edits(self) -> dict[str, Any]:
        settings = self._settings
        suppressed = settings["suppress_tokens"]
        banned = [[i] for i in (() if suppressed is None else suppressed)]
        words = [list(ids) for ids in settings["bad_words_ids"] or ()]
        banned += [ids for ids in words if ids not in [[eos] for eos in settings.eos_ids]]
        fields: dict[str, Any] = {"bad_words": banned} if banned else {}
        if settings["repetition_penalty"] is not None:
            fields["repetition_penalty"] = settings["repetition_penalty"]
        if self._min_tokens and settings.eos_ids:
            fields["min_tokens"] = self._min_tokens
        return fields

    def chain(self, row: int, prompt: list[int], new_tokens: int) -> list[Callable[..., Any]]:
        """Return the processors of one row, as transformers makes them for a batch of this row.

        Args:
            prompt: all ids before its new tokens.

        Raises:
            InvalidRequest: an invalid parameter.
        """
        from transformers import GenerationMixin, PretrainedConfig

        values, eos, prefix_fn = dict(self._settings), self._settings.eos_ids, self._prefix_fn
        values |= {
            "guidance_scale": None,
            "num_beams": 1,
            "num_return_sequences": 1,
            "min_length": None,
            "min_new_tokens": self._min_tokens,
            "max_length": len(prompt) + new_tokens,
            "watermarking_config": self._watermark,
            "_eos_token_tensor": torch.tensor(eos) if eos else None,
        }
        if not eos:
            values["exponential_decay_length_penalty"] = None
        maker: Any = GenerationMixin()
        maker.config = PretrainedConfig.from_dict({"vocab_size": self._vocab_size})
        try:
            processors = maker._get_logits_processor(
                SimpleNamespace(**values),
                input_ids_seq_length=len(prompt),
                encoder_input_ids=torch.tensor([prompt]),
                prefix_allowed_tokens_fn=prefix_fn and (lambda _, ids: prefix_fn(row, ids)),
                logits_processor=self._custom,
                device="cpu",
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        except (RuntimeError, LookupError) as error:
            raise InvalidRequest(
                f"transformers can't make the logits processors: {type(error).__name__}: {error}"
            ) from error
        return list(map(_batched, processors))


def _watermark(config: Any) -> Any:
    if isinstance(config, dict):
        from transformers import WatermarkingConfig

        try:
            config = WatermarkingConfig.from_dict(config)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"watermarking_config={config!r}: {error}") from error
    if config is not None and type(config).__name__ != "WatermarkingConfig":
        raise NotSupported(
            f"watermarking_config={type(config).__name__}: its processor remembers earlier calls, and "
            "a processor here must depend on ids and logits alone; WatermarkingConfig does"
        )
    return config


def _checked(processors: Any) -> list[Any]:
    """Return the caller's processors; refuse those that need more than ids and scores."""
    if not isinstance(processors, list | tuple | None):
        raise InvalidRequest(
            f"logits_processor={processors!r}: must be a LogitsProcessorList or a list"
        )
    for processor in processors or ():
        if not callable(processor):
            raise InvalidRequest(f"logits_processor: {processor!r} can't be called")
        if not accepts(processor, None, None, unknown=True):
            raise NotSupported(
                f"logits_processor: {type(processor).__name__}: a processor here is called with input_ids "
                "and scores, and this one can't be"
            )
    return list(processors or ())
