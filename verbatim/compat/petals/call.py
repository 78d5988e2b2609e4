"""One call of `generate` on the engine, with its stopping criteria and streamer."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from verbatim.compat.batches import PaddedRows, check_complete, new_rows
from verbatim.compat.petals.processors import Kept, Processors
from verbatim.compat.petals.settings import Settings
from verbatim.core import Completion, FinishReason, Request, SessionCache
from verbatim.errors import InvalidRequest, NotSupported, RequestFailed
from verbatim.llm import LLM
from verbatim.params import SamplingParams
from verbatim.tensors import pad_rows


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
        requests: by running row.
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
        before = past if given is None else past.followed_by(given.ids, given.mask)
        beams, copies = settings.num_beams, settings.num_copies
        # A request of beams has all completions of its row.
        self._num_kept = copies if beams > 1 else 1
        self._before = before = before if beams > 1 else before.repeated(copies)
        admission, width = llm.engine.admission, before.width
        new_tokens = settings.new_tokens(width)
        chains = Processors(
            settings,
            processors,
            prefix_fn,
            min_tokens=settings.min_tokens(width),
            vocab_size=admission.vocab_size,
        )
        params = SamplingParams(
            max_tokens=new_tokens,
            stop_token_ids=[i for i in settings.eos_ids if i < admission.vocab_size],
            ignore_eos=True,  # `eos_ids` includes the model's, unless the caller names others
            seed=seed,
            timeout_s=settings["max_time"],
            **chains.native,
        )
        if beams > 1:
            session_caches = None
            params = params.replace(
                num_beams=beams,
                n=copies,
                length_penalty=settings["length_penalty"],
                early_stopping=settings["early_stopping"] or False,
                draft=False,
            )
        self.requests: dict[int, Request] = {}
        # By row and name, the logits before ("logits") and after ("scores") processing; if requested.
        self._kept: dict[int, dict[str, Kept]] = {}
        # The number of new tokens after which a criterion ended a row.
        self._stops: dict[int, int] = {}
        for row, (prompt, end) in enumerate(zip(before.rows(), before.ends, strict=True)):
            if end is not None and None in before.ends:
                continue
            kept = {n: Kept() for n in ("logits", "scores") if settings[f"output_{n}"]}
            self._kept[row], own = kept, params
            if chains.chained:
                first, last = (([kept[n]] if n in kept else []) for n in ("logits", "scores"))
                chain = chains.chain(row, prompt, new_tokens)
                own = params.replace(logits_processors=(*first, *chain, *last))
            cache = None if session_caches is None else session_caches[row]
            self.requests[row] = admission.admit(prompt, own, first_sample=row, session_cache=cache)

    def run(self) -> Tensor | Any:
        """Return the prompts with their new tokens, `[B, P + N]`; or transformers' output with them.

        Raises:
            RequestFailed: no token can be drawn for a row, or the row was aborted.
        """
        if self._criteria or self._streamer is not None:
            self._run_observed()
        else:
            self._llm.engine.run(list(self.requests.values()))
        columns = self._before.repeated(self._num_kept)
        rows: list[list[int]] = [[] for _ in range(columns.num_rows)]
        ended, scores = [False] * len(rows), torch.zeros(len(rows))
        for row in self.requests:
            for at, output in enumerate(self._completions(row), row * self._num_kept):
                rows[at] = output.token_ids[: self._stops.get(row)]
                ended[at] = output.finish_reason is FinishReason.STOP or row in self._stops
                scores[at] = output.score or 0.0
        self.columns = columns.grown(rows, ended, self._settings.fill_id)
        with torch.inference_mode(False):
            sequences = self.columns.ids[:, self._past_width :].clone()
        if not self._settings["return_dict_in_generate"]:
            return sequences
        import transformers.generation.utils as hf

        kind: Any = hf.GenerateDecoderOnlyOutput
        values: dict[str, Any] = {}
        if self._settings.num_beams > 1:
            kind, values = hf.GenerateBeamDecoderOnlyOutput, {"sequences_scores": scores}
        for name in ("scores", "logits"):
            if self._settings[f"output_{name}"]:
                values[name] = self._steps(name)
        # Called `cache` since transformers 5.24.
        cache = next(n for n in ("cache", "past_key_values") if n in kind.__dataclass_fields__)
        return kind(
            sequences=sequences, **{cache: RemotePastKeyValues(self.columns.width)}, **values
        )

    def _completions(self, row: int) -> list[Completion]:
        result = self.requests[row].result
        assert result is not None
        outputs = result.outputs
        if row not in self._stops:
            for output in outputs:
                check_complete(row, output)
        if len(outputs) < self._num_kept:
            raise RequestFailed(
                f"row {row}: {len(outputs)} beams could end, and num_return_sequences={self._num_kept}"
            )
        return outputs

    def _steps(self, name: str) -> tuple[Tensor, ...]:
        """Return `[B, V]` for each new column; the pad of an ended row has probability 1."""
        size = self._llm.engine.admission.vocab_size
        certain = torch.full((size,), -torch.inf)
        certain[min(self._settings.fill_id, size - 1)] = 0.0
        first, steps = self._before.width, []
        for column in range(first, self.columns.width):
            step = certain.repeat(self.columns.num_rows, 1)
            for row, request in self.requests.items():
                if self.columns.mask[row, column]:
                    step[row] = self._kept[row][name][len(request.prompt_ids) + column - first]
            steps.append(step)
        return tuple(steps)

    # ---- stopping criteria and the streamer

    def _run_observed(self) -> None:
        """Step until all requests have ended, also by a criterion; send final columns to the streamer."""
        self._num_checked = dict.fromkeys(self.requests, 0)
        num_sent, streamer = 0, self._streamer
        if streamer is not None:
            streamer.put(self._before.ids[:, self._past_width :])
        with closing(self._llm.engine.steps(list(self.requests.values()))) as steps:
            for _ in steps:
                self._check_criteria()
                if streamer is None:
                    continue
                rows, ready = new_rows(self.requests, self._stops)
                new = pad_rows(rows, self._settings.fill_id, width=ready)
                for column in new[:, num_sent:].unbind(1):
                    ids = torch.full((self._before.num_rows,), self._settings.fill_id)
                    ids[list(self.requests)] = column
                    streamer.put(ids)
                num_sent = max(num_sent, ready)
        if streamer is not None:
            streamer.end()

    def _check_criteria(self) -> None:
        """Call the criteria for each new token of each row in turn."""
        for row, request in self.requests.items() if self._criteria else ():
            if row in self._stops or not request.sequences:
                continue
            new_ids = list(request.sequences[0].output_ids)
            num_checked, self._num_checked[row] = self._num_checked[row], len(new_ids)
            kept, length = self._kept[row].get("scores"), len(request.prompt_ids)
            for count in range(num_checked + 1, len(new_ids) + 1):
                ids = torch.tensor([request.prompt_ids + new_ids[:count]])
                scores = kept and tuple(kept[length + i][None] for i in range(count))
                stopped = [stop(ids, scores) for stop in self._criteria]
                if any(s.any() if isinstance(s, Tensor) else s for s in stopped):
                    self._stops[row] = count
                    self._llm.engine.abort(request)
                    break


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
