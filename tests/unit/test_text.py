"""Tokenization, incremental detokenization, chat templates."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from support import toy_tokenizers as toys
from verbatim.errors import InvalidRequest, ModelError, NotSupported
from verbatim.text.chat import render_chat
from verbatim.text.detokenizer import REPLACEMENT, Detokenizer
from verbatim.text.tokenizer import Tokenizer, clean_up

ids_of_any_kind = st.lists(st.integers(0, 480), max_size=40)  # beyond every toy's vocabulary
texts = st.text(
    st.sampled_from("ab e\u0301é日本語🙂👩\u200d👧ह\u093f .,'nt!\n\u00a0\ufffd"), max_size=20
)


def pushed(detokenizer, ids):
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


def piece_ids(tokenizer, *pieces):
    return [tokenizer.hf.convert_tokens_to_ids(piece) for piece in pieces]


def byte_pieces(tokenizer, data):
    return piece_ids(tokenizer, *(f"<0x{byte:02X}>" for byte in data))


@pytest.fixture(params=toys.EXACT)
def tokenizer(request):
    return toys.EXACT[request.param]()


# -- the text of a completion ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", toys.EXACT)
@settings(max_examples=100)
@given(ids=ids_of_any_kind, skip=st.booleans())
def test_incremental_text_of_any_ids_equals_decoded_text(kind, ids, skip):
    tokenizer = toys.EXACT[kind]()
    expected = tokenizer.hf.decode(ids, skip_special_tokens=skip)
    assert pushed(Detokenizer(tokenizer, skip_special_tokens=skip), ids) == expected
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@settings(max_examples=100)
@given(
    data=st.lists(st.sampled_from([*b"a \n", *range(128, 256)]), max_size=12), between=st.booleans()
)
def test_incremental_text_of_byte_pieces_equals_decoded_text(data, between):
    for tokenizer in (toys.byte_fallback(), toys.byte_fallback(strip=False)):
        ids = byte_pieces(tokenizer, data)
        if between:  # a special token and one that doesn't exist, within the run
            ids[len(ids) // 2 : len(ids) // 2] = [tokenizer.eos_id, 9999]
        assert pushed(Detokenizer(tokenizer), ids) == tokenizer.hf.decode(ids, True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_unstripped"])
@settings(max_examples=60)
@given(text=texts)
def test_incomplete_characters_are_never_shown(kind, text):
    tokenizer = toys.EXACT[kind]()
    # "é" is an added token, which the library's decoder takes for a partial character.
    text = text.replace("é", "e")
    detokenizer = Detokenizer(tokenizer, prompt_tail_ids=tokenizer.encode("a"))
    shown = ""
    for token_id in tokenizer.encode_fragment(text)[0] if text else ():
        shown += detokenizer.push(token_id)
        assert REPLACEMENT in text or REPLACEMENT not in shown + detokenizer.pending


@pytest.mark.parametrize("kind", [k for k in toys.EXACT if k != "word_piece"])
@settings(max_examples=100)
@given(prompt=ids_of_any_kind, ids=ids_of_any_kind)
def test_completion_text_is_the_decoded_text_after_the_prompt(kind, prompt, ids):
    tokenizer = toys.EXACT[kind]()
    before = tokenizer.hf.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.hf.decode(prompt + ids, skip_special_tokens=True)
    if REPLACEMENT in before or not whole.startswith(before):
        return  # a character is split between prompt and completion
    text = pushed(Detokenizer(tokenizer, prompt_tail_ids=prompt), ids)
    if REPLACEMENT not in whole:
        assert text == whole[len(before) :]


def test_leading_space_of_a_completion_is_kept_after_a_prompt():
    tokenizer = toys.byte_fallback()
    the, fox = piece_ids(tokenizer, "▁the", "▁")
    assert pushed(Detokenizer(tokenizer), [the]) == "the"
    assert pushed(Detokenizer(tokenizer, prompt_tail_ids=[fox]), [the]) == " the"
    begins = Detokenizer(tokenizer, prompt_tail_ids=[tokenizer.bos_id])
    assert pushed(begins, [the]) == "the"  # a skipped BOS is not text
    shown = Detokenizer(tokenizer, skip_special_tokens=False, prompt_tail_ids=[tokenizer.bos_id])
    assert pushed(shown, [the]) == " the"


def test_word_piece_continuation_joins_the_prompts_last_word():
    tokenizer = toys.word_piece()
    piece = next(p for p in tokenizer.hf.get_vocab() if p.startswith("##"))
    (joined,) = piece_ids(tokenizer, piece)
    assert pushed(Detokenizer(tokenizer), [joined]) == piece
    assert pushed(Detokenizer(tokenizer, prompt_tail_ids=[joined]), [joined]) == piece[2:]


def test_run_of_byte_pieces_is_pending_until_it_ends():
    tokenizer = toys.byte_fallback()
    detokenizer = Detokenizer(tokenizer, prompt_tail_ids=piece_ids(tokenizer, "▁"))
    newline, end = byte_pieces(tokenizer, b"\n")[0], piece_ids(tokenizer, "▁the")[0]
    assert (detokenizer.push(newline), detokenizer.pending) == ("", "\n")
    assert (detokenizer.push(end), detokenizer.pending) == ("\n the", "")
    assert (detokenizer.push(newline), detokenizer.pending) == ("", "\n")
    bad = byte_pieces(tokenizer, b"\xff")[0]
    assert (detokenizer.push(bad), detokenizer.pending) == (REPLACEMENT * 2, "")
    assert detokenizer.push(newline) == REPLACEMENT  # one invalid byte invalidates the whole run


def test_ids_outside_the_vocabulary_have_no_text(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(i) for i in (100_000, 2**31)] == ["", ""]
    assert detokenizer.flush() == ""
    assert tokenizer.decode([100_000]) == ""


@settings(max_examples=300)
@given(st.lists(st.sampled_from([" ", "'", "n", "t", "s", ".", ",", "m", "x", " '", "n't", "ve"])))
def test_clean_up_equals_transformers(parts):
    text = "".join(parts)
    assert clean_up(text) == toys.word_piece().hf.clean_up_tokenization(text)


def test_clean_up_is_skipped_for_bpe_even_if_configured(monkeypatch):
    hf = toys.byte_level().hf
    monkeypatch.setattr(hf, "clean_up_tokenization_spaces", True)
    tokenizer = Tokenizer(hf)
    ids = tokenizer.encode("a . b")
    assert pushed(Detokenizer(tokenizer), ids) == hf.decode(ids, True) == "a . b"


@settings(max_examples=100)
@given(text=texts)
def test_incremental_text_of_a_python_tokenizer_equals_decoded_text(text):
    tokenizer = toys.in_python()
    ids = [*tokenizer.encode(text), 300, 5000]
    assert pushed(Detokenizer(tokenizer), ids) == tokenizer.hf.decode(ids[:-1], True)


@settings(max_examples=100)
@given(data=st.binary(max_size=40))
def test_incremental_bytes_of_a_python_tokenizer_equal_decoded_text(data):
    tokenizer = toys.in_python()
    ids = [byte + 3 for byte in data]
    assert pushed(Detokenizer(tokenizer), ids) == tokenizer.hf.decode(ids, True)


@pytest.mark.parametrize("junk", [b"\xff", b"\x80", b"\xf0\x9f", b"a", b" "])
@pytest.mark.parametrize("kind", [toys.in_python, toys.byte_fallback, toys.word_piece])
def test_detokenization_work_per_token_is_bounded(kind, junk, monkeypatch):
    tokenizer = kind()
    if kind is toys.in_python:
        ids = [byte + 3 for byte in junk] * 50
    elif kind is toys.byte_fallback:
        ids = byte_pieces(tokenizer, junk * 50)
    else:
        ids = piece_ids(tokenizer, "n", " '") * 50
    lengths = []
    plain = tokenizer.decode_plain
    monkeypatch.setattr(
        tokenizer, "decode_plain", lambda ids: lengths.append(len(ids)) or plain(ids)
    )
    pushed(Detokenizer(tokenizer), ids)
    assert max(lengths, default=0) <= 20


# -- the tokenizer -----------------------------------------------------------------------------------


def test_encode_adds_bos_only_if_the_tokenizer_does():
    from tokenizers import processors

    plain = toys.metaspace()
    backend = type(plain.hf.backend_tokenizer).from_str(plain.hf.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    hf = type(plain.hf)(tokenizer_object=backend, **toys.MARKS)
    assert Tokenizer(hf).encode("the fox") == [1, *plain.encode("the fox")]
    assert tuple(plain.encode("the")) in Tokenizer(hf).encode_fragment("the")
    assert Tokenizer(hf).encode("") == [1]


def test_fragment_is_encoded_with_and_without_a_leading_space():
    tokenizer = toys.byte_level()
    spellings = tokenizer.encode_fragment("fox")
    assert [tokenizer.decode(ids) for ids in spellings] == ["fox", " fox"]
    assert tokenizer.encode_fragment(" fox") == spellings
    for tokenizer in (toys.metaspace(), toys.byte_fallback()):  # they add a space before a text
        for spelling in tokenizer.encode_fragment("."):
            assert tokenizer.decode([*tokenizer.encode("fox"), *spelling]) in ("fox.", "fox .")
        assert len(tokenizer.encode_fragment(".")) == 2
    with pytest.raises(InvalidRequest, match="no tokens"):
        toys.suffixed().encode_fragment("\t")


def test_prompts_longer_than_the_tokenizers_limit_are_not_truncated(monkeypatch, caplog):
    hf = toys.byte_level().hf
    monkeypatch.setattr(hf, "model_max_length", 3)
    with caplog.at_level(logging.WARNING):
        assert len(Tokenizer(hf).encode("日本語 日本語")) > 3
    assert not caplog.records


def test_special_ids_and_vocabulary_size():
    tokenizer = toys.byte_level()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.special_ids == {0, 1, 2, *piece_ids(tokenizer, "<tool>")}
    assert tokenizer.vocab_size == len(tokenizer.hf)
    assert tokenizer.piece(tokenizer.vocab_size) is None


def test_open_loads_a_saved_tokenizer(tmp_path):
    toys.word_piece().hf.save_pretrained(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    ids = tokenizer.encode("don't stop, fox.")
    assert ids == toys.word_piece().encode("don't stop, fox.")
    assert tokenizer.decode(ids) == toys.word_piece().decode(ids)


def test_folder_without_a_tokenizer_is_rejected(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer.*\(nothing\)"):
        Tokenizer.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json.*\(config\.json\)"):
        Tokenizer.open(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{ broken")
    with pytest.raises(ModelError, match="no tokenizer from"):
        Tokenizer.open(tmp_path)


def test_objects_that_are_not_tokenizers_and_non_text_are_rejected():
    with pytest.raises(ModelError, match="SimpleNamespace"):
        Tokenizer(SimpleNamespace())
    with pytest.raises(ModelError, match="PreTrainedTokenizerFast"):
        Tokenizer(toys.byte_level().hf.backend_tokenizer)
    with pytest.raises(InvalidRequest, match="int"):
        toys.byte_level().encode(5)


# -- chat --------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% if think is defined %}[{{ think }}]{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def chatty(monkeypatch):
    hf = toys.byte_level().hf
    monkeypatch.setattr(hf, "chat_template", TEMPLATE)
    return Tokenizer(hf)


def test_chat_renders_the_template_with_one_bos(chatty):
    ids = render_chat(chatty, HI)
    assert chatty.decode(ids, skip_special_tokens=False) == "<s>user: hi</s>assistant: "
    assert ids.count(chatty.bos_id) == 1
    ids = render_chat(chatty, HI, add_generation_prompt=False)
    assert chatty.decode(ids, skip_special_tokens=False) == "<s>user: hi</s>"


def test_template_variables_are_used_or_rejected(chatty):
    ids = render_chat(chatty, HI, think="no")
    assert chatty.decode(ids) == "[no]user: hiassistant: "
    with pytest.raises(NotSupported, match="thinking= would have no effect"):
        render_chat(chatty, HI, thinking=False)
    with pytest.raises(NotSupported, match="tools= would have no effect"):
        render_chat(chatty, HI, tools=[])
    with pytest.raises(NotSupported, match="tokenize="):
        render_chat(chatty, HI, tokenize=False)


def test_named_templates_without_a_default_are_rejected(chatty, monkeypatch):
    monkeypatch.setattr(chatty.hf, "chat_template", {"tool_use": TEMPLATE})
    with pytest.raises(NotSupported, match="no chat template"):
        render_chat(chatty, HI)


def test_final_assistant_message_can_be_continued(chatty):
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    ids = render_chat(chatty, messages, add_generation_prompt=False, continue_final_message=True)
    assert chatty.decode(ids).endswith("assistant: Well,")
    with pytest.raises(InvalidRequest, match="refuses"):
        render_chat(chatty, messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ("hi", "messages is a str"),
        (
            [{"role": "user", "content": "a\udcff"}],
            r'messages\[0\]\["content"\] is not Unicode: half a',
        ),
        (HI[0], "messages is a dict"),
        (None, "messages is a NoneType"),
        (["hi"], r"messages\[0\] is a str"),
        ([*HI, {"role": "user"}], r'messages\[1\] has no "content"'),
        ([{"content": "hi"}], r'messages\[0\] has no "role"'),
        ([{"role": "user", "content": ["hi"]}], r'messages\[0\]\["content"\] is a list'),
        ([{"role": None, "content": "hi"}], r'messages\[0\]\["role"\] is a NoneType'),
        ([{"role": "system", "content": "hi"}], "no system role"),
    ],
)
def test_invalid_messages_are_rejected_with_the_reason(chatty, messages, message):
    with pytest.raises(InvalidRequest, match=message):
        render_chat(chatty, messages)


def test_tokenizer_without_a_chat_template_is_rejected():
    with pytest.raises(NotSupported, match="no chat template"):
        render_chat(toys.byte_level(), HI)
    assert render_chat(toys.byte_level(), HI, chat_template=TEMPLATE)


PARTS = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ p['text'] }}{% endfor %};{% endfor %}"
)


def test_template_that_reads_only_content_parts_gets_parts(chatty):
    """As Llava's template, which renders nothing if the content is a string."""
    messages = [*HI, {"role": "assistant", "content": " well "}]
    ids = render_chat(chatty, messages, chat_template=PARTS)
    assert chatty.decode(ids) == "user: hi;assistant:  well ;"
    both = PARTS.replace(
        "{% for p", "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p"
    )
    ids = render_chat(chatty, messages, chat_template=both.replace(";{%", "{% endif %};{%"))
    assert chatty.decode(ids) == "user: hi;assistant:  well ;"


