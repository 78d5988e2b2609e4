"""The words of the storyteller: who, what, where and when.

Only data lives here. The skills of an animal decide which problems it can solve (an otter fetches
what fell into the river, an owl what hangs in a tree), so that a story's helper is never chosen
without a reason.
"""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """What a character is: the noun, the adjectives that suit it and what it is able to do."""

    noun: str
    adjectives: tuple[str, ...]
    skills: frozenset[str]


class Thing(NamedTuple):
    """An object: noun, adjectives that suit it, "use it" in the past tense, what it is made of."""

    noun: str
    adjectives: tuple[str, ...]
    used: str
    stuff: str

    @property
    def light(self) -> bool:
        """Whether the wind may carry it away."""
        return self.stuff != "solid"


class Place(NamedTuple):
    """A setting: as first mentioned, as mentioned later, and as a bare noun."""

    first: str
    later: str
    noun: str


class Spot(NamedTuple):
    """Where a thing may get lost, the skill that brings it back, and how that looks."""

    lost: str
    where: str
    skill: str
    fetched: str


GIRL_NAMES = tuple(
    "Anna Bella Clara Daisy Ella Emma Flora Grace Hazel Holly Ivy Julia Kate Lena Lily Lucy Luna "
    "Maria Maya Mia Mila Molly Nina Nora Olive Poppy Rosa Rose Ruby Sara Sofia Stella Tess Tilly "
    "Willow Zoe".split()
)
BOY_NAMES = tuple(
    "Adam Arthur Ben Bruno Charlie Daniel Felix Finn Fred George Hugo Jack Jasper Leo Louis Max "
    "Milo Ned Noah Oliver Oscar Otto Paul Peter Pip Ralph Rufus Sam Theo Thomas Tim Toby Tom "
    "Victor Walter".split()
)

_SMALL = "little small shy curious gentle cheerful clever brave kind quiet young".split()
_LARGE = "big gentle kind quiet cheerful strong patient old brave friendly".split()
_CHILD = "little shy curious cheerful clever brave kind quiet young".split()
_GROWN = "old kind poor young cheerful clever quiet patient friendly lonely".split()


def _kinds(adjectives: list[str], table: str) -> tuple[Kind, ...]:
    rows = (row.split(":") for row in table.split())
    return tuple(
        Kind(noun, tuple(adjectives), frozenset(skills.split(",")) - {""}) for noun, skills in rows
    )


ANIMALS = _kinds(
    _SMALL,
    """fox:dig rabbit:dig mouse:creep,climb squirrel:climb hedgehog:creep mole:dig frog:swim
    otter:swim duck:swim,fly robin:fly sparrow:fly owl:fly cat:climb kitten:climb puppy:dig
    lamb: turtle:swim beaver:swim raccoon:climb penguin:swim monkey:climb lizard:creep,climb
    hamster:creep parrot:fly crow:fly pigeon:fly snail:creep seal:swim""",
) + _kinds(
    _LARGE,
    """bear:push,climb badger:dig goose:swim,fly swan:swim,fly horse:push donkey:push goat:push
    deer: dog:dig elephant:push cow:push wolf:dig lion:push pig:dig""",
)
CHILDREN = _kinds(_CHILD, "boy:climb girl:climb")
GROWN_UPS = _kinds(
    _GROWN,
    "baker: farmer:push gardener:dig tailor: sailor:swim shepherd: miller:push potter: painter:",
)
KINDS = {kind.noun: kind for kind in ANIMALS + CHILDREN + GROWN_UPS}


def _things(stuff: str, adjectives: str, table: str) -> tuple[Thing, ...]:
    rows = (row.strip().split("/") for row in table.split(","))
    return tuple(Thing(noun, tuple(adjectives.split()), used, stuff) for noun, used in rows)


THINGS = (
    _things(
        "cloth",
        "red blue yellow green white purple striped little warm soft",
        "scarf/wore, hat/wore, blanket/carried, ribbon/wore, cap/wore, coat/wore, flag/carried",
    )
    + _things(
        "paper",
        "red blue yellow green white purple little bright",
        "kite/flew, balloon/carried, umbrella/carried, map/studied, book/read, letter/read",
    )
    + _things(
        "solid",
        "red blue yellow green little old round painted shiny",
        "ball/played with, drum/played, cup/polished, top/spun, basket/carried, cart/pulled,"
        " box/opened, button/polished, teapot/polished, bucket/carried, lantern/lit, boat/sailed,"
        " sled/pulled, lamp/lit, doll/played with",
    )
    + _things(
        "solid",
        "silver golden shiny little old tiny lucky",
        "bell/rang, key/carried, whistle/blew, ring/wore, coin/polished, flute/played,"
        " spoon/polished, compass/studied, clock/wound, mirror/polished, medal/wore,"
        " trumpet/played",
    )
    + _things(
        "solid",
        "white blue pretty smooth tiny round shiny",
        "shell/held, stone/held, pearl/held, marble/played with",
    )
)
# What an accident does to a thing, and what mends it.
DAMAGE = {
    "cloth": ("tore", "needle and thread"),
    "paper": ("tore", "paper and glue"),
    "solid": ("broke", "glue and paint"),
}

