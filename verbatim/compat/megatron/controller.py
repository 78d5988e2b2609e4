"""`TextGenerationController`: Megatron's interface for text generation."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import verbatim
from verbatim.api.llm import LLM
from verbatim.api.padded import pad_rows
from verbatim.api.tensors import engine_of, has_known_layers, open_forward
from verbatim.batch import SamplePlan, SampleRow
from verbatim.common.checks import optional_integer
from verbatim.compat.megatron.context import DynamicInferenceContext, StopCallback
from verbatim.compat.megatron.request import InferenceRequest, SamplingParams
from verbatim.compat.megatron.static import AsyncStream, fill_partial, run_static_batch
from verbatim.compat.megatron.translation import Translation, detokenize, eod_of, tokenize_prompt
from verbatim.compat.shared import by_name
from verbatim.core import TopLogprobs
from verbatim.errors import InvalidRequest, NotSupported, UnsupportedModel, VerbatimError
from verbatim.params import SamplingParams as EngineParams
from verbatim.sampling.sampler import sample_rows

TopNDict = dict[int, list[dict[str, float]]]
_KWARGS = ("common_inference_params", "position")
_STEP_LENGTH = 4096  # maximum tokens of a request if its wrapper sets no limit
# Documented internals of a step that have no counterpart, with what to use instead.
_REPLACED = by_name(
    {
        "the engine does it inside of a step; call generate_output_tokens_dynamic_batch": (
            "_dynamic_step_context_init _dynamic_step_forward_logits"
        ),
        'drafts are verified inside of a step; open the LLM with draft=, such as draft="mtp"': (
            "_dynamic_step_sample_logits_and_verify_tokens _compute_serial_mtp_and_sample"
        ),
        "log-probs come with the samples; set return_log_probs or top_n_logprobs of a request": (
            "_dynamic_step_calculate_log_probs _dynamic_step_calculate_log_probs_speculative "
            "_dynamic_step_calculate_top_n_logprobs _dynamic_step_calculate_top_n_logprobs_speculative"
        ),
    }
)


@dataclass(eq=False)
class InferenceWrappedModel:
    """An open `LLM` or a live module with an inference context, like Megatron's wrapper."""

    model: LLM | nn.Module
    inference_context: Any = None


