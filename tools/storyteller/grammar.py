"""A probabilistic grammar of small stories.

A story is an opening and a plot (`plots.py`), both written in a tiny template language, filled from
one `Cast`. Everything is drawn from one `random.Random`, so a seed names a story for ever.

To read some: `python tools/storyteller/grammar.py --seed 7 --count 3`.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import lexicon as lex
import plots

OPENINGS = """
Once upon a time, there was {ahero} named {H}. {He} lived {in}.
Once upon a time, there was {ahero} named {H} who lived {in}.
Once upon a time, {in}, there lived {ahero} named {H}.
Once upon a time, {ahero} named {H} lived {in}.
Once upon a time {in}, there was {ahero} named {H}.
Once upon a time there was {ahero}. {His} name was {H}, and {he} lived {in}.
Once there was {ahero} named {H} who lived {in}.
There once was {ahero} named {H}. {He} lived {in}.
Long ago, {ahero} named {H} lived {in}.
Long, long ago, there was {ahero} named {H} who lived {in}.
Far away, {in}, there lived {ahero} named {H}.
{in}, there lived {ahero} named {H}.
{in}, there was {ahero} named {H}.
{in} lived {ahero} named {H}.
{ahero} named {H} lived {in}.
{H} was {ahero} who lived {in}.
{H} was {ahero}. {He} lived {in}.
{H} the {kind} lived {in}.
There was {ahero} named {H} who lived {in}.
This is the story of {H}, {ahero} who lived {in}.
One day, {ahero} named {H} came to live {in}.
One day, {ahero} named {H} moved into a new house {in}.
One {weather} day, {ahero} named {H} came to live {in}. {sight}.
One {weather} morning, {ahero} named {H} sat alone {in}. {sight}.
One {weather} morning, {ahero} named {H} woke up early {in}. {sight}.
It was a {weather} day {in}. {ahero} named {H} was sitting outside. {sight}.
""".strip().splitlines()

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_LATER = {
    "One day": "A few days later",
    "One spring day": "Then, one spring day",
    "One morning": "The next morning",
    "One afternoon": "The next afternoon",
    "One evening": "The next evening",
    "One night": "The next night",
    "One week": "The next week",
}


def article(phrase: str) -> str:
    """`phrase` with "a" or "an" before it."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


@dataclass(slots=True)
class Character:
    """Somebody with a name: the grammar keeps kind, name and pronouns together."""

    name: str
    kind: lex.Kind
    adjective: str
    female: bool

    @property
    def noun(self) -> str:
        return self.kind.noun

    @property
    def phrase(self) -> str:
        """First mention, such as "a shy fox"."""
        return article(f"{self.adjective} {self.noun}".strip())

    def slots(self, prefix: str) -> dict[str, str]:
        he, him, his = ("she", "her", "her") if self.female else ("he", "him", "his")
        return {f"{prefix}he": he, f"{prefix}him": him, f"{prefix}his": his}


@dataclass(slots=True)
class Topic:
    """What a story must contain; anything left None is drawn."""

    hero: lex.Kind | None = None
    friend: lex.Kind | None = None
    thing: lex.Thing | None = None
    plot: plots.Plot | None = None
    name: str | None = None


@dataclass(slots=True)
class Story:
    """A finished story with the facts that questions can be asked about."""

    text: str
    hero: Character
    friend: Character
    thing: lex.Thing
    thing_phrase: str
    plot: plots.Plot = field(repr=False)


def expand(template: str, slots: dict[str, str], rng: random.Random) -> str:
    """Choose among `[a|b]` (innermost first), then fill `{slot}`; `{Slot}` capitalises the value."""
    while match := _CHOICE.search(template):
        chosen = rng.choice(match[1].split("|"))
        template = template[: match.start()] + chosen + template[match.end() :]

    def fill(match: re.Match[str]) -> str:
        key = match[1]
        if key in slots:
            return slots[key]
        value = slots[key[0].lower() + key[1:]]
        return value[0].upper() + value[1:]

    return _SLOT.sub(fill, template)


def _capitalise(text: str) -> str:
    text = re.sub(r"(?<=[.!?] )[a-z]", lambda match: match[0].upper(), text)
    return text[0].upper() + text[1:]


def _draw_kind(rng: random.Random, *, grown: bool) -> lex.Kind:
    draw = rng.random()
    if grown and draw < 0.18:
        return rng.choice(lex.GROWN_UPS)
    return rng.choice(lex.CHILDREN if draw > 0.82 else lex.ANIMALS)


