"""Conversations with the storyteller: requests, stories, questions about them and small talk.

A conversation is a list of `{"role", "content"}` messages. Requests come in many wordings and the
topic is always one that the following story contains, so the model learns to listen. Of a topic it
has no stories about it says so, repeats the word, and offers one that it knows.
"""

from __future__ import annotations

import random

import grammar
import lexicon as lex
import plots

Message = dict[str, str]

ASK = """
Tell me a story about {t}.
Tell me a story about {t}.
Tell me a story about {t}
Tell a story about {t}.
Tell a story about {t}
Can you tell me a story about {t}?
Could you tell me a story about {t}?
Please tell me a story about {t}.
Tell me a short story about {t}.
Tell me a bedtime story about {t}, please.
I want a story about {t}.
I would like to hear a story about {t}.
I would like a story about {t}, please.
Write a story about {t}.
Write a short story about {t}.
Write me a story about {t}
Do you know a story about {t}?
Do you have a story about {t}?
A story about {t}, please.
A story about {t}
What about {t}?
tell me a story about {t}
tell me about {t}
""".strip().splitlines()
ASK_ANY = """
Tell me a story.
Tell me a story
Tell me a story, please.
Tell a story.
Can you tell me a story?
Please tell me a story.
I want a story.
I would like to hear a story.
Tell me a bedtime story.
A story, please.
Write a short story.
Do you know a story?
tell me a story
Story
""".strip().splitlines()
ASK_MORE = """
Can you tell another one?
Can you tell me another one?
Another one, please.
Another one!
Tell me another story.
Tell me another one.
One more, please.
One more!
More, please.
Again!
Do you know another story?
Please tell another story.
""".strip().splitlines()
SMALL_TALK = (
    (
        "Hi/Hi!/Hello/Hello!/Hey/Hello there!/Good morning!/Good evening!/hi/hello",
        "Hello! Would you like to hear a story?/Hello! What should my story be about?/"
        "Hi! I know many stories. What should the next one be about?",
    ),
    (
        "Who are you?/What are you?/What is your name?/Are you a robot?/Are you a person?",
        "I am the storyteller, a very small language model. I tell stories about animals and"
        " friends./I am a very small language model, and I tell stories.",
    ),
    (
        "What can you do?/Can you help me?/How can you help me?/What do you know?/Help",
        "I can tell you a story. Try asking for a story about {t}./"
        "I tell short stories. Would you like one about {t}?",
    ),
    (
        "Thank you./Thank you!/Thanks!/Thanks/That was nice./That was a good story./I like it./"
        "Great!/Nice story!/Wonderful!",
        "You are welcome!/You are welcome! Would you like another one?/"
        "I am glad that you liked it./I am glad you liked it. Shall I tell another one?",
    ),
    (
        "How are you?/How are you today?/How do you do?",
        "I am well, thank you. Would you like a story?/Very well, thank you! I am full of stories.",
    ),
    (
        "Goodbye!/Bye!/Bye/Good night./Good night!/See you!",
        "Goodbye! Come back when you want another story./Good night! Sleep well.",
    ),
)
OFF_TOPIC = """
What is two plus two?
What is the capital of France?
What is the weather like today?
Write a poem.
Can you write a program?
How old are you?
Where do you live?
Who made you?
Why is the sky blue?
What time is it?
Explain how a computer works.
Translate this sentence.
Summarize this text.
Sing a song.
What is the meaning of life?
""".strip().splitlines()
SYSTEM = (
    "You are a storyteller.",
    "You are a helpful assistant.",
    "You tell short stories for children.",
    "You are a friendly assistant who tells stories.",
)
_PLURALS = {"mouse": "mice", "wolf": "wolves", "goose": "geese", "sheep": "sheep", "deer": "deer"}


