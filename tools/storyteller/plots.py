"""The plots: what happens in a story, read from `plots.txt`.

There, a plot begins with `# name: theme` and goes on in the template language of
`grammar.expand`: `{slot}` is filled from the cast, `[a|b]` picks one alternative, a line that
begins with `? ` is left out half of the time, and a blank line may become a paragraph break.
Whatever a plot introduces must matter again before it ends.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Plot(NamedTuple):
    """A plot, the theme a reader may ask for, and what it demands of its cast."""

    name: str
    theme: str
    text: str
    rescue: bool  # the friend must have the skill that brings the lost thing back
    grown: bool  # grown-ups may act in it


def _read(text: str) -> tuple[Plot, ...]:
    pieces = re.split(r"^# (\w+): ([^(\n]*)(.*)\n\n", text, flags=re.MULTILINE)[1:]
    rows = zip(pieces[::4], pieces[1::4], pieces[2::4], pieces[3::4], strict=True)
    return tuple(
        Plot(name, theme.strip(), body.strip(), "(rescue)" in marks, "(grown)" in marks)
        for name, theme, marks, body in rows
    )


PLOTS = _read((Path(__file__).parent / "plots.txt").read_text(encoding="utf-8"))