def _character(
    kind: lex.Kind, female: bool, rng: random.Random, taken: str = "", name: str | None = None
) -> Character:
    fixed = {"girl": True, "cow": True, "boy": False}
    female = fixed.get(kind.noun, female)
    if name is not None:
        female = name in lex.GIRL_NAMES
    while name is None or name == taken:
        name = rng.choice(lex.GIRL_NAMES if female else lex.BOY_NAMES)
    adjective = rng.choice(kind.adjectives) if rng.random() < 0.85 else ""
    return Character(name, kind, adjective, female)


def _clue(friend: Character) -> str:
    if "fly" in friend.kind.skills:
        return "a small feather"
    return "some wet footprints" if "swim" in friend.kind.skills else "a trail of crumbs"


def _cast(topic: Topic, plot: plots.Plot, rng: random.Random) -> tuple[Story, dict[str, str]]:
    """Choose who and what, so that the helper can help and the thing fits the accident."""
    thing = topic.thing or rng.choice(lex.THINGS)
    kind = topic.hero or _draw_kind(rng, grown=plot.grown)
    female = rng.random() < 0.5
    hero = _character(kind, female, rng, name=topic.name)

    spots = [s for s in lex.SPOTS if thing.light or "wind" not in s.lost]
    spots = [s for s in spots if not topic.friend or s.skill in topic.friend.skills]
    spot = rng.choice(spots or lex.SPOTS)
    friend_kind = topic.friend
    while friend_kind is None or friend_kind.noun == kind.noun:
        friend_kind = _draw_kind(rng, grown=plot.grown)
        if plot.rescue:
            friend_kind = rng.choice([k for k in lex.ANIMALS if spot.skill in k.skills])
    # Two pronouns tell two characters apart, so most pairs are of both genders.
    friend = _character(friend_kind, hero.female ^ (rng.random() < 0.75), rng, hero.name)

    adjective = rng.choice(thing.adjectives) if rng.random() < 0.85 else ""
    thing_phrase = f"{adjective} {thing.noun}".strip()
    place = rng.choice(lex.PLACES)
    weather, sight = rng.choice(lex.WEATHER)
    broke, tools = lex.DAMAGE[thing.stuff]
    fear, dared = rng.choice(lex.FEARS)
    first, second = rng.sample(lex.INGREDIENTS, 2)
    slots = {
        "H": hero.name,
        "F": friend.name,
        "kind": hero.noun,
        "ahero": hero.phrase,
        "afriend": friend.phrase,
        "o": thing.noun,
        "a_obj": article(thing_phrase),
        "the_obj": f"the {thing_phrase}",
        "an_o": article(thing.noun),
        "used": thing.used,
        "in": place.first,
        "there": place.later,
        "weather": weather,
        "sight": sight,
        "lost": spot.lost,
        "where": spot.where,
        "fetched": spot.fetched,
        "remedy": rng.choice(lex.REMEDIES),
        "food": rng.choice(lex.FOODS),
        "seed": rng.choice(lex.SEEDS),
        "broke": broke,
        "tools": tools,
        "fear": fear,
        "dared": dared,
        "ingredient": first,
        "ingredient2": second,
        "clue": _clue(friend),
        **hero.slots(""),
        **friend.slots("f"),
    }
    return Story("", hero, friend, thing, thing_phrase, plot), slots


def _fits(plot: plots.Plot, topic: Topic) -> bool:
    kinds = [kind for kind in (topic.hero, topic.friend) if kind]
    if not plot.grown and any(kind in lex.GROWN_UPS for kind in kinds):
        return False
    if not plot.rescue or not topic.friend:
        return True
    spots = [s for s in lex.SPOTS if not topic.thing or topic.thing.light or "wind" not in s.lost]
    return any(spot.skill in topic.friend.skills for spot in spots)


def story(rng: random.Random, topic: Topic | None = None) -> Story:
    """Draw one story that satisfies `topic`."""
    topic = topic or Topic()
    plot = topic.plot or rng.choice([plot for plot in plots.PLOTS if _fits(plot, topic)])
    result, slots = _cast(topic, plot, rng)
    opening = expand(rng.choice(OPENINGS), slots, rng)
    opening = opening[0].upper() + opening[1:]

    break_before = "\n\n" if rng.random() < 0.5 else " "
    text = _capitalise(opening)
    separator = " "
    for line in plot.text.strip().splitlines():
        if not line:
            separator = break_before
        elif not line.startswith("? ") or rng.random() < 0.5:
            text += separator + _capitalise(expand(line.removeprefix("? "), slots, rng))
            separator = " "
    if opening.startswith(("One ", "It was")):
        head, rest = text[: len(opening)], text[len(opening) :]
        for early, late in _LATER.items():
            rest = rest.replace(early, late)
        text = head + rest
    if rng.random() < 0.3:
        text += " The end."
    result.text = text
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for _ in range(args.count):
        print(story(rng).text, end="\n\n---\n\n")


if __name__ == "__main__":
    main()