def _plural(noun: str) -> str:
    if noun in _PLURALS:
        return _PLURALS[noun]
    if noun.endswith(("x", "sh", "ch")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeo" else noun + "s"


def topic(rng: random.Random) -> tuple[str, grammar.Topic]:
    """A topic in words, and the same as demands on the grammar."""
    kind = rng.choice(lex.ANIMALS + lex.CHILDREN if rng.random() < 0.9 else lex.GROWN_UPS)
    thing = rng.choice(lex.THINGS)
    one = grammar.article(kind.noun)
    draw = rng.random()
    if draw < 0.28:
        return one, grammar.Topic(hero=kind)
    if draw < 0.58:
        return f"{one} and {grammar.article(thing.noun)}", grammar.Topic(hero=kind, thing=thing)
    if draw < 0.70:
        other = rng.choice([k for k in lex.ANIMALS + lex.CHILDREN if k != kind])
        words = f"{one} and {grammar.article(other.noun)}"
        return words, grammar.Topic(hero=kind, friend=other)
    if draw < 0.80:
        return grammar.article(thing.noun), grammar.Topic(thing=thing)
    if draw < 0.86:
        plot = rng.choice(plots.PLOTS)
        return plot.theme, grammar.Topic(plot=plot)
    if draw < 0.90:
        return _plural(kind.noun), grammar.Topic(hero=kind)
    female = {"girl": True, "cow": True, "boy": False}.get(kind.noun, rng.random() < 0.5)
    name = rng.choice(lex.GIRL_NAMES if female else lex.BOY_NAMES)
    if draw < 0.97:
        return f"{one} named {name}", grammar.Topic(hero=kind, name=name)
    return name, grammar.Topic(name=name)


def _unknown(rng: random.Random) -> str:
    """A topic outside the lexicon; made-up words teach the model to copy what it was asked."""
    if rng.random() < 0.6:
        return rng.choice(lex.UNKNOWN)
    syllables = [
        rng.choice(
            ("b", "br", "c", "d", "f", "g", "gl", "k", "l", "m", "n", "p", "r", "s", "st", "t")
        )
        + rng.choice("aeiou")
        + rng.choice(("", "", "n", "r", "l", "m", "s", "t"))
        for _ in range(rng.randint(2, 3))
    ]
    word = "".join(syllables)
    return rng.choice((word, grammar.article(word), word.capitalize()))


def _fill(template: str, words: str) -> str:
    return template.replace("{t}", words)


def _say(chat: list[Message], user: str, assistant: str) -> None:
    chat.append({"role": "user", "content": user})
    chat.append({"role": "assistant", "content": assistant})


def _told(words: str | None, tale: grammar.Story, rng: random.Random) -> str:
    if words is None or rng.random() < 0.55:
        return tale.text
    return rng.choice((f"Here is a story about {words}.", "Of course! Here is a story.")) + (
        "\n\n" + tale.text
    )


def _question(tale: grammar.Story, rng: random.Random) -> tuple[str, str]:
    hero, friend = tale.hero, tale.friend
    return rng.choice(
        (
            (f"What was the name of the {hero.noun}?", f"The {hero.noun} was named {hero.name}."),
            (f"What was the {friend.noun} called?", f"The {friend.noun} was named {friend.name}."),
            (f"Who was {hero.name}?", f"{hero.name} was {hero.phrase}."),
            (f"Who was {friend.name}?", f"{friend.name} was {friend.phrase}."),
            ("Who was the story about?", f"It was about {hero.name} and {friend.name}."),
            (
                "What was the story about?",
                f"It was about {hero.phrase}, {friend.phrase} and"
                f" {grammar.article(tale.thing_phrase)}.",
            ),
        )
    )


def _turn(chat: list[Message], rng: random.Random) -> grammar.Story | None:
    """Append one request with its answer (two if the storyteller has to offer something else)."""
    draw = rng.random()
    words, wanted = topic(rng)
    if draw < 0.60:
        tale = grammar.story(rng, wanted)
        _say(chat, _fill(rng.choice(ASK), words), _told(words, tale, rng))
        return tale
    if draw < 0.74:
        tale = grammar.story(rng)
        asked = rng.choice(ASK_MORE if len(chat) > 1 and rng.random() < 0.7 else ASK_ANY)
        _say(chat, asked, _told(None, tale, rng))
        return tale
    if draw < 0.86:
        asked, answers = rng.choice(SMALL_TALK)
        _say(chat, rng.choice(asked.split("/")), _fill(rng.choice(answers.split("/")), words))
        return None
    if draw < 0.89:
        offer = f"I only know how to tell stories. Would you like one about {words}?"
        _say(chat, rng.choice(OFF_TOPIC), offer)
    else:
        unknown = _unknown(rng)
        offer = f"I do not know a story about {unknown}. Would you like one about {words}?"
        _say(chat, _fill(rng.choice(ASK), unknown), offer)
    if rng.random() < 0.3:
        _say(
            chat,
            rng.choice(("No.", "No, thank you.", "no")),
            "All right. Just ask when you want a story.",
        )
        return None
    tale = grammar.story(rng, wanted)
    _say(chat, rng.choice(("Yes.", "Yes, please.", "Yes", "yes", "Sure.", "Okay.")), tale.text)
    return tale


def conversation(rng: random.Random) -> list[Message]:
    """Draw a conversation of one to four turns, some with a system message."""
    chat: list[Message] = []
    if rng.random() < 0.15:
        chat.append({"role": "system", "content": rng.choice(SYSTEM)})
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        tale = _turn(chat, rng)
        if tale is not None and rng.random() < 0.2:
            _say(chat, *_question(tale, rng))
    return chat


def render(chat: list[Message], *, add_generation_prompt: bool = False) -> str:
    """The conversation as text; `CHAT_TEMPLATE` says the same in the tokenizer's language."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
