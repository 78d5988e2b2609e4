"""Proposers of draft tokens for speculative decoding."""

from verbatim.draft.config import DraftModel
from verbatim.draft.ngram import Ngram
from verbatim.model.early_exit import EarlyExit
from verbatim.model.mtp_source import Mtp
from verbatim.protocols import Proposer

__all__ = ["DraftModel", "EarlyExit", "Mtp", "Ngram", "Proposer"]
