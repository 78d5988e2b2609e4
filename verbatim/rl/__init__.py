"""Rollouts for reinforcement learning, with log-probs that `score` reproduces bit for bit."""

from verbatim.rl.rollout import Rollout, rollout
from verbatim.rl.scoring import logprobs, score
from verbatim.rl.transfer import WeightSender
from verbatim.rl.trl import rollout_func

__all__ = ["Rollout", "WeightSender", "logprobs", "rollout", "rollout_func", "score"]
