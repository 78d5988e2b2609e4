"""Train the storyteller's tokenizer: byte-level BPE on the grammar's own stories.

Every byte has an id of its own, so any UTF-8 text goes through unchanged; what the grammar says
often gets short. No normalizer, no added spaces, no BOS: decoding gives back exactly the text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import chats
import grammar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def _texts(seed: int, count: int) -> Iterator[str]:
    rng = random.Random(seed)
    for index in range(count):
        if index % 4:
            yield grammar.story(rng).text
        else:
            yield "\n".join(message["content"] for message in chats.conversation(rng))


def train(vocab_size: int, *, seed: int = 0, num_texts: int = 8000) -> PreTrainedTokenizerFast:
    """A tokenizer with `vocab_size` ids, the three special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_texts), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = chats.CHAT_TEMPLATE
    return fast
