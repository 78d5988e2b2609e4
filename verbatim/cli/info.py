"""`verbatim info`: show a model's size, numerics key and default sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from verbatim.cli.options import MODEL, open_llm, with_options
from verbatim.cli.terminal import size_text


@with_options(*MODEL, positional_model=True)
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **values: Any,
) -> None:
    """Show a model's size, numerics key and default sampling parameters."""
    with open_llm(values) as llm:
        facts = llm.info()
    if as_json:
        typer.echo(json.dumps(facts, default=str, ensure_ascii=False))
        return
    rows = list(_rows(facts))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}".rstrip())


def _rows(facts: Mapping[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and values; nested ones are indented under their heading."""
    for key, value in facts.items():
        name = indent + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            yield name, "" if value else "none"
            yield from _rows(value, indent + "  ")
        else:
            yield name, _shown(str(key), value)


def _shown(key: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}" + (f" ({size_text(value)})" if "bytes" in key else "")
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
