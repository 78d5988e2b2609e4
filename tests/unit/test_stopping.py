"""When a completion ends, and which of its text may be sent before."""

from __future__ import annotations

import codecs
import re
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import toy_tokenizers as toys
from support.pairwise import slow_but
from verbatim.core import FinishReason
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams
from verbatim.sampling.stopping import StopWatch, single_stop_ids
from verbatim.text.detokenizer import REPLACEMENT, Detokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def watch_for(params, *, tokenizer=None, max_tokens=1000, eos=True, prompt=()):
    tokenizer = tokenizer or toys.byte_level()
    detokenizer = Detokenizer(
        tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_tail_ids=prompt
    )
    return StopWatch(
        params,
        stop_ids=single_stop_ids(params, frozenset([tokenizer.eos_id] if eos else [])),
        max_tokens=max_tokens,
        detokenizer=detokenizer,
    )


def ids_of(text, tokenizer=None):
    """One id per byte, so that a test chooses the token boundaries."""
    vocab = (tokenizer or toys.byte_level()).hf.get_vocab()
    return [vocab[char.replace(" ", "Ġ").replace("\n", "Ċ")] for char in text]


def follow(watch, ids):
    """Push ids until the completion ends; return the text taken after each token."""
    taken = []
    for token_id in ids:
        ended = watch.push(token_id)
        taken.append(watch.take())
        assert ended == watch.finished
        if ended:
            break
    return taken


# -- what ends a completion --------------------------------------------------------------------------

A, B, C = ids_of("abc")
SMILE = toys.byte_level().hf.convert_tokens_to_ids("🙂 smile")
EOS = 2


@pytest.mark.parametrize(
    ("ids", "params", "count", "text", "reason"),
    [
        # An end of sequence is in the ids, but in the text only if special tokens are not skipped.
        ([A, EOS, B], {}, 2, "a", EOS),
        ([A, EOS], dict(skip_special_tokens=False), 2, "a</s>", EOS),
        ([EOS, A, B], dict(ignore_eos=True, max_tokens=3), 3, "ab", LENGTH),
        ([A, B, C], dict(max_tokens=2), 2, "ab", LENGTH),
        # The text of a stop id is kept. A stop sequence of ids stops at its last id.
        ("abc", dict(stop_token_ids=[B]), 2, "ab", B),
        ("aabc", dict(stop_token_ids=[[A, B]]), 3, "aab", (A, B)),
        ("abcabc", dict(stop_token_ids=[[A, C], [C, A]]), 4, "abca", (C, A)),
        ("abc", dict(stop_token_ids=[[B, C], [A, B, C]]), 3, "abc", (A, B, C)),
        ("abc", dict(stop_token_ids=[[B, C], [C]]), 3, "abc", C),
        # Stop strings cut the text.
        ("hello world", dict(stop="wor"), 9, "hello ", "wor"),
        ("hello", dict(stop="lo", include_stop_str_in_output=True), 5, "hello", "lo"),
        ("aaab", dict(stop="aab"), 4, "a", "aab"),
        ("ababac", dict(stop="abac"), 6, "ab", "abac"),
        ("abcd", dict(stop=["bc", "abc"]), 3, "", "abc"),  # both end here: the earlier start wins
        ("xabcd", dict(stop=["abcd", "bc"]), 4, "xa", "bc"),  # the first one completed wins
        ("ab", dict(stop=["b", "ab", "a"]), 1, "", "a"),
        ("a\n\nb", dict(stop="\n\n"), 3, "a", "\n\n"),
        ("abc", dict(stop=["z", "cd"]), 3, "abc", None),
        ("", dict(stop="a"), 0, "", None),
        # A stop string within one token drops its rest; of those that begin together the longest wins.
        ([A, SMILE], dict(stop=["mil", "smi"]), 2, "a🙂 ", "smi"),
        ([A, SMILE], dict(stop=["mil"], include_stop_str_in_output=True), 2, "a🙂 smil", "mil"),
        ([SMILE], dict(stop=["🙂", "🙂 s", "🙂 "]), 1, "", "🙂 s"),
        (toys.byte_level().encode("これは日本語です"), dict(stop="本語"), None, "これは日", "本語"),
        # At the same token, stop ids take precedence over stop strings, and these over the length.
        ("ab", dict(stop="ab", stop_token_ids=[B], max_tokens=2), 2, "ab", B),
        ("ab", dict(stop="ab", max_tokens=2), 2, "", "ab"),
        # Below min_tokens only the length stops, and a stop completed there does not stop later.
        ([A, EOS, EOS], dict(min_tokens=3, stop="a", stop_token_ids=[A]), 3, "a", EOS),
        ("aa", dict(min_tokens=3, stop="a", stop_token_ids=[A], max_tokens=2), 2, "aa", LENGTH),
        ("abxabz", dict(min_tokens=4, stop=["ab", "bxy"]), 5, "abx", "ab"),
        ("abxy", dict(min_tokens=4, stop=["ab", "bxy"]), 4, "a", "bxy"),  # begins below min_tokens
        ("abxc", dict(min_tokens=4, stop=["ab", "bxy"]), 4, "abxc", None),
        ("abz", dict(min_tokens=3, stop=["abx", "b"]), 3, "abz", None),  # completed in held text
    ],
)
def test_finish_reason_token_count_and_text_of_a_completion(ids, params, count, text, reason):
    """`reason` is `stop_reason`, `LENGTH`, or None where nothing ends it."""
    params = dict(params)
    max_tokens = params.pop("max_tokens", 1000)
    watch = watch_for(SamplingParams(**params), max_tokens=max_tokens)
    taken = follow(watch, ids_of(ids) if isinstance(ids, str) else ids)
    assert watch.num_tokens == (watch.num_tokens if count is None else count)
    ended = {None: (None, None), LENGTH: (LENGTH, None)}.get(reason, (STOP, reason))
    assert (watch.finish_reason, watch.stop_reason) == ended
    assert watch.finished == (reason is not None)
    watch.finish(FinishReason.ABORT)
    assert "".join(taken) + watch.take() == watch.text == text