def test_template_that_searches_message_content_gets_a_string(chatty):
    """The template drops the thinking, so some text is missing; a list of parts would be printed."""
    template = (
        "{% for m in messages %}{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    messages = [*HI, {"role": "assistant", "content": "<think>ok</think>hello"}]
    assert chatty.decode(render_chat(chatty, messages, chat_template=template)) == "hi;hello;"


def test_non_text_content_parts_are_rejected(chatty):
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(NotSupported, match=r'\[0\]\["content"\] has a part of type .image_url'):
        render_chat(chatty, [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}])


COSTLY = {
    "product": "{{ 'a' * 10**9 }}",
    "product of lists": "{{ [0] * 10**9 }}",
    "power": "{{ 10 ** (10**8) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "long loop": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "doubled": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "nested": "{% set n = namespace(x=0) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "padded": "{{ 'a'.center(10**9) }}",
    "filtered": "{{ 'a'|center(10**9) }}",
    "mapped": "{{ ['a']|map('center', 10**9)|list }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "computed width": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "replaced": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "joined": "{{ range(99999)|join('b' * 99999) }}",
    "indented": "{{ [1, 2]|tojson(indent=10**9) }}",
}
COSTLY["nested"] += "{{ n.x }}"


@pytest.mark.parametrize("kind", COSTLY)
def test_too_costly_template_is_rejected(chatty, kind):
    with pytest.raises(InvalidRequest, match=r"than 4000000 oper|computed widths|at most 64"):
        render_chat(chatty, HI, chat_template=COSTLY[kind])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ 2.0 ** 10000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
        "{% if %}",
        "{% include 'x' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 5 + 'a' }}",
    ],
)
def test_any_template_failure_raises_invalid_request(chatty, template):
    with pytest.raises(InvalidRequest, match="chat template"):
        render_chat(chatty, HI, chat_template=template)


