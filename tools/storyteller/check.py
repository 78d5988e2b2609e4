"""Is a text a coherent small story? Checks that do not need the grammar that wrote it.

Run it as `python tools/storyteller/check.py < story.txt`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import lexicon as lex

_NAMES = frozenset(lex.GIRL_NAMES + lex.BOY_NAMES)
_THINGS = {thing.noun for thing in lex.THINGS}
_SHE, _HE = {"she", "her", "hers"}, {"he", "him", "his"}


def _count(word: str, text: str) -> int:
    return len(re.findall(rf"\b{word}\b", text))


def problems(text: str) -> list[str]:
    """What is wrong with `text`; an empty list for a coherent story.

    A story has two named characters who are both met again, pronouns that fit their names, one
    kind for each name, a thing that matters more than once, closed quotes and a closed ending.
    """
    found = []
    words = re.findall(r"[A-Za-z]+", text)
    names = {word for word in words if word in _NAMES}
    if len(names) != 2:
        found.append(f"{len(names)} named characters instead of two: {sorted(names)}")
    found += [f"{name} is named only once" for name in sorted(names) if _count(name, text) < 2]

    pronouns = {word.lower() for word in words}
    if names and names <= set(lex.BOY_NAMES) and pronouns & {"she", "hers"}:
        found.append("a story about boys says she")
    if names and names <= set(lex.GIRL_NAMES) and pronouns & _HE:
        found.append("a story about girls says he")

    kinds: dict[str, set[str]] = {name: set() for name in names}
    for kind, name in re.findall(r"(\w+) named (\w+)", text):
        kinds.setdefault(name, set()).add(kind)
    for name, kind in re.findall(r"(\w+), an? (?:\w+ )?(\w+)\b(?=[,.\s])", text):
        if name in kinds and kind in lex.KINDS:
            kinds[name].add(kind)
    found += [f"{name} is {sorted(k)}" for name, k in sorted(kinds.items()) if len(k) > 1]

    if not any(_count(thing, text) > 1 for thing in _THINGS):
        found.append("no thing is mentioned twice")
    if text.count('"') % 2:
        found.append("an open quote")
    if not re.search(r'[.!?]"?$', text.strip()):
        found.append("an open ending")
    if re.search(r"\b[Aa] [aeio]|\b[Aa]n [^aeiouh\W]", text):
        found.append("a wrong article")
    return found


if __name__ == "__main__":
    listed = problems(sys.stdin.read())
    print("\n".join(listed) or "coherent")
    sys.exit(bool(listed))
