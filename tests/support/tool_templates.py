"""A tokenizer of bytes, and chat templates with tool calls."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

MESSAGES = """{%- for m in messages -%}<s>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""
HERMES = (
    '{% if tools %}Call <tool_call>\n{"name": "...", "arguments": {}}\n</tool_call> of '
    "{{ tools | tojson }}\n{% endif %}" + MESSAGES
)
BARE = (
    '{% if tools %}Answer {"name": "...", "parameters": {}} of {{ tools | tojson }}\n{% endif %}'
    + MESSAGES
)
MARKS = ("<tool_call>", "</tool_call>")


def tokenizer(template: str, *, added: bool, special: bool = False) -> PreTrainedTokenizerFast:
    """Every byte a token, and some words; the marks too, or not."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(["<s>", "</s>", *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    if added:
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(mark) for mark in MARKS])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    hf.chat_template = template
    return hf