LIKE_A_MODELS = """
{%- macro call(c) -%}{{ '<call>' ~ c.name ~ c.arguments|tojson }}{%- endmacro -%}
{%- set ns = namespace(last=messages|length - 1, seen=[]) -%}
{%- if tools %}{% for t in tools %}{{ t|tojson(indent=2) }}{% endfor %}{% endif -%}
{%- for m in messages[::-1] %}{% set ns.seen = ns.seen + [m.role] %}{% endfor -%}
{%- for m in messages -%}
    {%- if loop.first and m['role'] not in ('user', 'system') %}{{ raise_exception('bad') }}{% endif -%}
    {%- if '</think>' in m.content %}{% set c = m.content.split('</think>')[-1].lstrip() %}
    {%- else %}{% set c = m.content|trim|replace('<b>', '') %}{% endif -%}
    {{- '<|' + m.role + '|>' + c ~ '%s-%d' % (m.role, loop.index) ~ '{}'.format(loop.length) -}}
    {%- for c in m.calls or [] %}{{ call(c) }}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor -%}
    {%- if not loop.last and messages[loop.index0 + 1].role == m.role %}again{% endif -%}
{%- endfor -%}
{{ ns.seen|join(', ') }}{{ messages|map(attribute='role')|unique|list }}{{ {'a': 1}.items()|list }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 'ab'|indent(4, first=True) }}
{% generation %}{{ bos_token }}{% endgeneration %}{{ nothing }}{{ 7 // 2 ** 1 % 3 - 1 * 5 }}{{ 'x' * 3 }}
"""


