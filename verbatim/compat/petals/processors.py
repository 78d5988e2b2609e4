"""transformers' logits processors for one row, and those that the engine's sampler implements."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from verbatim.compat.petals.settings import Settings
from verbatim.errors import InvalidRequest, NotSupported

# The engine's sampler implements the same functions (for filters: on logits without ties).
_NATIVE_EDITS = frozenset({"repetition_penalty", "bad_words_ids", "suppress_tokens", "min_tokens"})
_NATIVE_FILTERS = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p"})

NamedProcessors = list[tuple[str, Any]]  # the parameter, and its processor


class ProcessorChain:
    """The processors of one row, applied in order; used as the engine's logits processor.

    Attributes:
        logits, scores: `[V]` float32 for each position, before and after processing; if kept.
    """

    def __init__(self, processors: Iterable[Any], *, keep_logits: bool, keep_scores: bool) -> None:
        self._processors = list(processors)
        self._keep_logits, self._keep_scores = keep_logits, keep_scores
        self.logits: dict[int, Tensor] = {}
        self.scores: dict[int, Tensor] = {}

    def __call__(self, ids: Tensor, row: Tensor) -> Tensor:
        row = row.float()
        if self._keep_logits:
            self.logits[len(ids)] = row.clone()
        for processor in self._processors:
            try:
                row = _row_of(processor(ids[None], row[None]))
            except Exception as error:
                name = getattr(processor, "__name__", type(processor).__name__)
                raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
        if self._keep_scores:
            self.scores[len(ids)] = row.clone()
        return row


def _row_of(scores: Any) -> Tensor:
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[0] != 1:
        shape = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"gave {shape} for scores [1, V]")
    return scores[0]


class Processors:
    """The processors of a call.

    Attributes:
        native: fields of `SamplingParams` for processors that the engine's sampler implements.
        chained: each row needs a `ProcessorChain`, for other processors or to keep logits.
    """

    def __init__(
        self,
        settings: Settings,
        custom: Any,
        prefix_fn: Callable[[int, Tensor], Any] | None,
        *,
        min_tokens: int,
        vocab_size: int,
    ) -> None:
        self._settings, self._min_tokens = settings, min_tokens
        self._custom = _custom(custom)
        if prefix_fn is not None and not callable(prefix_fn):
            raise InvalidRequest(f"prefix_allowed_tokens_fn={prefix_fn!r}: must be a function")
        self._prefix_fn, self._vocab_size = prefix_fn, vocab_size
        edits, filters = self._build(0, [0], 1)
        keeps = settings["output_scores"] or settings["output_logits"]
        late = [name for name, _ in filters if name not in _NATIVE_FILTERS]
        if settings.num_beams == 1:  # no token depends on the sum of the probabilities
            late = [name for name in late if name != "renormalize_logits"]
        self._filters_too = bool(keeps or late)
        edited = [name for name, _ in edits if name not in _NATIVE_EDITS]
        self.chained = self._filters_too or bool(edited)
        self.native: dict[str, Any] = {} if self.chained else self._native_edits()
        if settings["do_sample"] and not self._filters_too:
            self.native |= self._native_filters()
        if not settings["do_sample"] and settings.num_beams == 1:
            self.native["temperature"] = 0.0

    def chain(self, row: int, prompt: list[int], new_tokens: int) -> ProcessorChain:
        """Return the processor chain of one row.

        Args:
            prompt: all ids before its new tokens.
        """
        edits, filters = self._build(row, prompt, new_tokens)
        return ProcessorChain(
            [processor for _, processor in edits + (filters if self._filters_too else [])],
            keep_logits=self._settings["output_logits"],
            keep_scores=self._settings["output_scores"],
        )

    def _native_edits(self) -> dict[str, Any]:
        settings = self._settings
        banned = [[i] for i in settings["suppress_tokens"] or ()]
        words = [list(ids) for ids in settings["bad_words_ids"] or ()]
        banned += [ids for ids in words if ids not in [[eos] for eos in settings.eos_ids]]
        fields: dict[str, Any] = {"bad_words": banned} if banned else {}
        if settings["repetition_penalty"] is not None:
            fields["repetition_penalty"] = settings["repetition_penalty"]
        if self._min_tokens and settings.eos_ids:
            fields["min_tokens"] = self._min_tokens
        return fields

    def _native_filters(self) -> dict[str, Any]:
        settings = self._settings
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "temperature": 1.0}
        fields = {
            name: value if settings[name] is None else settings[name] for name, value in off.items()
        }
        if fields["top_p"] == 0:  # transformers keeps the likeliest
            fields |= {"top_p": 1.0, "top_k": 1}
        return fields

    def _build(
        self, row: int, prompt: list[int], new_tokens: int
    ) -> tuple[NamedProcessors, NamedProcessors]:
        """Return processors, and filters if tokens are sampled, in transformers' order."""
        import transformers.generation.logits_process as hf

        get, eos = self._settings, list(self._settings.eos_ids)
        least, length = self._min_tokens, len(prompt)
        ids = torch.tensor([prompt])
        begin = length if length > 1 or get["forced_bos_token_id"] is None else length + 1
        edits, filters = _ProcessorList(get), _ProcessorList(get)
        processor: Any
        edits.add("sequence_bias", None, hf.SequenceBiasLogitsProcessor)
        edits.add(
            "encoder_repetition_penalty", 1.0, hf.EncoderRepetitionPenaltyLogitsProcessor, ids
        )
        edits.add("repetition_penalty", 1.0, hf.RepetitionPenaltyLogitsProcessor)
        edits.add("no_repeat_ngram_size", 0, hf.NoRepeatNGramLogitsProcessor)
        edits.add("encoder_no_repeat_ngram_size", 0, hf.EncoderNoRepeatNGramLogitsProcessor, ids)
        edits.add("bad_words_ids", None, hf.NoBadWordsLogitsProcessor, eos or None)
        if least and eos:
            processor = hf.MinNewTokensLengthLogitsProcessor(length, least, eos)
            edits.processors.append(("min_tokens", processor))
        if self._prefix_fn is not None:
            allowed = self._prefix_fn
            processor = hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
            edits.processors.append(("prefix_allowed_tokens_fn", processor))
        edits.add("forced_bos_token_id", None, hf.ForcedBOSTokenLogitsProcessor)
        if get["forced_eos_token_id"] is not None:
            eos_id = get["forced_eos_token_id"]
            processor = hf.ForcedEOSTokenLogitsProcessor(length + new_tokens, eos_id)
            edits.processors.append(("forced_eos_token_id", processor))
        if get["remove_invalid_values"]:
            edits.processors.append(("remove_invalid_values", hf.InfNanRemoveLogitsProcessor()))
        if eos or get["exponential_decay_length_penalty"] is None:
            decay = hf.ExponentialDecayLengthPenalty
            edits.add("exponential_decay_length_penalty", None, decay, eos, length)
        edits.add("suppress_tokens", None, hf.SuppressTokensLogitsProcessor)
        edits.add("begin_suppress_tokens", None, hf.SuppressTokensAtBeginLogitsProcessor, begin)
        merged_edits = _with_custom(edits.processors, self._custom)
        if get["do_sample"]:
            filters.add("temperature", 1.0, hf.TemperatureLogitsWarper)
            filters.add("top_h", None, getattr(hf, "TopHLogitsWarper", None))
            filters.add("top_k", 0, hf.TopKLogitsWarper)
            filters.add("top_p", 1.0, hf.TopPLogitsWarper)
            filters.add("min_p", None, hf.MinPLogitsWarper)
            filters.add("typical_p", 1.0, hf.TypicalLogitsWarper)
            filters.add("epsilon_cutoff", 0.0, hf.EpsilonLogitsWarper)
            filters.add("eta_cutoff", 0.0, hf.EtaLogitsWarper)
        if get["watermarking_config"] is not None:
            filters.processors.append(("watermarking_config", self._watermark()))
        if get["renormalize_logits"]:
            filters.processors.append(("renormalize_logits", hf.LogitNormalization()))
        return merged_edits, filters.processors

    def _watermark(self) -> Any:
        config = self._settings["watermarking_config"]
        if isinstance(config, dict):
            from transformers import WatermarkingConfig

            config = WatermarkingConfig.from_dict(config)
        if type(config).__name__ != "WatermarkingConfig":
            raise NotSupported(
                f"watermarking_config={type(config).__name__}: its processor remembers earlier calls, and "
                "a processor here must depend on ids and logits alone; WatermarkingConfig does"
            )
        return config.construct_processor(self._vocab_size, "cpu")