def test_stop_string_completed_below_min_tokens_is_sent():
    watch = watch_for(SamplingParams(min_tokens=9, stop=["ab", "wxyz"]))
    assert follow(watch, ids_of("xabw")) == ["x", "", "ab", ""]


def test_stop_string_pending_below_min_tokens_does_not_stop_later():
    tokenizer = toys.byte_fallback()
    newline, a = (tokenizer.hf.convert_tokens_to_ids(p) for p in ("<0x0A>", "<0x61>"))
    watch = watch_for(SamplingParams(stop="\n", min_tokens=2), tokenizer=tokenizer)
    assert [watch.push(i) for i in (newline, a, newline)] == [False, False, True]
    assert (watch.finish_reason, watch.stop_reason) == (STOP, "\n")
    assert watch.text == "\na"


def test_byte_fallback_newline_stops_immediately():
    tokenizer = toys.byte_fallback()
    ids = [*tokenizer.encode("the fox"), tokenizer.hf.convert_tokens_to_ids("<0x0A>")]
    watch = watch_for(SamplingParams(stop="\n"), tokenizer=tokenizer)
    assert "".join(follow(watch, [*ids, *ids])) == watch.text == "the fox"
    assert watch.num_tokens == len(ids)


def test_stop_string_without_a_tokenizer_is_rejected():
    with pytest.raises(InvalidRequest, match=r"'END'.*stop_token_ids"):
        StopWatch(SamplingParams(stop="END"), stop_ids=frozenset(), max_tokens=5, detokenizer=None)


def test_stop_ids_work_without_a_tokenizer():
    watch = StopWatch(
        SamplingParams(stop_token_ids=[[4, 5]]),
        stop_ids=frozenset([9]),
        max_tokens=5,
        detokenizer=None,
    )
    assert [watch.push(4), watch.push(5)] == [False, True]
    assert (watch.finish_reason, watch.stop_reason) == (STOP, (4, 5))
    assert watch.text == watch.take() == ""


def test_abort_releases_held_text_and_keeps_the_first_finish_reason():
    watch = watch_for(SamplingParams(stop="abc"))
    assert follow(watch, ids_of("xab")) == ["x", "", ""]
    watch.finish(FinishReason.ABORT)
    watch.finish(FinishReason.ERROR)  # the first reason stays
    assert (watch.take(), watch.text) == ("ab", "xab")
    assert (watch.finish_reason, watch.stop_reason) == (FinishReason.ABORT, None)


def test_push_after_the_end_raises_assertion_error():
    watch = watch_for(SamplingParams())
    watch.push(2)
    with pytest.raises(AssertionError, match="after the end"):
        watch.push(2)


# -- stops ignore the prompt -------------------------------------------------------------------------


def test_stop_that_begins_in_the_prompt_is_ignored():
    for params in (SamplingParams(stop="bc"), SamplingParams(stop_token_ids=[ids_of("bc")])):
        watch = watch_for(params, prompt=ids_of("ab"))
        assert not watch.push(C)


# -- against brute force -----------------------------------------------------------------------------


