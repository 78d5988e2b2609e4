"""Training rows: stories and conversations, tokenized and packed without wasting positions.

A batch is a function of its name alone (`"train:<seed>:<step>"`), so training can be stopped and
resumed anywhere, and the held-out set (`"held-out:..."`) can never meet a training seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import chats
import grammar
import lexicon as lex
import torch
from tokenizer import END_OF_TEXT
from transformers import PreTrainedTokenizerFast

STORY_SHARE = 0.6


@dataclass(slots=True)
class Batch:
    """Packed rows; a document attends to itself only and its positions begin at 0."""

    ids: torch.Tensor  # [B, L]
    document: torch.Tensor  # [B, L], -1 where a row is padded
    position: torch.Tensor  # [B, L]

    def to(self, device: torch.device) -> Batch:
        return Batch(self.ids.to(device), self.document.to(device), self.position.to(device))

    def mask(self) -> torch.Tensor | None:
        """Boolean attention mask [B, 1, L, L]; None if every row is one document, hence causal."""
        if bool((self.document == 0).all()):
            return None
        same = self.document[:, :, None] == self.document[:, None, :]
        return (same & torch.ones_like(same[0]).tril())[:, None]

    def recalled(self, lexical: torch.Tensor) -> torch.Tensor:
        """Where an id marked in `lexical` [V] stood earlier in the same document. [B, L]"""
        if bool((self.document == 0).all()):
            return torch.zeros_like(self.ids, dtype=torch.bool)
        earlier = (self.ids[:, :, None] == self.ids[:, None, :]) & self.mask()[:, 0].tril(-1)
        return earlier.any(-1) & lexical[self.ids]

    def targets(self, ahead: int) -> torch.Tensor:
        """Ids `ahead` positions later in the same document, else -100. [B, L - ahead]"""
        same = self.document[:, ahead:] == self.document[:, :-ahead]
        return self.ids[:, ahead:].where(same & (self.document[:, ahead:] >= 0), -100)


def document_text(rng: random.Random) -> str:
    """One or two stories, each closed by the end-of-text token, or one conversation."""
    if rng.random() < STORY_SHARE:
        count = 2 if rng.random() < 0.2 else 1
        return "".join(grammar.story(rng).text + END_OF_TEXT for _ in range(count))
    return chats.render(chats.conversation(rng))


def lexical_ids(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """True for ids that are names, pronouns, kinds or things: words a story has to remember. [V]"""
    nouns = [*lex.KINDS, *(thing.noun for thing in lex.THINGS)]
    pronouns = "he him his she her He His She Her".split()
    words = [*lex.GIRL_NAMES, *lex.BOY_NAMES, *nouns, *pronouns]
    marked = torch.zeros(len(tokenizer), dtype=torch.bool)
    for word in words:
        for ids in (tokenizer(word)["input_ids"], tokenizer(" " + word)["input_ids"]):
            if len(ids) == 1:
                marked[ids[0]] = True
    return marked


def _document(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return list(tokenizer(document_text(rng))["input_ids"])


def packed(name: str, tokenizer: PreTrainedTokenizerFast, *, rows: int, length: int) -> Batch:
    """Rows of whole documents; a document that does not fit waits for the next row."""
    rng = random.Random(name)
    ids = torch.full((rows, length), tokenizer.eos_token_id)
    document = torch.full((rows, length), -1)
    position = torch.zeros((rows, length), dtype=torch.long)
    waiting: list[list[int]] = []
    for row in range(rows):
        used, count, tries = 0, 0, 0
        while tries < 12 and used < length - 8:
            fitting = next((d for d in waiting if used + len(d) <= length), None)
            if fitting is None:
                tries += 1
                waiting.append(_document(rng, tokenizer)[:length])
                continue
            waiting.remove(fitting)
            end = used + len(fitting)
            ids[row, used:end] = torch.tensor(fitting)
            document[row, used:end] = count
            position[row, used:end] = torch.arange(len(fitting))
            used, count = end, count + 1
    return Batch(ids, document, position)


def long_rows(name: str, tokenizer: PreTrainedTokenizerFast, *, rows: int, length: int) -> Batch:
    """Rows that are one long text each, so that far positions are not strange to the model."""
    rng = random.Random(name)
    ids = []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < length:
            row += _document(rng, tokenizer)
        ids.append(row[:length])
    position = torch.arange(length).expand(rows, length)
    return Batch(torch.tensor(ids), torch.zeros(rows, length, dtype=torch.long), position)
