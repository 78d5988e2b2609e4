"""Renders chat messages to prompt ids with the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.text.tokenizer import Tokenizer, check_unicode, failures_as

# Arguments of `apply_chat_template` that would change its return type or the length of the prompt.
_RESERVED = {
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
}
# Matches templates with a loop over the parts of a message; those of image models may ignore strings.
_READS_PARTS = re.compile(r"\bfor \w+ in \w+(\.content|\[['\"]content['\"]\])")
# Arguments that have an effect although the template does not name them.
_UNNAMED = {"chat_template", "continue_final_message", "sanitize_control_tokens"}


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> list[int]:
    """Render the prompt of a conversation.

    Only the template adds special tokens, such as BOS. The cost of a template is bounded
    (`text/template.py`).

    Args:
        messages: dicts with "role" and "content", both strings; other keys are passed to the template.
        add_generation_prompt: whether to end with the header of the assistant's answer.
        template_kwargs: variables of the template, such as `enable_thinking` or `tools`, and transformers'
            arguments `continue_final_message`, `chat_template`, `sanitize_control_tokens`.

    Raises:
        InvalidRequest: invalid messages, or messages that the template refuses or fails on.
        NotSupported: a tokenizer without a template, or a variable that its template doesn't use.
    """
    _check(messages)
    hf = tokenizer.hf
    if not (template_kwargs.get("chat_template") or getattr(hf, "chat_template", None)):
        raise NotSupported(
            f"the tokenizer ({type(hf).__name__}) has no chat template; "
            "give the prompt as a string or as ids, or pass chat_template="
        )
    with failures_as(NotSupported, "no chat template of the tokenizer fits this conversation"):
        template = hf.get_chat_template(
            template_kwargs.get("chat_template"), template_kwargs.get("tools")
        )
    for name in template_kwargs:
        if name in _RESERVED:
            raise NotSupported(f"{name}= is not a variable of a chat template; messages become ids")
        if name not in _UNNAMED and not re.search(rf"\b{re.escape(name)}\b", template):
            raise NotSupported(f"{name}= would have no effect: the chat template doesn't use it")

    # Imported here because the import takes seconds.
    from verbatim.text.template import bounded

    plain = [dict(message) for message in messages]

    def rendered(conversation: list[dict[str, Any]], *, tokenize: bool) -> Any:
        with failures_as(InvalidRequest, "the chat template refuses these messages"), bounded():
            return hf.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                return_dict=False,
                **template_kwargs,
            )

    def keeps_texts(conversation: list[dict[str, Any]]) -> bool:
        try:
            text = rendered(conversation, tokenize=False)
        except InvalidRequest:
            return False
        return all(message["content"].strip() in text for message in plain)

    if _READS_PARTS.search(template) and not keeps_texts(plain):
        parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in plain]
        plain = parts if keeps_texts(parts) else plain
    return list(rendered(plain, tokenize=True))


def _check(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages is a {type(messages).__name__}: must be a list of dicts")
    if not messages:
        raise InvalidRequest("messages is empty: at least one is needed")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"messages[{index}] is a {type(message).__name__}: "
                'must be a dict with "role" and "content"'
            )
        for key in ("role", "content"):
            if key not in message:
                raise InvalidRequest(f'messages[{index}] has no "{key}"')
            _check_parts(message[key], f'messages[{index}]["{key}"]')
            if not isinstance(message[key], str):
                raise InvalidRequest(
                    f'messages[{index}]["{key}"] is a {type(message[key]).__name__}: '
                    "must be a string"
                )
            check_unicode(message[key], f'messages[{index}]["{key}"]')


def _check_parts(content: Any, where: str) -> None:
    """Refuse parts of a message that are images or sounds, by their type."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in (None, "text"):
            raise NotSupported(f"{where} has a part of type {kind!r}: only text is supported")
