"""Rollouts for reinforcement learning, with log-probs that `score` reproduces bit for bit."""

from verbatim.rl.rollout import Rollout, rollout
from verbatim.rl.scoring import logprobs, score

__all__ = ["Rollout", "logprobs", "rollout", "score"]
