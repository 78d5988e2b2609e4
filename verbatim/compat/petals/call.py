"""One call of `generate` on the engine, with its stopping criteria and streamer."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from verbatim.compat.batches import PaddedRows, check_complete
from verbatim.compat.petals.processors import ProcessorChain, Processors
from verbatim.compat.petals.settings import Settings
from verbatim.core import Completion, FinishReason, Request, SessionCache
from verbatim.errors import InvalidRequest, NotSupported, RequestFailed
from verbatim.llm import LLM
from verbatim.params import SamplingParams


class RemotePastKeyValues:
    """A token count in place of K and V, which stay in the engine.

    Returned with `return_dict_in_generate`. To continue a sequence, use a session.

    Args:
        num_tokens: columns of prompt and completion.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Return the number of tokens, the same in every layer."""
        return self._num_tokens

    def get_max_length(self) -> int | None:
        """Return None: the session sets the limit."""
        return None

    def update_seen(self, new_seen: int) -> None:
        """Count more tokens."""
        self._num_tokens += new_seen

    def __repr__(self) -> str:
        return f"RemotePastKeyValues({self._num_tokens})"


class GenerateCall:
    """The admitted rows of a call; invalid rows are refused when it is built. `run` it once.

    Attributes:
        requests: one per running row.
        columns: after `run`, all columns: of the session, the prompt and the completion.
    """

    def __init__(
        self,
        llm: LLM,
        settings: Settings,
        criteria: list[Any],
        streamer: Any,
        processors: Any,
        prefix_fn: Any,
        past: PaddedRows,
        given: PaddedRows | None,
        *,
        seed: int,
        session_caches: list[SessionCache] | None = None,
    ) -> None:
        """
        Args:
            criteria: stopping criteria, as `check_criteria` returns them.
            processors, prefix_fn: the caller's logits processors and `prefix_allowed_tokens_fn`.
            past: earlier columns of the session.
            given: new columns; None continues `past`, without ended rows unless all have ended.
            session_caches: of the session's rows.
        """
        self._llm, self._past_width = llm, past.width
        self._settings, self._criteria, self._streamer = settings, criteria, streamer
        self._before = past if given is None else past.followed_by(given.ids, given.mask)
        if settings.num_beams == 1:
            self._before = self._before.repeated(settings.num_copies)
        width = self._before.width
        self._new_tokens = settings.new_tokens(width)
        self._processors = Processors(
            settings,
            processors,
            prefix_fn,
            min_tokens=settings.min_tokens(width),
            vocab_size=llm.engine.admission.vocab_size,
        )
        ended = [end is not None for end in self._before.ends]
        self._rows = [row for row, end in enumerate(ended) if all(ended) or not end]
        self._chains: list[ProcessorChain | None] = []
        self.requests: list[Request] = []
        # By request, the number of new tokens after which a criterion ended it.
        self._stops: dict[int, int] = {}
        prompts = self._before.rows()
        for row in self._rows:
            session_cache = None if session_caches is None else session_caches[row]
            self.requests.append(self._admit(row, prompts[row], seed, session_cache))

    def _admit(
        self, row: int, prompt: list[int], seed: int, session_cache: SessionCache | None
    ) -> Request:
        settings, admission = self._settings, self._llm.engine.admission
        chain = None
        if self._processors.chained:
            chain = self._processors.chain(row, prompt, self._new_tokens)
        self._chains.append(chain)
        fields = dict(self._processors.native)
        if settings.num_beams > 1:
            fields |= {
                "num_beams": settings.num_beams,
                "n": settings.num_copies,
                "length_penalty": settings["length_penalty"],
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
        if settings.num_beams > 1:
            session_cache = None
        return admission.admit(prompt, params, first_sample=row, session_cache=session_cache)

    def run(self) -> Tensor | Any:
        """Return the prompts with their new tokens, `[B, P + N]`; or transformers' output with them.

        Raises:
            RequestFailed: no token can be drawn for a row, or the row was aborted.
        """
        if self._criteria or self._streamer is not None:
            self._run_observed()
        else:
            self._llm.engine.run(self.requests)
        outputs = [self._completions(number) for number in range(len(self.requests))]
        rows: list[list[int]] = [[] for _ in range(self._before.num_rows)]
        ended = [False] * len(rows)
        for number, (row, completions) in enumerate(zip(self._rows, outputs, strict=True)):
            rows[row] = self._kept(number, completions[0].token_ids)
            ended[row] = completions[0].finish_reason is FinishReason.STOP or number in self._stops
        # Of beams, a session continues with the very best one.
        self.columns = self._before.grown(rows, ended, self._settings.fill_id)
        if self._settings.num_beams > 1:
            return self._beams(outputs)
        return self._output(self.columns)

    def _completions(self, number: int) -> list[Completion]:
        request, row, copies = self.requests[number], self._rows[number], self._settings.num_copies
        assert request.result is not None
        outputs = request.result.outputs
        if number not in self._stops:
            for output in outputs:
                check_complete(row, output)
        if self._settings.num_beams > 1 and len(outputs) < copies:
            raise RequestFailed(
                f"row {row}: {len(outputs)} beams could end, and num_return_sequences={copies}"
            )
        return outputs

    def _beams(self, outputs: list[list[Completion]]) -> Any:
        """Return the best completions of each row."""
        copies = self._settings.num_copies
        columns = self._before.repeated(copies)
        rows: list[list[int]] = [[] for _ in range(columns.num_rows)]
        scores = torch.zeros(len(rows))
        for row, beams in zip(self._rows, outputs, strict=True):
            for output_row, beam in enumerate(beams, start=row * copies):
                rows[output_row] = beam.token_ids
                scores[output_row] = beam.score or 0.0
        columns = columns.grown(rows, [False] * len(rows), self._settings.fill_id)
        return self._output(columns, sequences_scores=scores)

    def _output(self, columns: PaddedRows, **values: Any) -> Any:
        """Return the columns of this call, as an ordinary tensor or in transformers' output."""
        with torch.inference_mode(False):
            sequences = columns.ids[:, self._past_width :].clone()
        if not self._settings["return_dict_in_generate"]:
            return sequences
        import transformers.generation.utils as hf

        kind: Any = hf.GenerateBeamDecoderOnlyOutput if values else hf.GenerateDecoderOnlyOutput
        for name in ("scores", "logits"):
            if self._settings[f"output_{name}"]:
                values[name] = self._steps(name)
        # Called `cache` since transformers 5.24.
        cache = next(n for n in ("cache", "past_key_values") if n in kind.__dataclass_fields__)
        return kind(sequences=sequences, **{cache: RemotePastKeyValues(columns.width)}, **values)

    def _steps(self, name: str) -> tuple[Tensor, ...]:
        """Return `[B, V]` for each new column; the pad of an ended row has probability 1."""
        size = self._llm.engine.admission.vocab_size
        certain = torch.full((size,), -torch.inf)
        certain[min(self._settings.fill_id, size - 1)] = 0.0
        first, steps = self._before.width, []
        for column in range(first, self.columns.width):
            step = certain.repeat(self.columns.num_rows, 1)
            for row, request, chain in zip(self._rows, self.requests, self._chains, strict=True):
                if self.columns.mask[row, column]:
                    step[row] = getattr(chain, name)[len(request.prompt_ids) + column - first]
            steps.append(step)
        return tuple(steps)

    # ---- stopping criteria and the streamer

    def _run_observed(self) -> None:
        """Step until all requests have ended, also by a criterion."""
        self._num_checked = [0] * len(self.requests)
        self._num_sent = 0
        if self._streamer is not None:
            self._streamer.put(self._before.ids[:, self._past_width :])
        with closing(self._llm.engine.steps(self.requests)) as steps:
            for _ in steps:
                self._check_criteria()
                self._send()
        if self._streamer is not None:
            self._streamer.end()

    def _check_criteria(self) -> None:
        """Call the criteria for each new token of each row in turn."""
        for number, request in enumerate(self.requests if self._criteria else []):
            if number in self._stops or not request.sequences:
                continue
            new_ids = list(request.sequences[0].output_ids)
            num_checked, self._num_checked[number] = self._num_checked[number], len(new_ids)
            chain, length = self._chains[number], len(request.prompt_ids)
            for count in range(num_checked + 1, len(new_ids) + 1):
                ids = torch.tensor([request.prompt_ids + new_ids[:count]])
                scores = None
                if chain is not None and chain.scores:
                    scores = tuple(chain.scores[length + i][None] for i in range(count))
                stopped = [stop(ids, scores) for stop in self._criteria]
                if any(s.any() if isinstance(s, Tensor) else s for s in stopped):
                    self._stops[number] = count
                    self._llm.engine.abort(request)
                    break

    def _send(self) -> None:
        """Send the final columns to the streamer."""
        if self._streamer is None:
            return
        new_rows = [self._kept(n, r.sequences[0].output_ids) for n, r in enumerate(self.requests)]
        growing = [
            len(ids)
            for number, (request, ids) in enumerate(zip(self.requests, new_rows, strict=True))
            if not (number in self._stops or request.sequences[0].finished)
        ]
        ready = min(growing) if growing else max(map(len, new_rows), default=0)
        for column in range(self._num_sent, ready):
            ids = torch.full((self._before.num_rows,), self._settings.fill_id)
            for row, new_ids in zip(self._rows, new_rows, strict=True):
                if column < len(new_ids):
                    ids[row] = new_ids[column]
            self._streamer.put(ids)
        self._num_sent = max(self._num_sent, ready)

    def _kept(self, number: int, ids: list[int]) -> list[int]:
        """Return a request's new ids, cut where a criterion ended it."""
        return ids[: self._stops.get(number, len(ids))]


def check_criteria(
    llm: LLM, settings: Settings, criteria: Any, streamer: Any, tokenizer: Any
) -> list[Any]:
    """Return the stopping criteria of a call, those of its `stop_strings` included.

    Args:
        tokenizer: a transformers tokenizer for `stop_strings`; None takes the model's.

    Raises:
        InvalidRequest, NotSupported: an argument that can't be called, or with beams.
    """
    checks = [] if criteria is None else criteria
    if not isinstance(checks, list | tuple) or not all(map(callable, checks)):
        raise InvalidRequest(
            f"stopping_criteria={criteria!r}: must be a StoppingCriteriaList or a list of callables"
        )
    checks, strings = list(checks), settings["stop_strings"]
    if strings is not None:
        many = [strings] if isinstance(strings, str) else strings
        if not isinstance(many, list | tuple) or not all(isinstance(s, str) and s for s in many):
            raise InvalidRequest(f"stop_strings={strings!r}: must be a string or a list of strings")
        from transformers import StopStringCriteria

        if tokenizer is None and llm.tokenizer is not None:
            tokenizer = llm.tokenizer.hf
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
                f"{name} with num_beams={beams}: which beam is the best is known in the end alone"
            )
    return checks
