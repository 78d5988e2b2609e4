"""Rollouts for reinforcement learning, whose log-probs are the trainer's."""

from verbatim.rl.rollout import Rollout, rollout
from verbatim.rl.scoring import logprobs, score

__all__ = ["Rollout", "logprobs", "rollout", "score"]