@pytest.mark.parametrize("template", [TEMPLATE, LIKE_A_MODELS])
@pytest.mark.parametrize("number", [1, 50])
def test_templates_render_the_same_tokens_as_transformers(chatty, template, number):
    calls = [
        {"name": f"f{i}", "arguments": {"x": [i, 1234567890123, {"y": "é"}]}} for i in range(3)
    ]
    messages = [
        *HI,
        {"role": "assistant", "content": "<think>no</think> yes, <b>"},
        {"role": "assistant", "content": "  it is ", "calls": calls},
    ] * number
    more = (
        {"tools": [{"name": "f", "parameters": {"a": {"b": [1]}}}]} if "tools" in template else {}
    )
    given = dict(chat_template=template, add_generation_prompt=True, **more)
    theirs = chatty.hf.apply_chat_template(messages, return_dict=False, **given)
    assert render_chat(chatty, messages, **given) == list(theirs)


def test_template_limits_do_not_apply_to_transformers_own_rendering(chatty):
    render_chat(chatty, HI)
    template = COSTLY["long loop"].replace("99999", "1999")
    with pytest.raises(InvalidRequest, match="operations"):
        render_chat(chatty, HI, chat_template=template)
    text = chatty.hf.apply_chat_template(HI, chat_template=template, tokenize=False)
    assert len(text) == 1999 * 9999


def test_tokenizer_panic_raises_invalid_request():
    hf = toys.byte_level.__wrapped__().hf  # not the cached one
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(InvalidRequest, match="the tokenizer fails on this text"):
        Tokenizer(hf).encode("a" * 40 + "b")
    with pytest.raises(InvalidRequest, match="chat template"):
        render_chat(Tokenizer(hf), HI, chat_template="a" * 40 + "b")
