"""Index arithmetic of steps with draft tokens, as plain functions of tensors.

The rows of a step are grouped by request: decoding requests (a base token and its drafts) first,
requests in prefill after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verbatim.compat.megatron.params import SamplingParams
from verbatim.compat.megatron.sampling import draw_rows, draw_seed
from verbatim.errors import InvalidRequest


def required_rows(
    in_prefill: Tensor, query_lengths: Tensor, num_decode: int, num_prefill: int
) -> Tensor:
    """Return the rows of logits needed: all of a decoding request, the last of one in prefill.

    Args:
        in_prefill: `[N]`, 1 or True for prefill; zeros first.
        query_lengths: `[N]`, rows of each request.

    Returns:
        `[R]` int64, ascending.

    Raises:
        InvalidRequest: wrong counts, or a request in prefill before a decoding one.
    """
    check_order(in_prefill, num_decode, num_prefill)
    lengths = query_lengths.long()
    ends = lengths.cumsum(0)
    num_decode_rows = int(lengths[:num_decode].sum())
    decode = torch.arange(num_decode_rows, device=lengths.device)
    return torch.cat([decode, ends[num_decode:] - 1])


def rows_per_request(in_prefill: Tensor, num_drafts: int) -> Tensor:
    """Return the number of logit rows that each request needs, `[N]` int64."""
    return torch.where(in_prefill.bool(), 1, 1 + num_drafts)


def accepted(output_tokens: Tensor, input_tokens: Tensor, repeats: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last accepted row of each request, and the mask of accepted input tokens.

    A request's first token is always accepted. A draft is accepted if the one before it is and the
    token drawn there equals the draft.

    Args:
        output_tokens: `[R]`, drawn from each row.
        input_tokens: `[R]`, the input of each row.
        repeats: `[N]`, rows of each request, which sum to R.

    Returns:
        The index of the last accepted token of each request, `[N]` int64, and the mask, `[R]` bool.
    """
    starts = repeats.cumsum(0) - repeats
    request_of_row = torch.repeat_interleave(torch.arange(len(repeats)), repeats)
    differs = torch.zeros_like(input_tokens, dtype=torch.bool)
    differs[1:] = input_tokens[1:] != output_tokens[:-1]
    misses = differs.cumsum(0)
    mask = misses == misses[starts][request_of_row]  # no miss after the request's first row
    kept = torch.zeros_like(repeats).scatter_add(0, request_of_row, mask.long())
    return starts + kept - 1, mask


def check_order(in_prefill: Tensor, num_decode: int, num_prefill: int) -> None:
    """Raise InvalidRequest unless `num_decode` decoding requests come first, then those in prefill."""
    expected = [False] * num_decode + [True] * num_prefill
    if in_prefill.bool().tolist() != expected:
        raise InvalidRequest(
            f"prefill status {in_prefill.tolist()}: must be {num_decode} zeros, then {num_prefill} ones"
        )


class Speculation:
    """The controller's methods for steps with draft tokens.

    Attributes:
        num_speculative_tokens: draft tokens per decoding request.
    """

    def __init__(self) -> None:
        self.num_speculative_tokens = 0
        # Used by _sample_speculative_logits: request indices, temperature, top_k, top_p.
        self._torch_sampling_buckets: list[tuple[Sequence[int], float, int, float]] = []

    def _get_required_logit_indices(
        self,
        request_in_prefill_status_tensor: Tensor,
        request_query_lengths: Tensor,
        num_decode_requests: int,
        num_prefill_requests: int,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return the rows of logits to sample from, `[R]`; see `required_rows`."""
        return required_rows(
            request_in_prefill_status_tensor,
            request_query_lengths,
            num_decode_requests,
            num_prefill_requests,
        ).to(device)

    def _sample_speculative_logits(
        self, required_logits: Tensor, request_in_prefill_status_tensor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw for every required row, with the parameters of its request's bucket.

        Args:
            required_logits: `[R, V]`.
            request_in_prefill_status_tensor: `[N]`.

        Returns:
            The ids, `[R]` in row order, and the number of rows of each request, `[N]`.

        Raises:
            InvalidRequest: a request without bucket, or a wrong number of rows.
        """
        repeats = rows_per_request(request_in_prefill_status_tensor, self.num_speculative_tokens)
        if int(repeats.sum()) != len(required_logits):
            raise InvalidRequest(f"{len(required_logits)} rows of logits for {repeats.tolist()}")
        params = {
            int(index): SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
            for indices, temperature, top_k, top_p in self._torch_sampling_buckets
            for index in indices
        }
        missing = [index for index in range(len(repeats)) if index not in params]
        if missing:
            raise InvalidRequest(f"requests {missing} are in no bucket of _torch_sampling_buckets")
        each = [params[index] for index, count in enumerate(repeats.tolist()) for _ in range(count)]
        ids = draw_rows(required_logits, each, seed=draw_seed()).ids
        return torch.tensor(ids, device=required_logits.device), repeats

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
        """Return the accepted input tokens; see `accepted`.

        Args:
            output_tokens: `[R]`, drawn from each row.
            input_tokens_required: `[R]` or `[1, R]`, the input of each row.

        Returns:
            The index of each request's last accepted token `[N]`, the mask `[R]` bool, and the input `[R]`.
        """
        check_order(request_in_prefill_status_tensor, num_decode_requests, num_prefill_requests)
        if active_request_count != num_decode_requests + num_prefill_requests:
            raise InvalidRequest(
                f"active_request_count={active_request_count}: there are {num_decode_requests} "
                f"requests that decode and {num_prefill_requests} in prefill"
            )
        inputs = input_tokens_required.reshape(-1)
        last, mask = accepted(output_tokens, inputs, repeats)
        return last, mask, inputs