PLACES = tuple(
    Place(*row.split("/"))
    for row in (
        "in a small village/in the village/village",
        "in a green valley/in the valley/valley",
        "in a quiet forest/in the forest/forest",
        "in a deep forest/in the forest/forest",
        "in a big garden/in the garden/garden",
        "on a little farm/on the farm/farm",
        "on a green hill/on the hill/hill",
        "on a small island/on the island/island",
        "in a sunny meadow/in the meadow/meadow",
        "by the sea/by the sea/sea",
        "near a wide river/near the river/river",
        "by a blue lake/by the lake/lake",
        "at the foot of a mountain/near the mountain/mountain",
        "in a busy town/in the town/town",
    )
)

TREE = "at the top of a tall tree"
SPOTS = (
    Spot("the wind carried it up into a tall tree", TREE, "fly", "flew up and brought it down"),
    Spot(
        "the wind carried it up into a tall tree", TREE, "climb", "climbed up and brought it down"
    ),
    Spot(
        "the wind blew it onto a high roof", "on a high roof", "fly", "flew up and brought it back"
    ),
    Spot(
        "it fell into the river",
        "at the bottom of the river",
        "swim",
        "dived into the water and brought it back",
    ),
    Spot(
        "it fell into the pond", "in the middle of the pond", "swim", "swam out and brought it back"
    ),
    Spot("it fell into a deep hole", "in a deep hole", "dig", "dug and dug and pulled it out"),
    Spot("it got buried under the sand", "deep under the sand", "dig", "dug down and found it"),
    Spot(
        "it rolled under a thorny bush",
        "under a thorny bush",
        "creep",
        "crept under the thorns and pulled it out",
    ),
    Spot(
        "it slipped into a crack in the wall",
        "inside the old wall",
        "creep",
        "squeezed into the crack and pulled it out",
    ),
    Spot(
        "it rolled behind a heavy rock",
        "behind a heavy rock",
        "push",
        "pushed the rock aside and picked it up",
    ),
)

# Weather word and what one sees of it.
WEATHER = (
    ("sunny", "The sun was shining"),
    ("windy", "The wind was blowing"),
    ("rainy", "A soft rain was falling"),
    ("snowy", "Snow lay on the ground"),
    ("foggy", "Fog lay over everything"),
    ("cold", "There was frost on the grass"),
    ("warm", "The air was warm and still"),
    ("bright", "There was not a cloud in the sky"),
)

FOODS = tuple(
    "an apple pie/a plum cake/a honey cake/a pot of soup/a loaf of warm bread/a bowl of berries/"
    "a carrot cake/a pumpkin pie/a pot of jam/a nut cake".split("/")
)
INGREDIENTS = tuple(
    "a carrot/an onion/a potato/a cabbage/a turnip/some beans/some peas/a mushroom/some herbs/"
    "a pumpkin/a tomato/some corn".split("/")
)
REMEDIES = tuple(
    "a blue flower/a jar of golden honey/a silver leaf/a red berry/a sweet root/"
    "a bottle of spring water".split("/")
)
SEEDS = tuple("sunflower/pumpkin/apple tree/rose bush/pear tree/cherry tree".split("/"))
FEARS = (
    ("the dark", "walked into the dark wood"),
    ("deep water", "swam across the pond"),
    ("thunder", "ran out into the storm"),
    ("high places", "climbed up the old tower"),
    ("strangers", "asked every stranger on the road for help"),
    ("loud noises", "ran past the roaring mill"),
)

# Topics the storyteller has no stories about; it must copy the word and offer something else.
UNKNOWN = tuple(
    "a spaceship/a robot/a computer/the moon landing/a volcano/a dinosaur/a submarine/a pirate/"
    "a dragon/a unicorn/a zebra/a giraffe/a train/a rocket/a wizard/a ghost/football/chess/physics/"
    "history/mathematics/a car/a bicycle/a camel/a whale/a shark/a tiger/a telephone/politics/"
    "music/materializing/a bridge/a castle/a knight/a princess/a queen/a king/a doctor/a teacher/space/"
    "winter sports/a piano/a guitar/the weather/money/a hotel/an airport/an astronaut/an engine/"
    "an octopus/a spider/a snake/a kangaroo/a crocodile/Paris/London/Africa/science/art/the news/"
    "a bank/a lawyer/a detective/a city of glass/a library/a ladder/a hammer/a tractor/tea/coffee/"
    "a violin/a camera/a dolphin/a panda/a koala/a peacock/an ant/a bee/a butterfly/a dragonfly/"
    "love/time/the future/the past/dreams/a factory/a museum/a desert/a jungle/a cave/a clown/"
    "a circus/a magician/a giant/a fairy/a witch/a troll/a monster/a vampire/a zombie/a mermaid/"
    "a hospital/an office/a school bus/a helicopter/an island of gold/a nurse/a judge".split("/")
)