def visible(tokenizer, ids):
    """The text of ids without an incomplete character at its end."""
    if tokenizer is toys.byte_fallback():
        ids = list(ids)
        while _ends_within_a_character(tokenizer, ids):
            ids.pop()
    return tokenizer.hf.decode(ids, skip_special_tokens=True).rstrip(REPLACEMENT)


def _ends_within_a_character(tokenizer, ids):
    pieces = tokenizer.hf.convert_ids_to_tokens([i for i in ids if i not in tokenizer.special_ids])
    run = takewhile(re.compile("<0x..>").match, reversed(pieces))
    data = bytes([int(p[3:5], 16) for p in run][::-1])
    try:
        text = codecs.getincrementaldecoder("utf-8")("strict").decode(data)
    except UnicodeDecodeError:
        return False
    return len(text.encode()) < len(data)


def brute_force(tokenizer, ids, params, max_tokens):
    """Direct implementation of the definition: (number of tokens, reason, stop reason, text)."""
    stop_ids = {s[0] for s in params.stop_token_ids if len(s) == 1}
    stop_ids |= set() if params.ignore_eos else {tokenizer.eos_id}
    sequences = sorted((s for s in params.stop_token_ids if len(s) > 1), key=len, reverse=True)
    shown = ""
    for count in range(1, len(ids) + 1):
        prefix, before, shown = ids[:count], shown, visible(tokenizer, ids[:count])
        text = tokenizer.hf.decode(prefix, skip_special_tokens=True)
        old = len([*takewhile(lambda pair: pair[0] == pair[1], zip(before, shown, strict=False))])
        if count >= params.min_tokens:
            if prefix[-1] in stop_ids:
                return count, STOP, prefix[-1], text
            for sequence in sequences:
                if tuple(prefix[-len(sequence) :]) == sequence:
                    return count, STOP, sequence, text
            matches = [
                (start, -len(stop), stop)
                for stop in params.stop
                for start in range(len(shown))
                if shown.startswith(stop, start) and start + len(stop) > old
            ]
            if matches:
                start, _, stop = min(matches)
                end = start + len(stop) * params.include_stop_str_in_output
                return count, STOP, stop, shown[:end]
        if count >= max_tokens:
            return count, LENGTH, None, text
    return len(ids), None, None, tokenizer.hf.decode(ids, skip_special_tokens=True)


def few_ids(tokenizer):
    """Few ids, so that stops are frequent: letters, spaces, parts of characters, an end of sequence."""
    vocab = tokenizer.hf.get_vocab()
    if tokenizer is toys.byte_level():
        names = [*"aabbbc", "Ġ", "ð", "Ł", "Ļ", "Ĥ", "Ã", "©", "the", "</s>", "<s>"]
    elif tokenizer is toys.byte_fallback():
        names = [f"<0x{b:02X}>" for b in b"aabb \n\xc3\xa9\xf0\x9f\x99\x82"]
        names += ["▁", "▁the", "s", "</s>", "<s>"]
    else:
        names = ["n", "'", " '", "n't", "s", ".", "t", "m", " ", "the", "</s>", "<s>"]
    return [vocab[name] for name in names if name in vocab]


STOPS = ["a", "ab", "aab", "abab", "bb", "b ", " a", "🙂", "a🙂b", "é", "éa", "\n", "\na", "the"]
STOPS += ["n", "n't", "'", "'s", " n", ". ", "'t the", "n'", "aaaab", "he", "t"]


@pytest.mark.parametrize(
    "kind", slow_but([toys.byte_level], [toys.byte_level, toys.byte_fallback, toys.word_piece])
)
@settings(max_examples=300)
@given(data=st.data())
def test_stop_watch_equals_brute_force(kind, data):
    tokenizer = kind()
    pool = st.sampled_from(few_ids(tokenizer))
    ids = data.draw(st.lists(pool, max_size=16))
    max_tokens = data.draw(st.integers(1, 20))
    params = SamplingParams(
        stop=data.draw(st.lists(st.sampled_from(STOPS), max_size=4)),
        stop_token_ids=data.draw(st.lists(st.lists(pool, min_size=1, max_size=3), max_size=2)),
        min_tokens=data.draw(st.integers(0, 8)),
        include_stop_str_in_output=data.draw(st.booleans()),
        ignore_eos=data.draw(st.booleans()),
    )
    watch = watch_for(params, tokenizer=tokenizer, max_tokens=max_tokens)
    taken = follow(watch, ids)
    if not watch.finished:
        check_that_nothing_claimed_was_sent(params, watch, taken, ids)
    count, reason, stop_reason = watch.num_tokens, watch.finish_reason, watch.stop_reason
    watch.finish(FinishReason.ABORT)
    assert (count, reason, stop_reason, watch.text) == brute_force(
        tokenizer, ids, params, max_tokens
    )
    assert "".join(taken) + watch.take() == watch.text


