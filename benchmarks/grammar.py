"""The cost of structured outputs: a mask and a push per token, on a random walk through a JSON schema.

    python benchmarks/grammar.py [--vocab 151936] [--tokens 2000] [--seed 0]

The vocabulary of the byte-level tokenizer is the bytes, JSON's punctuation, and random words with and
without a leading space. The walk draws uniformly from the allowed ids, half of the time only from those
that have a quotation mark or a closing bracket, so that documents end. One thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from verbatim.params import SamplingParams
from verbatim.sampling.grammar import GrammarCompiler
from verbatim.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "thing"]},
        "score": {"type": "number", "minimum": 0, "maximum": 100},
        "born": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2,3}-[0-9]+$"},
        "note": {"type": "string", "maxLength": 200},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
    },
    "required": ["name", "kind", "score", "tags"],
    "additionalProperties": False,
}


def words(vocab: int, seed: int) -> Tokenizer:
    """Return a byte-level tokenizer of `vocab` ids; id 0 is the end of sequence."""
    rng = random.Random(seed)
    pieces = {"</s>": 0}
    for piece in [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        '":',
        '",',
        '"}',
        '"]',
        'Ġ"',
        '"},',
    ]:
        pieces[piece] = len(pieces)
    letters = "etaoinshrdlucmfwypvbgkjqxzETAOIN0123456789_-.,:;'()"
    while len(pieces) < vocab:
        word = "".join(rng.choices(letters, k=rng.randint(2, 9)))
        for piece in (word, "Ġ" + word):
            if len(pieces) < vocab:
                pieces.setdefault(piece, len(pieces))
    backend = Backend(models.BPE(pieces, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>")])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """Return the ids that a mask allows."""
    return ((mask[:, None] >> torch.arange(32)) & 1).flatten().nonzero().flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    tokenizer = words(args.vocab, args.seed)

    def timed(call, *operands, **named):
        start = time.perf_counter()
        result = call(*operands, **named)
        return result, (time.perf_counter() - start) * 1e3

    compiler, compile_ms = timed(GrammarCompiler, tokenizer, args.vocab, frozenset({0}))
    params = SamplingParams(json_schema=SCHEMA)
    state, first = timed(compiler.start, params, ends=True)
    state, again = timed(compiler.start, params, ends=True)
    print(
        f"vocabulary {args.vocab}: compiler {compile_ms:.0f} ms, schema {first:.1f} ms, again {again:.2f} ms"
    )
    marks = torch.zeros(args.vocab, dtype=torch.bool)
    marks[
        [i for i, text in enumerate(compiler.vocabulary.tokens[:-1]) if set(text) & set(b'"]}')]
    ] = 1
    masks, pushes, forks, documents = [], [], [], 0
    for _ in range(args.tokens):
        mask, elapsed = timed(state.mask)
        masks.append(elapsed)
        ids = allowed(mask)
        closing = ids[marks[ids]]
        ids = closing if len(closing) and rng.random() < 0.5 else ids
        token_id = int(ids[rng.randrange(len(ids))])
        if token_id == 0:
            documents += 1
            state = compiler.start(params, ends=True)
            continue
        forks.append(timed(state.fork)[1])
        pushes.append(timed(state.push, token_id)[1])
    print(f"{len(masks)} tokens, {documents} whole documents; milliseconds:")
    for name, times in (("mask", masks), ("push", pushes), ("fork", forks)):
        cuts = statistics.quantiles(times, n=100)
        print(
            f"{name:5} median {cuts[49]:.3f}  p90 {cuts[89]:.3f}  p99 {cuts[98]:.3f}  max {max(times):.3f}"
        )


if __name__ == "__main__":
    main()
