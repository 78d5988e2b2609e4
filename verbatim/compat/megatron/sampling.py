"""Sampling of logit rows with Megatron's parameters, and its index arithmetic for draft tokens.

The rows of a step with draft tokens are grouped by request: decoding requests (a base token and its
drafts) first, requests in prefill after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import verbatim
from verbatim.batch import SamplePlan, SampleRow
from verbatim.checks import optional_integer
from verbatim.compat.megatron.request import SamplingParams
from verbatim.core import TopLogprobs
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams as EngineParams
from verbatim.sampling.sampler import sample_rows


def draw(
    logits: Tensor,
    params: SamplingParams,
    vocab_size: int | None = None,
    position: int | None = None,
) -> Tensor:
    """Draw one id per row of `[B, V]`, row b with sample index b: `[B]` int64.

    Args:
        vocab_size: larger ids can't be drawn.
        position: as in `verbatim.sample`, for a `seed` of the params.

    Raises:
        InvalidRequest: not logits `[B, V]`, or a row without a token that can be drawn.
    """
    vocab_size = optional_integer("vocab_size", vocab_size, 1)
    if isinstance(logits, Tensor) and logits.dim():  # else refused below
        logits = logits[..., :vocab_size]
    return verbatim.sample(logits, **params.sampling(), seed=params.seed, position=position)


def top_of_rows(logits: Tensor, top_n: int) -> list[TopLogprobs]:
    """Return the `top_n` likeliest ids of each row of `[R, V]`, without drawing."""
    row = SampleRow(EngineParams(), 0, 0, 0, target=0, num_logprobs=top_n)
    return [draw.top for draw in sample_rows(logits, SamplePlan([row] * logits.shape[0]))]


class DraftSteps:
    """The controller's methods for rows of logits of a whole step.

    Attributes:
        num_speculative_tokens: draft tokens per decoding request.
    """

    num_speculative_tokens = 0
    # Request indices, temperature, top_k, top_p.
    _torch_sampling_buckets: Sequence[tuple[Sequence[int], float, int, float]] = ()

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
        buckets = self._torch_sampling_buckets
        members = {int(index) for indices, *_ in buckets for index in indices}
        if missing := [index for index in range(len(repeats)) if index not in members]:
            raise InvalidRequest(f"requests {missing} are in no bucket of _torch_sampling_buckets")
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        request_of_row = torch.arange(len(repeats)).repeat_interleave(repeats)
        for indices, temperature, top_k, top_p in buckets:
            rows = torch.isin(request_of_row, torch.tensor([*indices], dtype=torch.int64))
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
            ids[rows] = draw(logits[rows], params)
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
