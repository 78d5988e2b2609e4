"""One call of `generate` on the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verbatim.compat.petals.cache import RemotePastKeyValues
from verbatim.compat.petals.given import TokenColumns
from verbatim.compat.petals.observer import TokenObserver
from verbatim.compat.petals.processors import ProcessorChain, Processors
from verbatim.compat.petals.settings import Settings
from verbatim.core import Completion, FinishReason, Request, SessionCache
from verbatim.errors import RequestFailed
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.placement.actor import rename_cache


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """The options of a turn.

    Attributes:
        processors: the caller's logits processors.
        prefix_fn: `prefix_allowed_tokens_fn`.
    """

    settings: Settings
    observer: TokenObserver
    processors: Any = None
    prefix_fn: Any = None


class Turn:
    """The admitted rows of a call; invalid rows are refused when it is built. `run` it once.

    Attributes:
        requests: one per running row.
        columns: after `run`, all columns: of the session, the prompt and the completion.
    """

    def __init__(
        self,
        llm: LLM,
        options: TurnOptions,
        past: TokenColumns,
        given: TokenColumns | None,
        *,
        seed: int,
        session_caches: list[SessionCache] | None = None,
    ) -> None:
        """
        Args:
            past: earlier columns of the session.
            given: new columns; None continues `past`, without ended rows unless all have ended.
            session_caches: of the session's rows.
        """
        self._llm, self._wish, self._past_width = llm, options, past.width
        settings = options.settings
        self._before = past if given is None else past.followed_by(given.ids, given.mask)
        self._copies = settings.num_copies
        if settings.num_beams == 1:
            self._before = self._before.repeated(self._copies)
        width = self._before.width
        self._new_tokens = settings.new_tokens(width)
        vocab_size = llm.engine.admission.vocab_size
        self._processors = Processors(
            settings,
            options.processors,
            options.prefix_fn,
            min_tokens=settings.min_tokens(width),
            vocab_size=vocab_size,
        )
        ended = [end is not None for end in self._before.ends]
        all_ended = all(ended)
        self._rows = [row for row, end in enumerate(ended) if all_ended or not end]
        self._chains: list[ProcessorChain | None] = []
        self.requests: list[Request] = []
        prompts = self._before.rows()
        for row in self._rows:
            session_cache = None if session_caches is None else session_caches[row]
            self.requests.append(self._admit(row, prompts[row], seed, session_cache))

    def _admit(
        self, row: int, prompt: list[int], seed: int, session_cache: SessionCache | None
    ) -> Request:
        settings, admission = self._wish.settings, self._llm.engine.admission
        chain = None
        if self._processors.chained:
            chain = self._processors.chain(row, prompt, self._new_tokens)
        self._chains.append(chain)
        fields = dict(self._processors.native)
        if settings.num_beams > 1:
            fields |= {
                "num_beams": settings.num_beams,
                "n": self._copies,
                "length_penalty": 1.0 if (p := settings["length_penalty"]) is None else p,
                "early_stopping": settings["early_stopping"] or False,
                "draft": False,
            }
        params = SamplingParams(
            max_tokens=self._new_tokens,
            stop_token_ids=[i for i in settings.eos_ids if i < admission.vocab_size],
            ignore_eos=True,  # `eos_ids` includes the model's, unless the caller names others
            seed=seed,
            timeout_s=settings["max_time"],
            logits_processors=() if chain is None else (chain,),
            **fields,
        )
        if session_cache is None or settings.num_beams > 1:
            return admission.admit(prompt, params, first_sample=row)
        request = admission.admit_turn(None, prompt, params, session_cache)
        request.first_sample = row
        return request

    def run(self) -> Tensor | Any:
        """Return the prompts with their new tokens, `[B, P + N]`; or transformers' output with them.

        Raises:
            RequestFailed: no token can be drawn for a row, or the row was aborted.
        """
        observer = self._wish.observer
        if observer.is_active:
            given = self._before.ids[:, self._past_width :]
            observer.run(self._llm, self.requests, self._rows, given, self._chains)
        else:
            self._llm.engine.run(self.requests)
        if self._wish.settings.num_beams > 1:
            return self._beams()
        rows: list[list[int]] = [[] for _ in range(self._before.num_rows)]
        ended = [False] * len(rows)
        for number, (row, request) in enumerate(zip(self._rows, self.requests, strict=True)):
            (completion,) = _completions(request, row, stopped=number in observer.stops)
            rows[row] = observer.kept(number, completion.token_ids)
            ended[row] = completion.finish_reason is FinishReason.STOP or number in observer.stops
        self.columns = self._before.grown(rows, ended, self._wish.settings.fill_id)
        return self._output()

    def _beams(self) -> Any:
        """Return the best completions of each row; a session continues with the very best one."""
        beams_of_rows = [
            _completions(request, row, stopped=False)
            for row, request in zip(self._rows, self.requests, strict=True)
        ]
        for row, beams in zip(self._rows, beams_of_rows, strict=True):
            if len(beams) < self._copies:
                raise RequestFailed(
                    f"row {row}: {len(beams)} beams could end, and num_return_sequences={self._copies}"
                )
        best: list[list[int]] = [[] for _ in range(self._before.num_rows)]
        ended = [False] * len(best)
        for row, beams in zip(self._rows, beams_of_rows, strict=True):
            best[row] = beams[0].token_ids
            ended[row] = beams[0].finish_reason is FinishReason.STOP
        fill = self._wish.settings.fill_id
        self.columns = self._before.grown(best, ended, fill)
        wide = self._before.repeated(self._copies)
        all_rows: list[list[int]] = [[] for _ in range(wide.num_rows)]
        scores = torch.zeros(wide.num_rows)
        for row, beams in zip(self._rows, beams_of_rows, strict=True):
            for output_row, beam in enumerate(beams, start=row * self._copies):
                all_rows[output_row] = beam.token_ids
                scores[output_row] = beam.score or 0.0
        wide = wide.grown(all_rows, [False] * wide.num_rows, fill)
        if not self._wish.settings["return_dict_in_generate"]:
            return self._this_call(wide)
        from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

        return _make_output(
            GenerateBeamDecoderOnlyOutput,
            sequences=self._this_call(wide),
            sequences_scores=scores,
            cache=RemotePastKeyValues(wide.width),
        )

    def _output(self) -> Any:
        settings = self._wish.settings
        if not settings["return_dict_in_generate"]:
            return self._this_call(self.columns)
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return _make_output(
            GenerateDecoderOnlyOutput,
            sequences=self._this_call(self.columns),
            scores=self._steps("scores") if settings["output_scores"] else None,
            logits=self._steps("logits") if settings["output_logits"] else None,
            cache=RemotePastKeyValues(self.columns.width),
        )

    def _this_call(self, columns: TokenColumns) -> Tensor:
        """Return the columns of this call, as an ordinary tensor."""
        with torch.inference_mode(False):
            return columns.ids[:, self._past_width :].clone()

    def _steps(self, name: str) -> tuple[Tensor, ...]:
        """Return `[B, V]` for each new column; the pad of an ended row has probability 1."""
        size = self._llm.engine.admission.vocab_size
        certain = torch.full((size,), -torch.inf)
        certain[min(self._wish.settings.fill_id, size - 1)] = 0.0
        first, steps = self._before.width, []
        for column in range(first, self.columns.width):
            step = certain.repeat(self.columns.num_rows, 1)
            for row, request, chain in zip(self._rows, self.requests, self._chains, strict=True):
                assert chain is not None
                if self.columns.mask[row, column]:
                    kept = getattr(chain, name)
                    step[row] = kept[len(request.prompt_ids) + column - first]
            steps.append(step)
        return tuple(steps)


def _completions(request: Request, row: int, *, stopped: bool) -> list[Completion]:
    """Return the completions of a finished request.

    Args:
        stopped: whether a criterion ended it.
    """
    assert request.result is not None
    outputs = request.result.outputs
    if not stopped and any(c.finish_reason is FinishReason.ABORT for c in outputs):
        raise RequestFailed(f"row {row} was ended from outside, by close() or pause('abort')")
    return outputs


def _make_output(cls: Any, **values: Any) -> Any:
    """Return an output of transformers, with the cache under the name that this version has for it."""
    return cls(**rename_cache(values, cls.__dataclass_fields__))
