"""A byte tokenizer, and chat templates with tool calls."""

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
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }} [TOOL_CALLS] [...]\n{% endif %}"
    + MESSAGES
)
MISTRAL_ARGS = (
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }} [TOOL_CALLS]f[ARGS]{}\n{% endif %}"
    + MESSAGES
)
DEEPSEEK = (
    "{% if tools %}<｜tool▁calls▁begin｜> ```json {{ tools | tojson }}\n{% endif %}" + MESSAGES
)
KIMI = "{% if tools %}<|tool_calls_section_begin|> {{ tools | tojson }}\n{% endif %}" + MESSAGES
QWEN_CODER = (
    "{% if tools %}Call <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n"
    "</function>\n</tool_call> of {{ tools | tojson }}\n{% endif %}" + MESSAGES
)
GLM = (
    "{% if tools %}<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n"
    "</tool_call> {{ tools | tojson }}\n{% endif %}" + MESSAGES
)
GLM_47 = GLM.replace("\n<arg", "<arg").replace("\n</tool", "</tool")
HARMONY = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{%- for m in messages -%}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|message|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PYTHONIC = "{% if tools %}[name(key=value)] {{ tools | tojson }}\n{% endif %}" + MESSAGES
_DEEPSEEK_MARKS = "tool▁calls▁begin tool▁call▁begin tool▁sep tool▁call▁end tool▁calls▁end".split()
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
MARKS += tuple(f"<｜{mark}｜>" for mark in _DEEPSEEK_MARKS)
MARKS += ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_CHANNEL_MARKS = "start channel constrain message end call return".split()
_KIMI_MARKS = (
    "tool_calls_section_begin tool_call_begin tool_call_argument_begin tool_call_end".split()
)
FAMILIES = {
    KIMI: tuple(f"<|{mark}|>" for mark in [*_KIMI_MARKS, "tool_calls_section_end"]),
    HARMONY: tuple(f"<|{mark}|>" for mark in _CHANNEL_MARKS),
}
THINKING = MESSAGES.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
).replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def tokenizer(template: str, *, added: bool, special: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with a chat template; `added`: the template's markers are tokens too."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(["<s>", "</s>", *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    if added:
        add = backend.add_special_tokens if special else backend.add_tokens
        marks = FAMILIES.get(template, [mark for mark in MARKS if mark in template])
        add([AddedToken(mark) for mark in marks])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    hf.chat_template = template
    return hf
