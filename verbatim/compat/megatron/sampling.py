"""Sampling of logit rows with Megatron's parameters, and its index arithmetic for draft tokens.

The rows of a step with draft tokens are grouped by request: decoding requests (a base token and its
drafts) first, requests in prefill after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verbatim.batch import Draws, SamplePlan, SampleRow
from verbatim.compat.batches import draw_seed
from verbatim.compat.megatron.params import SamplingParams
from verbatim.core import TopLogprobs
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams as EngineParams
from verbatim.sampling.sampler import sample_rows


def draw_rows(
    logits: Tensor,
    params: Sequence[SamplingParams],
    *,
    seed: int,
    position: int = 0,
    vocab_size: int | None = None,
    top_n: int = 0,
) -> Draws:
    """Draw from each row of `[B, V]`, row b with sample index b.

    Args:
        params: of each row.
        vocab_size: larger ids can't be drawn.
        top_n: number of likeliest ids to report, of the raw distribution.

    Raises:
        InvalidRequest: not logits `[B, V]`, or a row without a token that can be drawn.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InvalidRequest(f"logits must be a floating point [B, V], not {list(logits.shape)}")
    if vocab_size is not None and vocab_size < 1:
        raise InvalidRequest(f"vocab_size={vocab_size}: must be 1 or more")
    width = logits.shape[1]
    banned = list(range(width if vocab_size is None else vocab_size, width))
    rows = [
        SampleRow(
            EngineParams(**each.sampling()),
            seed,
            index,
            position,
            banned_ids=banned,
            num_logprobs=top_n,
        )
        for index, each in enumerate(params)
    ]
    draws = sample_rows(logits, SamplePlan(rows))
    if -1 in draws.ids:
        raise InvalidRequest(f"row {draws.ids.index(-1)} of logits holds NaN or +inf, or only -inf")
    return draws


def top_of_rows(logits: Tensor, top_n: int) -> list[TopLogprobs]:
    """Return the `top_n` likeliest ids of each row of `[R, V]`, without drawing."""
    row = SampleRow(EngineParams(), 0, 0, 0, target=0, num_logprobs=top_n)
    return tops_of(sample_rows(logits, SamplePlan([row] * logits.shape[0])))


def tops_of(draws: Draws) -> list[TopLogprobs]:
    """Return the likeliest ids of each row with their log-probs."""
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(draws.top_ids, draws.top_logprobs, strict=True)
    ]


class DraftSteps:
    """The controller's methods for rows of logits of a whole step.

    Attributes:
        num_speculative_tokens: draft tokens per decoding request.
    """

    def __init__(self) -> None:
        self.num_speculative_tokens = 0
        # Request indices, temperature, top_k, top_p.
        self._torch_sampling_buckets: list[tuple[Sequence[int], float, int, float]] = []

    def _get_required_logit_indices(
        self,
        request_in_prefill_status_tensor: Tensor,
        request_query_lengths: Tensor,
        num_decode_requests: int,
        num_prefill_requests: int,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return the rows of logits needed, `[R]` int64: all of a decoding request, the last in prefill.

        The status `[N]` is 1 for prefill, after all zeros; `request_query_lengths` `[N]` counts rows.
        """
        _check_order(request_in_prefill_status_tensor, num_decode_requests, num_prefill_requests)
        lengths = request_query_lengths.long()
        decode = torch.arange(int(lengths[:num_decode_requests].sum()), device=lengths.device)
        last_rows = lengths.cumsum(0)[num_decode_requests:] - 1
        return torch.cat([decode, last_rows]).to(device)

    def _sample_from_logits_2d(self, logits_2d: Tensor) -> Tensor:
        """Draw for each request with the parameters of its bucket, which must exist: `[N, V]` to `[N]`."""
        return self._sample(logits_2d, torch.ones(len(logits_2d), dtype=torch.int64))

    def _sample_speculative_logits(
        self, required_logits: Tensor, request_in_prefill_status_tensor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw for every required row of `[R, V]`, with the parameters of its request's bucket.

        Return the ids, `[R]` in row order, and the number of rows of each request, `[N]`.
        """
        in_prefill = request_in_prefill_status_tensor.bool()
        repeats = torch.where(in_prefill, 1, 1 + self.num_speculative_tokens)
        if int(repeats.sum()) != len(required_logits):
            raise InvalidRequest(f"{len(required_logits)} rows of logits for {repeats.tolist()}")
        return self._sample(required_logits, repeats), repeats

    def _sample(self, logits: Tensor, repeats: Tensor) -> Tensor:
        params = {
            int(index): SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
            for indices, temperature, top_k, top_p in self._torch_sampling_buckets
            for index in indices
        }
        missing = [index for index in range(len(repeats)) if index not in params]
        if missing:
            raise InvalidRequest(f"requests {missing} are in no bucket of _torch_sampling_buckets")
        each = [params[index] for index, count in enumerate(repeats.tolist()) for _ in range(count)]
        ids = draw_rows(logits, each, seed=draw_seed()).ids
        return torch.tensor(ids, device=logits.device)

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

        A request's first token is always accepted; a draft if the one before it is and the token drawn there,
        in `output_tokens` `[R]`, equals it. `repeats` `[N]` are the rows of each request, which sum to R.
        """
        _check_order(request_in_prefill_status_tensor, num_decode_requests, num_prefill_requests)
        if active_request_count != num_decode_requests + num_prefill_requests:
            raise InvalidRequest(
                f"active_request_count={active_request_count}: there are {num_decode_requests} "
                f"requests that decode and {num_prefill_requests} in prefill"
            )
        inputs = input_tokens_required.reshape(-1)
        starts = repeats.cumsum(0) - repeats
        request_of_row = torch.repeat_interleave(torch.arange(len(repeats)), repeats)
        differs = torch.zeros_like(inputs, dtype=torch.bool)
        differs[1:] = inputs[1:] != output_tokens[:-1]
        misses = differs.cumsum(0)
        mask = misses == misses[starts][request_of_row]  # no miss after the request's first row
        accepted = torch.zeros_like(repeats).scatter_add(0, request_of_row, mask.long())
        return starts + accepted - 1, mask, inputs


def _check_order(in_prefill: Tensor, num_decode: int, num_prefill: int) -> None:
    if in_prefill.bool().tolist() != [False] * num_decode + [True] * num_prefill:
        raise InvalidRequest(
            f"prefill status {in_prefill.tolist()}: must be {num_decode} zeros, then {num_prefill} ones"
        )
