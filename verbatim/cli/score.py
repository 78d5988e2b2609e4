"""`verbatim score`: print the log-probs of texts, token by token."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verbatim.cli.generate import read_sources
from verbatim.cli.options import MODEL, with_options
from verbatim.cli.placing import CLUSTER, OFFLOAD, opened_llm, placement_of
from verbatim.cli.terminal import WrongUsage, write_json
from verbatim.params import SamplingParams

if TYPE_CHECKING:
    from verbatim.api.llm import LLM
    from verbatim.core import Result


@with_options(*MODEL, *OFFLOAD, *CLUSTER)
def score(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="The texts to score.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="PATH", help="File with one text; - is stdin. Repeatable."),
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--ids", metavar="IDS", help='Token ids of a text, such as "5 17 9". Repeatable.'
        ),
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print one line per text, without its tokens.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per text, one per line.")
    ] = False,
    **values: Any,
) -> None:
    """Print the log-prob of each token given the tokens before it, at temperature 1, and the perplexity.

    Texts are arguments, files, token ids, or stdin. The numbers equal those that `generate` reports for
    the same ids, bit for bit.
    """
    if summary and as_json:
        raise WrongUsage("--summary and --json: use only one of them")
    sources = read_sources("text", prompts or [], file or [], ids or [])
    with opened_llm(values, placement_of(values)) as llm:
        # The same request as in `LLM.score`, since results also have the token ids.
        results = llm.generate(sources, SamplingParams(max_tokens=0, prompt_logprobs=0))
        scores = [_score(llm, result) for result in results]
    for number, score in enumerate(scores, start=1):
        if as_json:
            write_json(score)
            continue
        if not summary:
            sys.stdout.write(_table(score))
        head = f"{number}: " if len(scores) > 1 else ""
        sys.stdout.write(f"{head}{_sentence(score)}\n")
        if not summary and number < len(scores):
            sys.stdout.write("\n")


def _score(llm: LLM, result: Result) -> dict[str, Any]:
    """Return the scores of one text; the first token has none."""
    from verbatim.serve.tokens import TokenTexts

    logprobs = result.prompt_logprobs or []
    known = [p for p in logprobs if p is not None]
    total = math.fsum(known)
    texts = TokenTexts(llm.tokenizer)
    return {
        "text": result.prompt,
        "ids": result.prompt_token_ids,
        "tokens": None if llm.tokenizer is None else list(map(texts.text, result.prompt_token_ids)),
        "logprobs": logprobs,
        "num_scored": len(known),
        "logprob": total,
        "perplexity": _exp(-total / len(known)) if known else None,
    }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _table(score: dict[str, Any]) -> str:
    """Format one line per token: position, id, log-prob, probability and text."""
    ids: Sequence[int] = score["ids"]
    tokens = score["tokens"] or [""] * len(ids)
    widths = max(2, len(str(len(ids) - 1))), max(2, *(len(str(i)) for i in ids))
    lines = [f"{'at':>{widths[0]}}  {'id':>{widths[1]}}  {'log-prob':>10}  {'prob':>8}  token"]
    for at, (i, p, token) in enumerate(zip(ids, score["logprobs"], tokens, strict=True)):
        numbers = f"{'-':>10}  {'-':>8}" if p is None else f"{p:>10.4f}  {math.exp(p):>8.2%}"
        shown = repr(token) if score["tokens"] is not None else ""
        lines.append(f"{at:>{widths[0]}}  {i:>{widths[1]}}  {numbers}  {shown}".rstrip())
    return "\n".join(lines) + "\n"


def _sentence(score: dict[str, Any]) -> str:
    count = len(score["ids"])
    tokens = f"{count} token{'' if count == 1 else 's'}"
    if not score["num_scored"]:
        return f"{tokens}; the first token has no log-prob, so there is no perplexity"
    return f"{tokens}, log-prob {score['logprob']:.4f}, perplexity {score['perplexity']:.4f}"