class _ProcessorList:
    """Collects the processors of enabled parameters."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.processors: NamedProcessors = []

    def add(self, name: str, off: Any, kind: Any, *others: Any) -> None:
        value = self._settings[name]
        if value is None or (off is not None and value == off):
            return
        if kind is None:
            raise NotSupported(f"{name}={value!r}: this version of transformers has it not")
        try:
            self.processors.append((name, kind(value, *others)))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name}={value!r}: {error}") from error


def _with_custom(named: NamedProcessors, custom: list[Any]) -> NamedProcessors:
    """Merge the caller's processors; as in transformers, one replaces another of the same type."""
    kinds = {type(processor): processor for processor in reversed(custom)}
    merged = [(name, kinds.get(type(processor), processor)) for name, processor in named]
    present = [processor for _, processor in merged]
    merged = [("logits_processor" if p in custom else name, p) for name, p in merged]
    return merged + [("logits_processor", p) for p in custom if p not in present]


def _custom(processors: Any) -> list[Any]:
    custom = [] if processors is None else processors
    if not isinstance(custom, list | tuple):
        raise InvalidRequest(
            f"logits_processor={processors!r}: must be a LogitsProcessorList or a list"
        )
    for processor in custom:
        if not callable(processor):
            raise InvalidRequest(f"logits_processor: {processor!r} can't be called")
        call = processor if inspect.isfunction(processor) else processor.__call__
        if len(_required_arguments(call)) > 2:
            raise NotSupported(
                f"logits_processor: {type(processor).__name__} needs {_required_arguments(call)}; a "
                "processor here is called with input_ids and scores"
            )
    return list(custom)


def _required_arguments(function: Any) -> list[str]:
    """Return the names of the required arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in plain and p.default is p.empty]