class TextGenerationController:
    """Tokenizes, generates on the engine, and detokenizes.

    Args:
        inference_wrapped_model: an open `LLM`; a live transformers module, for which one engine is kept;
            an object with one of these as `model`; or any object with Megatron's `run_one_forward_step`,
            which is called with each whole row. Its `inference_context` is replaced, and the old one's
            `max_sequence_length` remains the limit.
        tokenizer: a Hugging Face tokenizer, or one with Megatron's interface (`tokenize`, `detokenize`,
            `bos`, `eod`, `vocab_size`); None takes the `LLM`'s.

    Attributes:
        inference_wrapped_model: the argument, or an `InferenceWrappedModel` around it.
        inference_context: the dynamic batch; see its `add_request`.
        vocab_size: width of the model's logits.

    Raises:
        InvalidRequest: a model of another type.
    """

    num_speculative_tokens = 0  # draft tokens per decoding request
    # (request indices, temperature, top_k, top_p) of each bucket.
    _torch_sampling_buckets: Sequence[tuple[Sequence[int], float, int, float]] = ()

    def __init__(self, inference_wrapped_model: Any, tokenizer: Any = None) -> None:
        if isinstance(inference_wrapped_model, LLM | nn.Module):
            inference_wrapped_model = InferenceWrappedModel(inference_wrapped_model)
        old_context = getattr(inference_wrapped_model, "inference_context", None)
        limit = getattr(old_context, "max_sequence_length", None)
        limit = limit if isinstance(limit, int) else None
        self._translation = Translation(_runnable(inference_wrapped_model, limit), tokenizer, limit)
        self.inference_context = DynamicInferenceContext(self._translation)
        self.inference_wrapped_model = inference_wrapped_model
        inference_wrapped_model.inference_context = self.inference_context
        self.vocab_size: int = self._translation.llm.engine.admission.vocab_size
        self._stop: StopCallback | None = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; it may be replaced while no request runs."""
        return self._translation.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        if running := self.inference_context.total_request_count:
            raise InvalidRequest(
                f"tokenizer: the dynamic batch holds {running} requests that use the current one; "
                "set it after they have finished"
            )
        self._translation.set_tokenizer(tokenizer)

    def set_stop_word_finished_ids_callback(self, callback: StopCallback | None) -> None:
        """Set a callback that receives the ids of requests with a new token, and returns those to end."""
        self._stop = callback

    # ---- text and ids

    tokenize_prompt = staticmethod(tokenize_prompt)
    detokenize = staticmethod(detokenize)

    def detokenize_generations(
        self,
        tokens_gpu_tensor: Tensor,
        lengths_gpu_tensor: Tensor | int,
        detokenize_segments: bool,
        skip_special_tokens: bool = True,
    ) -> tuple[str, list[str] | None] | tuple[list[str], list[list[str]] | None]:
        """Return the text of a sequence `[L]` and of each of its tokens; for a batch `[B, L]`, lists of them.

        The second value is None without `detokenize_segments`.
        """
        tokens, lengths = tokens_gpu_tensor, torch.as_tensor(lengths_gpu_tensor).flatten().tolist()
        if not isinstance(tokens, Tensor) or tokens.is_floating_point():
            raise InvalidRequest(f"tokens_gpu_tensor={tokens!r}: must be a tensor of ids")
        rows = torch.atleast_2d(tokens)
        fits = rows.dim() == 2 and len(lengths) == len(rows)
        if not fits or not all(0 <= n <= rows.shape[1] for n in lengths):
            raise InvalidRequest(
                f"tokens {list(tokens.shape)} and lengths {lengths}: must be [L] and one length, or "
                "[B, L] and B of them, each 0 to L"
            )
        ids = [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]
        translation = self._translation
        texts = [translation.detokenize(row, True, skip_special_tokens) for row in ids]
        segments = None
        if detokenize_segments:
            segments = [translation.segments(row, (), skip_special_tokens) for row in ids]
        if tokens.dim() == 2:
            return texts, segments
        return texts[0], None if segments is None else segments[0]

    def pad_input_prompt_tokens(
        self,
        batch_prompt_tokens_list: Sequence[Sequence[int]],
        padded_batch_size: int,
        padded_sequence_length: int,
    ) -> Tensor:
        """Return the prompts as `[padded_batch_size, padded_sequence_length]`, padded with `eod`."""
        longest = max(map(len, batch_prompt_tokens_list), default=0)
        if len(batch_prompt_tokens_list) > padded_batch_size or longest > padded_sequence_length:
            raise InvalidRequest(
                f"{len(batch_prompt_tokens_list)} prompts of up to {longest} tokens don't fit into "
                f"{padded_batch_size} x {padded_sequence_length}"
            )
        eod = eod_of(self._translation.need_tokenizer("padding"))
        if eod is None:
            raise InvalidRequest("prompts are padded with the tokenizer's eod, which it lacks")
        return pad_rows(
            batch_prompt_tokens_list, eod, num_rows=padded_batch_size, width=padded_sequence_length
        )

    def unpad_input_prompt_tokens(
        self, padded_batch_prompt_tokens: Tensor, original_batch_size: int
    ) -> Tensor:
        """Return the first `original_batch_size` rows."""
        return padded_batch_prompt_tokens[:original_batch_size]

    def prep_inference_input(
        self,
        prompts_tokens: Tensor,
        active_requests: Mapping[int, InferenceRequest] | None = None,
        use_attention_mask: bool = False,
    ) -> dict[str, Any]:
        """Return `tokens`, `position_ids` and `attention_mask` for a custom loop; `generate_*` do not use it.

        If the wrapper has a `prep_inference_input`, it is called. With `use_attention_mask`, the mask is
        causal, `[1, 1, S, S]`, True where a position is hidden.
        """
        length, device = prompts_tokens.shape[1], prompts_tokens.device
        prepare = getattr(self.inference_wrapped_model, "prep_inference_input", None)
        positions = torch.arange(length, device=device).expand(prompts_tokens.shape)
        default = {"tokens": prompts_tokens, "position_ids": positions, "attention_mask": None}
        inputs: dict[str, Any] = default if prepare is None else prepare(prompts_tokens)
        if use_attention_mask and inputs.get("attention_mask") is None:
            hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
            inputs["attention_mask"] = hidden
        return inputs

    # ---- logits

    def sample_from_logits(
        self,
        last_token_logits: Tensor,
        sampling_params: SamplingParams | None = None,
        vocab_size: int | None = None,
        generation_started: Tensor | None = None,
        top_n_logprobs_dict: TopNDict | None = None,
        logits: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Draw one id per row of `[B, V]`, row b with sample index b: `[B]` int64.

        Args:
            sampling_params: a `seed` requires `position`, the absolute position of the token to draw.
            vocab_size: larger ids are not drawn.
            generation_started: `[B]` bool; with `skip_prompt_log_probs`, only True rows report their top-n.
            top_n_logprobs_dict: with `top_n_logprobs`, {text: log-prob} is appended at each row's index.
            logits: `[B, S, V]`, to report the top-n of every position instead of only the last.
            kwargs: `position`; `common_inference_params`, the former name of `sampling_params`.
        """
        for name in kwargs:
            if name not in _KWARGS:
                raise NotSupported(f"{name}: not known; must be one of {', '.join(_KWARGS)}")
        params = SamplingParams.of(kwargs.get("common_inference_params") or sampling_params)
        if params.top_n_logprobs:
            if top_n_logprobs_dict is None:
                raise InvalidRequest(
                    f"top_n_logprobs={params.top_n_logprobs} needs a top_n_logprobs_dict"
                )
            if params.skip_prompt_log_probs:
                if logits is not None:
                    raise InvalidRequest("logits of a prompt with skip_prompt_log_probs=True")
                if generation_started is None:
                    raise InvalidRequest("skip_prompt_log_probs=True needs generation_started")
            started = generation_started if params.skip_prompt_log_probs else None
            positions = last_token_logits[:, None] if logits is None else logits
            for row, row_logits in enumerate(positions):
                if started is None or started[row]:
                    tops = self._translation.by_text(
                        _top_of_rows(row_logits, params.top_n_logprobs)
                    )
                    top_n_logprobs_dict.setdefault(row, []).extend(tops)
        return _draw(last_token_logits, params, vocab_size, kwargs.get("position"))

    def update_generation_status(
        self,
        updated_prompts_tokens: Tensor,
        generation_started: Tensor,
        current_context_end_position: int,
        is_generation_done_tensor: Tensor,
        generated_sequence_lengths: Tensor,
        termination_id: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return which rows are done after the token at one position, and the lengths without the ending id.

        Prompt ids do not end a row. Arguments are not modified. `termination_id` defaults to `eod`.
        """
        if termination_id is None:
            termination_id = eod_of(self._translation.need_tokenizer("termination_id=None"))
        latest = updated_prompts_tokens[:, current_context_end_position]
        ends = latest == (-1 if termination_id is None else termination_id)
        done = is_generation_done_tensor | (ends & generation_started)
        return done, (generated_sequence_lengths + (~done & generation_started)).int()

    def _torch_sampling_func(
        self,
        last_token_logits: Tensor,
        temperature: float,
        top_k: int,
        top_p: float,
        vocab_size: int | None = None,
    ) -> Tensor:
        """Draw one id per row of `[B, V]`: `[B]` int64."""
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        return _draw(last_token_logits, params, vocab_size)

    def _update_top_n_logprobs_dict(
        self,
        top_n_logprobs_this_step: Tensor,
        top_n_logprobs_indices: Tensor,
        mask: Tensor,
        top_n_logprobs_dict: TopNDict,
    ) -> None:
        """Append {text: log-prob} for each row of `[B, n]` selected by `mask` `[B]`."""
        rows = zip(top_n_logprobs_indices.tolist(), top_n_logprobs_this_step.tolist(), strict=True)
        tops = [list(zip(ids, values, strict=True)) for ids, values in rows]
        entries = self._translation.by_text(tops)
        for row, (entry, selected) in enumerate(zip(entries, mask.tolist(), strict=True)):
            if selected:
                top_n_logprobs_dict.setdefault(row, []).append(entry)

    # ---- a batch at once

    def generate_all_output_tokens_static_batch(
        self,
        active_requests: dict[int, InferenceRequest],
        active_streams: Mapping[Any, AsyncStream] | None = None,
    ) -> dict[int, InferenceRequest]:
        """Generate for all requests, each with its own params, fill in their outputs, and return them.

        Requests without a seed share a seed from torch's default generator; request i of the batch
        draws with sample index i. A request with its own seed draws as if it were alone. Streams,
        by request id, receive the partial results; closing a stream early ends its request.

        Raises:
            InvalidRequest: a request is invalid; raised before any forward.
        """
        return run_static_batch(self._translation, active_requests, active_streams or {})

    def stream_tokens(
        self,
        sampling_params: SamplingParams,
        request_ids: Sequence[int],
        requests: Sequence[InferenceRequest],
        streams: Sequence[AsyncStream],
        generation_started: Sequence[bool] | Tensor,
        is_generation_done: Sequence[bool] | Tensor,
        tokens: Sequence[Tensor] | Tensor,
        prompt_lengths: Sequence[int] | Tensor,
        generated_lengths: Sequence[int] | Tensor,
        output_log_probs: Sequence[Tensor | None] | Tensor | None,
    ) -> None:
        """Put the output so far of each request into its stream, for a custom loop.

        A row of `tokens` is a prompt and its completion; `output_log_probs` starts at the second token.
        """
        for row, (number, request, stream) in enumerate(
            zip(request_ids, requests, streams, strict=True)
        ):
            if not generation_started[row] or sampling_params.num_tokens_to_generate == 0:
                continue
            start, length = int(prompt_lengths[row]), int(generated_lengths[row])
            row_logprobs = None if output_log_probs is None else output_log_probs[row]
            ids = tokens[row][start : start + length].tolist()
            text, segments = "", None
            if self._translation.text is not None:
                text = self._translation.detokenize(ids)
                if sampling_params.return_segments:
                    segments = self._translation.segments(ids, tokens[row][:start].tolist())
            logprobs = None if row_logprobs is None else row_logprobs[start - 1 :][:length].tolist()
            result = copy.copy(request)
            result.request_id = number
            stream.put(fill_partial(result, sampling_params, ids, logprobs, text, segments))
            if is_generation_done[row] or length == sampling_params.num_tokens_to_generate:
                stream.finish()

    # ---- step by step

    async def async_generate_output_tokens_dynamic_batch(
        self, skip_bookkeeping: bool | None = False
    ) -> dict[str, Any] | None:
        """Run one step for all requests of `inference_context`; return None if there are none.

        The step runs in a thread, so it does not block the event loop. If the call is cancelled, the
        next call returns the step's output. With `skip_bookkeeping`, the output is returned but not
        committed; the next call samples the same.

        Returns:
            `active_request_ids`: requests with a new token, and `sample`: those tokens, `[A]` int64;
            `log_probs`: of the raw distribution, `[A]` float32, NaN for requests without log-probs, None
            if no request asks for them; `finished_request_ids`: ended requests, each reported once;
            `newly_paused_request_ids`: preempted requests; `routing_indices_per_request`: by request,
            the experts of the rows computed for its token, `[rows, layers, k]` int16, None unless the
            model's config has `moe_enable_routing_replay`; `cuda_graph_request_count`: None.
        """
        context = self.inference_context
        if skip_bookkeeping:
            return await asyncio.to_thread(context.peek)
        await asyncio.to_thread(context.step)
        return context.collect(self._stop)

    def generate_output_tokens_dynamic_batch(
        self, loop: asyncio.AbstractEventLoop | None = None
    ) -> dict[str, Any] | None:
        """Run `async_generate_output_tokens_dynamic_batch` from synchronous code, in `loop` if there is one.

        Raises:
            VerbatimError: the calling thread runs `loop`, which would deadlock.
        """
        if loop is None:
            self.inference_context.step()
            return self.inference_context.collect(self._stop)
        if asyncio._get_running_loop() is loop:
            raise VerbatimError(
                "this event loop is running here; await async_generate_output_tokens_dynamic_batch()"
            )
        step = self.async_generate_output_tokens_dynamic_batch()
        if loop.is_running():
            return asyncio.run_coroutine_threadsafe(step, loop).result()
        return loop.run_until_complete(step)

    # ---- a step in parts: the rows of decoding requests (a base token and its drafts), then those in prefill

    def _get_required_logit_indices(
        self,
        request_in_prefill_status_tensor: Tensor,
        request_query_lengths: Tensor,
        num_decode_requests: int,
        num_prefill_requests: int,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return the required logit rows `[R]` int64: all of a decoding request, the last of one in prefill.

        The status `[N]` has zeros for decode, then ones for prefill; `request_query_lengths` counts rows.
        """
        _check_order(request_in_prefill_status_tensor, num_decode_requests, num_prefill_requests)
        lengths = request_query_lengths.long()
        decode = torch.arange(int(lengths[:num_decode_requests].sum()), device=lengths.device)
        last_rows = lengths.cumsum(0)[num_decode_requests:] - 1
        return torch.cat([decode, last_rows]).to(device)

    def _sample_from_logits_2d(self, logits_2d: Tensor) -> Tensor:
        """Draw for each request with the parameters of its bucket, `[N, V]` to `[N]`; each needs a bucket."""
        return self._sample(logits_2d, torch.ones(len(logits_2d), dtype=torch.int64))

    def _sample_speculative_logits(
        self, required_logits: Tensor, request_in_prefill_status_tensor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw for every required row of `[R, V]`; return the ids `[R]`, and each request's rows `[N]`."""
        in_prefill = request_in_prefill_status_tensor.bool()
        repeats = torch.where(in_prefill, 1, 1 + self.num_speculative_tokens)
        if int(repeats.sum()) != len(required_logits):
            raise InvalidRequest(f"{len(required_logits)} rows of logits for {repeats.tolist()}")
        return self._sample(required_logits, repeats), repeats

    def _sample(self, logits: Tensor, repeats: Tensor) -> Tensor:
        buckets = self._torch_sampling_buckets
        members = {int(index) for indices, *_ in buckets for index in indices}
        if missing := [index for index in range(len(repeats)) if index not in members]:
            raise InvalidRequest(f"requests {missing} are in no bucket of _torch_sampling_buckets")
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        request_of_row = _request_of_row(repeats)
        for indices, temperature, top_k, top_p in buckets:
            members_of_bucket = torch.tensor([*indices], dtype=torch.int64, device=repeats.device)
            rows = torch.isin(request_of_row, members_of_bucket).to(logits.device)
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
            ids[rows] = _draw(logits[rows], params)
        return ids

    def _verify_speculative_tokens(
        self,
        output_tokens: Tensor,
        input_tokens_required: Tensor,
        request_in_prefill_status_tensor: Tensor,
        repeats: Tensor,
        num_decode_requests: int,
        num_prefill_requests: int,
        active_request_count: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each request's last accepted row `[N]`, the mask of accepted rows `[R]`, the input `[R]`.

        The first row of a request is always accepted. A draft is accepted if the row before it is, and that
        row's draw (`output_tokens` `[R]`) equals it. `repeats` `[N]` has the number of rows of each request.
        """
        _check_order(request_in_prefill_status_tensor, num_decode_requests, num_prefill_requests)
        if active_request_count != num_decode_requests + num_prefill_requests:
            raise InvalidRequest(
                f"active_request_count={active_request_count}: there are {num_decode_requests} "
                f"requests that decode and {num_prefill_requests} in prefill"
            )
        inputs = input_tokens_required.reshape(-1)
        starts = repeats.cumsum(0) - repeats
        request_of_row = _request_of_row(repeats)
        differs = torch.zeros_like(inputs, dtype=torch.bool)
        differs[1:] = inputs[1:] != output_tokens[:-1]
        misses = differs.cumsum(0)
        mask = misses == misses[starts][request_of_row]  # no miss after the request's first row
        accepted = torch.zeros_like(repeats).scatter_add(0, request_of_row, mask.long())
        return starts + accepted - 1, mask, inputs

    def _dynamic_step_sample_bookkeeping(self) -> None:
        """Group the requests of `inference_context` by their parameters, for `_sample_from_logits_2d`."""
        buckets: dict[tuple[float, int, float], list[int]] = {}
        for index, params in enumerate(self._running_params()):
            buckets.setdefault((params.temperature, params.top_k, params.top_p), []).append(index)
        self._torch_sampling_buckets = [(indices, *key) for key, indices in buckets.items()]

    def _running_params(self) -> list[SamplingParams]:
        requests = self.inference_context.requests.values()
        return [request.sampling_params or SamplingParams() for request in requests]

    def _dynamic_step_sample_logits(self, logits: Tensor) -> Tensor:
        """Draw one id per request of the last bookkeeping from `[N, V]` or `[1, N, V]`."""
        return self._sample_from_logits_2d(logits[0] if logits.dim() == 3 else logits)

    def _dynamic_step_log_probs_bookkeeping(self) -> tuple[bool, bool]:
        """Return whether any request asks for log-probs, and whether any asks for a top-n."""
        params = self._running_params()
        return any(p.return_log_probs for p in params), any(p.top_n_logprobs for p in params)

    def _dynamic_step_context_bookkeeping(self) -> dict[str, Any]:
        """Return the unreported output in the form of a step's, without running a step."""
        return self.inference_context.collect(self._stop) or {}

    def _router_record_bookkeeping(self) -> dict[int, Tensor] | None:
        """Return the unreported experts by request, `[rows, layers, k]` int16.

        None unless the model's config has `moe_enable_routing_replay`.
        """
        return self.inference_context.routing()

    def _get_mtp_num_heads(self) -> int:
        """Return the number of MTP layers according to the model's config."""
        config = self._translation.llm.engine.config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        names = ("num_mtp_layers", "mtp_num_hidden_layers")
        return next((int(n) for name in names if (n := getattr(config, name, None))), 0)

    def _init_dynamic_sampling_tensors(self) -> None:
        """Clear the buckets: each request carries its own parameters."""
        self._torch_sampling_buckets = []

    def _rewind_kv_cache(self) -> None:
        """Do nothing: a step counts only accepted tokens, and drafts use no tensors of the controller."""

    _init_mtp_sampling_tensor = _dummy_serial_mtp_forward = _rewind_kv_cache

    def dummy_forward(self) -> None:
        """Run the model once on the scratch block, without effect on any request."""
        self._translation.llm.engine.dummy_forward()


def _draw(
    logits: Tensor,
    params: SamplingParams,
    vocab_size: int | None = None,
    position: int | None = None,
) -> Tensor:
    """Draw one id per row of `[B, V]`, as `verbatim.sample`, from the first `vocab_size` ids or all."""
    vocab_size = optional_integer("vocab_size", vocab_size, 1)
    if isinstance(logits, Tensor) and logits.dim():  # else refused below
        logits = logits[..., :vocab_size]
    return verbatim.sample(logits, **params.sampling(), seed=params.seed, position=position)


def _top_of_rows(logits: Tensor, top_n: int) -> list[TopLogprobs]:
    """Return the `top_n` likeliest ids of each row of `[R, V]`, without drawing."""
    row = SampleRow(EngineParams(), 0, 0, 0, target=0, num_logprobs=top_n)
    return [draw.top for draw in sample_rows(logits, SamplePlan([row] * logits.shape[0]))]


def _request_of_row(repeats: Tensor) -> Tensor:
    """Return the request of each row, given each request's number of rows `[N]`."""
    return torch.arange(len(repeats), device=repeats.device).repeat_interleave(repeats)


def _check_order(in_prefill: Tensor, num_decode: int, num_prefill: int) -> None:
    if in_prefill.bool().tolist() != [False] * num_decode + [True] * num_prefill:
        raise InvalidRequest(
            f"prefill status {in_prefill.tolist()}: must be {num_decode} zeros, then {num_prefill} ones"
        )


def _runnable(wrapped: Any, max_length: int | None) -> LLM | nn.Module:
    """Return the model of a wrapper, or an `LLM` over its `run_one_forward_step`."""
    model, has_step = getattr(wrapped, "model", None), hasattr(wrapped, "run_one_forward_step")
    if isinstance(model, LLM) or has_known_layers(model) or not has_step:
        if not isinstance(model, LLM | nn.Module):
            raise InvalidRequest(
                f"inference_wrapped_model={wrapped!r}: must be an LLM, a transformers module, or "
                "an object with such a `model`, or with run_one_forward_step"
            )
        try:
            engine_of(model)
            return model
        except UnsupportedModel:
            if not has_step:
                raise
    if max_length is None:
        config = getattr(wrapped, "inference_wrapper_config", None)
        configured = getattr(config, "inference_max_seq_length", None)
        max_length = configured or getattr(model, "max_sequence_length", None) or _STEP_LENGTH
    return open_forward(wrapped, max_length=max_length)


def _replaced(name: str, use: str) -> Callable[..., NoReturn]:
    def method(self: TextGenerationController, *_: Any, **__: Any) -> NoReturn:
        raise NotSupported(f"{name}: {use}")

    method.__name__ = name
    method.__doc__ = f"Raise NotSupported: {use}."
    return method


for _name, _use in _REPLACED.items():
    setattr(TextGenerationController, _name, _replaced(_name, _use))