def check_that_nothing_claimed_was_sent(params, watch, taken, ids):
    """The sent text ends before any suffix of `watch.text` that may begin a stop string."""
    sent = "".join(taken)
    assert watch.text.startswith(sent)
    for stop in params.stop:
        for size in range(1, len(stop)):
            if watch.text.endswith(stop[:size]):
                assert len(sent) <= len(watch.text) - size, (stop, sent, watch.text)


@settings(max_examples=200)
@given(text=st.text("ab", max_size=30), stop=st.text("ab", min_size=1, max_size=6))
def test_sent_text_is_never_cut_by_a_stop_string(text, stop):
    watch = watch_for(SamplingParams(stop=stop))
    sent = ""
    for token_id in ids_of(text):
        ended = watch.push(token_id)
        sent += watch.take()
        if ended:
            break
    end = text.find(stop)
    assert (sent == watch.text == text[:end]) if end >= 0 else watch.text == text
    if end < 0:  # all text is sent, except what may begin the stop string
        held = text[len(sent) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)
        assert not any(text.endswith(stop[:n]) for n in range(len(held) + 1, len(stop)))


def test_stop_search_per_token_is_bounded_by_stop_string_length():
    """The work per token does not grow with the length of the completion."""
    lengths = []

    class Measured(StopWatch):
        def _begins_stop(self, end):
            lengths.append(len(end))
            return super()._begins_stop(end)

    params = SamplingParams(stop=["ab" * 10 + "c", "never"])
    detokenizer = Detokenizer(toys.byte_level())
    watch = Measured(params, stop_ids=frozenset(), max_tokens=10**6, detokenizer=detokenizer)
    follow(watch, ids_of("ab" * 2000))
    assert max(lengths) <= 21
    assert len(lengths) < 3 * 4000


# -- forks -------------------------------------------------------------------------------------------


def grow(watch, ids):
    """Push `ids` until the watch finishes; return what can be observed after each."""
    seen = []
    for token_id in ids:
        if watch.finished:
            break
        seen.append((watch.push(token_id), watch.text, watch.take()))
    return seen


def end(watch):
    watch.finish(FinishReason.ABORT)
    return watch.text, watch.take(), watch.num_tokens, watch.finish_reason, watch.stop_reason


@pytest.mark.parametrize("kind", [*toys.EXACT, "in_python"])
@settings(max_examples=60)
@given(data=st.data())
def test_fork_and_original_are_independent(kind, data):
    """Both equal fresh watches, also if forked within a character or a stop string."""
    tokenizer = getattr(toys, kind)() if kind == "in_python" else toys.EXACT[kind]()
    text = data.draw(st.text(st.sampled_from("ab é日本🙂👩\u200d👧.,'nt"), min_size=1, max_size=12))
    cut = data.draw(st.integers(0, len(text)))
    ids = st.just([]) | st.lists(st.integers(0, 480), max_size=6)  # beyond every toy's vocabulary
    written = tokenizer.encode(text)
    place = data.draw(st.integers(0, len(written)))
    before = written[:place] + data.draw(ids)
    ways = [written[place:] + data.draw(ids), data.draw(ids) + written]
    params = SamplingParams(
        stop=[text[cut : cut + 4] or "zz", text + "!"] if data.draw(st.booleans()) else (),
        stop_token_ids=[(7, 8), written[-3:] or 9] if data.draw(st.booleans()) else (),
        include_stop_str_in_output=data.draw(st.booleans()),
    )

    def fresh():
        watch = watch_for(params, tokenizer=tokenizer, max_tokens=25)
        grow(watch, before)
        return watch

    expected = []
    for way in ways:
        watch = fresh()
        expected.append((grow(watch, way), end(watch)))
    origin = fresh()
    fork = origin.fork()
    watches = [origin, fork] if data.draw(st.booleans()) else [fork, origin]
    seen = [[], []]
    for step in range(max(map(len, ways))):  # interleaved, so that either could affect the other
        for watch, way, said in zip(watches, ways, seen, strict=True):
            said += grow(watch, way[step : step + 1])
    assert [(said, end(watch)) for said, watch in zip(seen, watches, strict=True)] == expected


def test_fork_returns_only_text_not_yet_taken():
    watch = watch_for(SamplingParams())
    follow(watch, ids_of("ab"))
    watch.push(ids_of("c")[0])
    fork = watch.fork()
    fork.push(ids_of("d")[0])
    assert (watch.take(), fork.take()) == ("c", "cd")
