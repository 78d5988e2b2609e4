"""Proposers: who guesses the next tokens of a sequence before the model has seen them."""

from verbatim.draft.choice import DraftModel, EarlyExit
from verbatim.draft.ngram import Ngram
from verbatim.model.mtp_source import Mtp
from verbatim.protocols import Proposer

__all__ = ["DraftModel", "EarlyExit", "Mtp", "Ngram", "Proposer"]
