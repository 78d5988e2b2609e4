"""Real tokenizers of each kind, trained on a few words."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from verbatim.text.tokenizer import Tokenizer

WORDS = [
    "the quick brown fox jumps over the lazy dog",
    "don't stop, they're here! isn't it? we've seen it. I'm sure he's in .",
    "über naïve café 日本語 テキスト 中文 🙂 👩‍👩‍👧 e\u0301 a\u0308 हिन्दी",
    "one two three walking talked walks walker unhappy",
] * 4
MARKS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SPECIAL = ["<unk>", "<s>", "</s>"]


def _trained(
    model: Any, pieces: Any, decoder: Any, trainer: Any, words: list[str] = WORDS, **settings: Any
) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer, backend.decoder = pieces, decoder
    settings |= dict(special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(words, trainer(**settings))
    return backend


def _opened(backend: Backend, **settings: Any) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **MARKS, **settings))


@cache
def byte_level() -> Tokenizer:
    """Return a tokenizer like that of GPT-2, Llama 3 or Qwen."""
    backend = _trained(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        trainers.BpeTrainer,
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.add_tokens([AddedToken("🙂 smile"), AddedToken("é"), AddedToken("日")])
    backend.add_special_tokens([AddedToken("<tool>")])
    return _opened(backend)


def _unigram(vocab_size: int, words: list[str]) -> Backend:
    marks = pre_tokenizers.Metaspace(), decoders.Metaspace()
    settings = dict(vocab_size=vocab_size, unk_token="<unk>")
    return _trained(models.Unigram(), *marks, trainers.UnigramTrainer, words, **settings)


@cache
def byte_fallback(strip: bool = True) -> Tokenizer:
    """Return a tokenizer like that of Llama 2 (with `strip`) or Gemma (without)."""
    trained = json.loads(_unigram(120, [w for w in WORDS if w.isascii()]).to_str())
    vocab = [(piece, score) for piece, score in trained["model"]["vocab"]]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)] + [("▁▁", -9.0), ("é", -9.0)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    return _opened(backend)


@cache
def metaspace() -> Tokenizer:
    """Return a tokenizer like that of T5."""
    return _opened(_unigram(150, WORDS))


@cache
def word_piece(clean_up: bool = True) -> Tokenizer:
    """Return a tokenizer like that of BERT; `clean_up` removes spaces before punctuation."""
    backend = _trained(
        models.WordPiece(unk_token="<unk>"),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(cleanup=clean_up),
        trainers.WordPieceTrainer,
        vocab_size=160,
    )
    backend.add_tokens([AddedToken(word) for word in ("'t", "n't", "n", "m", " '", "' ", " ", "'")])
    return _opened(backend, clean_up_tokenization_spaces=clean_up)


@cache
def suffixed() -> Tokenizer:
    """Return a tokenizer like that of GPT-1: an end-of-word mark becomes a space before another word."""
    backend = _trained(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        pre_tokenizers.Whitespace(),
        decoders.BPEDecoder(suffix="</w>"),
        trainers.BpeTrainer,
        vocab_size=150,
        end_of_word_suffix="</w>",
    )
    return _opened(backend)


@cache
def in_python() -> Tokenizer:
    """Return a tokenizer in Python (a "slow" one), over bytes."""
    return Tokenizer(ByT5Tokenizer())


EXACT = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_unstripped": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "word_piece_uncleaned": lambda: word_piece(clean_up=False),
    "suffixed": suffixed,
}
