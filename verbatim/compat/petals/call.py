"""One call of `generate` on the engine, with its logits processors, stopping criteria and streamer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verbatim.api.llm import LLM
from verbatim.api.padded import PaddedRows, pad_rows
from verbatim.common.checks import check_kind
from verbatim.compat.petals.settings import Settings
from verbatim.compat.shared import accepts, check_complete, new_rows
from verbatim.core import Completion, FinishReason, Request, SessionCache
from verbatim.errors import InvalidRequest, NotSupported, RequestFailed
from verbatim.params import SamplingParams


class RemotePastKeyValues:
    """The number of columns of prompt and completion in place of K and V, which stay in the engine.

    Returned with `return_dict_in_generate`. To continue a sequence, use a session.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Return the number of tokens, the same in every layer."""
        return self._num_tokens

    def __repr__(self) -> str:
        return f"RemotePastKeyValues({self._num_tokens})"


class GenerateCall:
    """The admitted rows of a call. The constructor rejects invalid rows; `run` must be called only once.

    Attributes:
        requests: the request of each row that generates, by row number.
        columns: all columns, set by `run`: those of the session, the prompt and the completion.
    """

    def __init__(
        self,
        llm: LLM,
        settings: Settings,
        criteria: Any,
        streamer: Any,
        tokenizer: Any,
        processors: Any,
        prefix_fn: Any,
        columns: PaddedRows,
        *,
        past_width: int = 0,
        seed: int,
        session_caches: list[SessionCache] | None = None,
    ) -> None:
        """
        Args:
            criteria, streamer: the caller's stopping criteria and streamer.
            tokenizer: a transformers tokenizer for `stop_strings`; None takes the model's.
            processors, prefix_fn: the caller's logits processors and `prefix_allowed_tokens_fn`.
            columns: all columns before the new ones. Rows that have ended generate only if all have.
            past_width: number of earlier columns of the session.
            session_caches: the cache of each row of the session; None without a session.
        """
        self._llm, self._past_width = llm, past_width
        self._settings, self._streamer = settings, streamer
        self._criteria = _criteria(llm, settings, criteria, streamer, tokenizer)
        beams, copies = settings.num_beams, settings.num_copies
        # With beam search, one request returns all completions of a row.
        self._copies_per_request = copies if beams > 1 else 1
        self._prompt_columns = before = columns if beams > 1 else columns.repeated(copies)
        admission = llm.engine.admission
        chains = Processors(settings, processors, prefix_fn, before.width, admission.vocab_size)
        fields = {**chains.native}
        if beams > 1:
            session_caches = None
            fields |= {"num_beams": beams, "n": copies, "draft": False}
            fields |= {"length_penalty": settings["length_penalty"]}
            fields |= {"early_stopping": settings["early_stopping"] or False}
        params = SamplingParams(
            max_tokens=settings.new_tokens(before.width),
            stop_token_ids=[i for i in settings.eos_ids if i < admission.vocab_size],
            ignore_eos=True,  # `eos_ids` includes the model's, unless the caller names others
            seed=seed,
            timeout_s=settings["max_time"],
            **fields,
        )
        self.requests: dict[int, Request] = {}
        # The logits before ("logits") and after ("scores") processing, by name and row, if requested.
        self._recorded: dict[str, dict[int, LogitsRecorder]] = {
            name: {} for name in ("logits", "scores") if settings[f"output_{name}"]
        }
        # The number of new tokens after which a criterion ended a row, by row.
        self._stops: dict[int, int] = {}
        for row, (prompt, end) in enumerate(zip(before.rows(), before.ends, strict=True)):
            if end is not None and None in before.ends:
                continue
            if chains.chained:
                chain: list[Any] = chains.chain(row, prompt)
                for name, recorders in self._recorded.items():
                    recorders[row] = LogitsRecorder()
                    chain.insert(0 if name == "logits" else len(chain), recorders[row])
                params = params.replace(logits_processors=chain)
            cache = None if session_caches is None else session_caches[row]
            self.requests[row] = admission.admit(
                prompt, params, first_sample=row, session_cache=cache
            )

    def run(self) -> Tensor | Any:
        """Generate, and return prompts with completions `[B, P + N]`, or transformers' output object.

        Raises:
            RequestFailed: no token can be drawn for a row, or the row was aborted.
        """
        if self._criteria or self._streamer is not None:
            self._run_observed()
        else:
            self._llm.engine.run(list(self.requests.values()))
        columns = self._prompt_columns.repeated(self._copies_per_request)
        rows: list[list[int]] = [[] for _ in range(columns.num_rows)]
        ended, scores = [False] * len(rows), torch.zeros(len(rows))
        for row in self.requests:
            for at, output in enumerate(self._completions(row), row * self._copies_per_request):
                rows[at] = output.token_ids[: self._stops.get(row)]
                ended[at] = output.finish_reason is FinishReason.STOP or row in self._stops
                scores[at] = output.score or 0.0
        self.columns = columns.grown(rows, ended, self._settings.fill_id)
        with torch.inference_mode(False):
            sequences = self.columns.ids[:, self._past_width :].clone()
        if not self._settings["return_dict_in_generate"]:
            return sequences
        import transformers.generation.utils as hf

        cls: Any = hf.GenerateDecoderOnlyOutput
        values: dict[str, Any] = {}
        if self._settings.num_beams > 1:
            cls, values = hf.GenerateBeamDecoderOnlyOutput, {"sequences_scores": scores}
        values |= {name: self._steps(recorders) for name, recorders in self._recorded.items()}
        # Called `cache` since transformers 5.24.
        cache = next(n for n in ("cache", "past_key_values") if n in cls.__dataclass_fields__)
        return cls(
            sequences=sequences, **{cache: RemotePastKeyValues(self.columns.width)}, **values
        )

    def _completions(self, row: int) -> list[Completion]:
        result = self.requests[row].result
        assert result is not None
        outputs = result.outputs
        if row not in self._stops:
            for output in outputs:
                check_complete(row, output)
        if len(outputs) < self._copies_per_request:
            raise RequestFailed(
                f"row {row}: only {len(outputs)} beams finished, fewer than "
                f"num_return_sequences={self._copies_per_request}"
            )
        return outputs

    def _steps(self, recorders: dict[int, LogitsRecorder]) -> tuple[Tensor, ...]:
        """Return the recorded `[B, V]` of each new column; in ended rows, the pad has probability 1."""
        size, columns = self._llm.engine.admission.vocab_size, self.columns
        pad_logits = torch.full((size,), -torch.inf)
        pad_logits[min(self._settings.fill_id, size - 1)] = 0.0
        first = self._prompt_columns.width
        steps = [pad_logits.repeat(columns.num_rows, 1) for _ in range(first, columns.width)]
        for row, request in self.requests.items():
            for column, step in enumerate(steps):
                if columns.mask[row, first + column]:
                    step[row] = recorders[row][len(request.prompt_ids) + column]
        return tuple(steps)

    # ---- stopping criteria and the streamer

    def _run_observed(self) -> None:
        """Run the steps; check the stopping criteria and send final columns to the streamer after each."""
        self._num_checked = dict.fromkeys(self.requests, 0)
        num_sent, streamer = 0, self._streamer
        if streamer is not None:
            streamer.put(self._prompt_columns.ids[:, self._past_width :])
        with closing(self._llm.engine.steps(list(self.requests.values()))) as steps:
            for _ in steps:
                self._check_criteria()
                if streamer is None:
                    continue
                rows, ready = new_rows(self.requests, self._stops)
                new = pad_rows(rows, self._settings.fill_id, width=ready)
                for column in new[:, num_sent:].unbind(1):
                    ids = torch.full((self._prompt_columns.num_rows,), self._settings.fill_id)
                    ids[list(self.requests)] = column
                    streamer.put(ids)
                num_sent = max(num_sent, ready)
        if streamer is not None:
            streamer.end()

    def _check_criteria(self) -> None:
        """Call the criteria for each new token, row by row, and abort the rows that they end."""
        for row, request in self.requests.items() if self._criteria else ():
            if row in self._stops or not request.sequences:
                continue
            new_ids = list(request.sequences[0].output_ids)
            num_checked, self._num_checked[row] = self._num_checked[row], len(new_ids)
            recorder = self._recorded.get("scores", {}).get(row)
            length = len(request.prompt_ids)
            for count in range(num_checked + 1, len(new_ids) + 1):
                ids = torch.tensor([request.prompt_ids + new_ids[:count]])
                scores = recorder and tuple(recorder[length + i][None] for i in range(count))
                stopped = [stop(ids, scores) for stop in self._criteria]
                if any(s.any() if isinstance(s, Tensor) else s for s in stopped):
                    self._stops[row] = count
                    self._llm.engine.abort(request)
                    break


def _criteria(
    llm: LLM, settings: Settings, criteria: Any, streamer: Any, tokenizer: Any
) -> list[Any]:
    """Return the stopping criteria of a call, including one for its `stop_strings`; check the streamer."""
    if not isinstance(criteria, list | tuple | None) or not all(map(callable, criteria or ())):
        raise InvalidRequest(
            f"stopping_criteria={criteria!r}: must be a StoppingCriteriaList or a list of callables"
        )
    checks, strings = list[Any](criteria or ()), settings["stop_strings"]
    if strings is not None:
        each = [strings] if isinstance(strings, str) else strings
        are_texts = isinstance(each, list | tuple) and all(isinstance(s, str) and s for s in each)
        if not are_texts or not each:
            raise InvalidRequest(f"stop_strings={strings!r}: must be a string or a list of strings")
        from transformers import StopStringCriteria

        if tokenizer is None:
            tokenizer = getattr(llm.tokenizer, "hf", None)
        if tokenizer is None:
            raise InvalidRequest(
                f"stop_strings={strings!r}: need a tokenizer, and this engine has none; give tokenizer="
            )
        checks.append(StopStringCriteria(tokenizer, strings))
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InvalidRequest(f"streamer={streamer!r}: must have put and end")
    beams = settings.num_beams
    for name, value in (("streamer", streamer), ("stopping_criteria, stop_strings", checks)):
        if beams > 1 and value:
            raise NotSupported(
                f"{name} with num_beams={beams}: the best beam is known only at the end"
            )
    return checks


# ---- logits processors: in the engine's sampler where possible, else transformers', row by row

# Parameters that only transformers' processors implement. The engine's sampler implements the others, with
# the same results (those of filters only if no logits are tied).
_CHAINED = (
    "sequence_bias encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values begin_suppress_tokens "
    "output_scores output_logits"
).split()
_FILTERS = ("top_h", "epsilon_cutoff", "eta_cutoff")  # only with sampling
_BEAMS = ("renormalize_logits",)  # only with beam search
# The fields of the engine's sampler, with their values for None.
_NATIVE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "temperature": 1.0}


class LogitsRecorder(dict[int, Tensor]):
    """A processor that stores the logits `[V]` float32 of each call, by position."""

    def __call__(self, ids: Tensor, row: Tensor) -> Tensor:
        self[len(ids)] = row.float().clone()
        return row


def _batched(processor: Any) -> Callable[[Tensor, Tensor], Any]:
    """Wrap a transformers processor, which takes batches, as a processor of the engine, which takes a row."""

    def process(ids: Tensor, row: Tensor) -> Any:
        scores = processor(ids[None], row.float()[None])
        is_batch = isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == 1
        return scores[0] if is_batch else scores  # the engine refuses anything else

    process.__name__ = getattr(processor, "__name__", type(processor).__name__)
    return process


class Processors:
    """The processors of a call: the engine's sampler implements all of them, or transformers' are chained.

    Args:
        custom, prefix_fn: the caller's logits processors and `prefix_allowed_tokens_fn`.
        width: number of columns before the new ones.

    Attributes:
        chained: whether transformers' processors are used.
        native: fields of `SamplingParams` for the engine's sampler.
    """

    def __init__(
        self, settings: Settings, custom: Any, prefix_fn: Any, width: int, vocab_size: int
    ) -> None:
        self._settings, self._vocab_size = settings, vocab_size
        self._new_tokens = settings.new_tokens(width)
        self._min_tokens = min(settings.min_tokens(width), self._new_tokens)
        self._custom = _checked(custom)
        check_kind("prefix_allowed_tokens_fn", prefix_fn, Callable | None, "a function")
        self._prefix_fn = prefix_fn
        self._watermark = _watermark(settings["watermarking_config"])
        samples, beams = settings["do_sample"], settings.num_beams
        # Renormalizing changes beam scores only: sampling does not depend on the sum of the probabilities.
        names = [*_CHAINED, *(_FILTERS if samples else ()), *(_BEAMS if beams > 1 else ())]
        names += ["exponential_decay_length_penalty"] if settings.eos_ids else []
        functions = self._custom or prefix_fn or self._watermark
        self.chained = bool(functions or any(map(settings.is_on, names)))
        self.native: dict[str, Any] = {}
        if samples:
            self.native = _NATIVE | {n: settings[n] for n in _NATIVE if settings[n] is not None}
            if settings["top_p"] == 0:  # transformers keeps the likeliest token
                self.native |= {"top_p": 1.0, "top_k": 1}
        SamplingParams(**self.native)  # validates them
        self.chain(0, [0])  # validates the parameters
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

    def chain(self, row: int, prompt: list[int]) -> list[Callable[..., Any]]:
        """Return the processors of one row, as transformers creates them for a batch of only this row.

        `prompt` has all ids before the new tokens. Raises InvalidRequest for an invalid parameter.
        """
        from transformers import GenerationMixin, PretrainedConfig

        values, eos, prefix_fn = dict(self._settings), self._settings.eos_ids, self._prefix_fn
        values |= {
            "guidance_scale": None,
            "num_beams": 1,
            "num_return_sequences": 1,
            "min_length": None,
            "min_new_tokens": self._min_tokens,
            "max_length": len(prompt) + self._new_tokens,
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
    if config is None:
        return None
    from transformers import WatermarkingConfig
    from transformers.generation.configuration_utils import BaseWatermarkingConfig

    if isinstance(config, dict):
        try:
            config = WatermarkingConfig.from_dict(config)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"watermarking_config={config!r}: {error}") from error
    check_kind("watermarking_config", config, BaseWatermarkingConfig, "a WatermarkingConfig")
    if not isinstance(config, WatermarkingConfig):
        raise NotSupported(
            f"watermarking_config={type(config).__name__}: its processor remembers earlier calls, and "
            "a processor here must depend on ids and logits alone; WatermarkingConfig does"
        )
    return config


def _checked(processors: Any) -> list[Any]:
    """Return the caller's processors; reject those that need more than ids and scores."""
    expected = "a LogitsProcessorList or a list"
    check_kind("logits_processor", processors, list | tuple | None, expected)
    for processor in processors or ():
        if not callable(processor):
            raise InvalidRequest(f"logits_processor: {processor!r} can't be called")
        if not accepts(processor, None, None, unknown=True):
            raise NotSupported(
                f"logits_processor: {type(processor).__name__}: a processor here is called with input_ids "
                "and scores, and this one can't be"
            )
    return list(processors or ())
