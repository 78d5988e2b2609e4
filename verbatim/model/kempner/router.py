"""KempnerForge's sigmoid router, which transformers lacks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SigmoidRouter(nn.Module):
    """KempnerForge's `sigmoid_topk`: an expert's bias affects its weight, not only the choice.

    Replaces the gate of a mixture-of-experts layer, with the same interface.
    """

    def __init__(self, weight: Tensor, expert_bias: Tensor, top_k: int) -> None:
        """Args:
        weight: `[E, H]`.
        expert_bias: `[E]`.
        """
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.expert_bias = nn.Parameter(expert_bias, requires_grad=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose `k` experts for each token.

        Args:
            hidden_states: `[..., H]`, T tokens.

        Returns:
            The gate's logits `[T, E]`, the weights of the chosen `[T, k]`, which sum to 1, and their
            numbers `[T, k]`.
        """
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = F.linear(hidden, self.weight)
        scores = torch.sigmoid(logits.float() + self.expert_bias.float())
        weights, experts = torch.topk(scores, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), experts
