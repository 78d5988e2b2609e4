"""Real tokenizers of each kind, trained in a moment on a few words."""

from __future__ import annotations

import json
from functools import cache

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


@cache
def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3, Qwen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(WORDS, trainer)
    backend.add_tokens([AddedToken("🙂 smile"), AddedToken("é"), AddedToken("日")])
    backend.add_special_tokens([AddedToken("<tool>")])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **MARKS))


@cache
def byte_fallback(strip: bool = True) -> Tokenizer:
    """Like Llama 2 (`strip`) and Gemma (without)."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([w for w in WORDS if w.isascii()], trainer)
    trained = json.loads(backend.to_str())["model"]["vocab"]
    vocab = [(piece, score) for piece, score in trained]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)] + [("▁▁", -9.0), ("é", -9.0)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **MARKS))


@cache
def metaspace() -> Tokenizer:
    """Like T5."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(WORDS, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **MARKS))


@cache
def word_piece(clean_up: bool = True) -> Tokenizer:
    """Like BERT; with `clean_up`, spaces before punctuation are removed."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=clean_up)
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(WORDS, trainer)
    backend.add_tokens([AddedToken(word) for word in ("'t", "n't", "n", "m", " '", "' ", " ", "'")])
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, clean_up_tokenization_spaces=clean_up, **MARKS
        )
    )


@cache
def suffixed() -> Tokenizer:
    """Like the first GPT: words end with a mark that becomes a space when another follows."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(WORDS, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **MARKS))


@cache
def in_python() -> Tokenizer:
    """A slow tokenizer, of bytes."""
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
