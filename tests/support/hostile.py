"""A request body for each route that takes one, and copies of them to insert hostile values into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MESSAGES = [{"role": "user", "content": "Hi"}]
SHORT = {"max_tokens": 2}
TOOL = {"name": "f", "parameters": {"type": "object"}}
MARK = "\ue000"  # placeholder of a hostile value
# Each is served, or refused because of a setting of this server.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": [1], "stop": ["e"], "stop_token_ids": [1, [2]], "logit_bias": {"5": 1}},
        {"prompt": ["x"], "stop": ["e"], "bad_words": ["q", [1]], "choice": ["a"]},
        {"prompt": "x", "stop": "e", "json_schema": {"const": 1, "pattern": "a"}},
    ],
    "/v1/chat/completions": [
        {"messages": MESSAGES, "stop": ["e"], "allowed_token_ids": [1, 2, 3]},
        {"messages": [*MESSAGES, {"role": "tool", "content": "x", "tool_call_id": "y"}]} | SHORT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]} | SHORT,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}]},
        {"messages": MESSAGES, "chat_template_kwargs": {"x": 1}},
    ],
    "/v1/responses": [
        {"input": "Hi", "stop": ["e"], "bad_words": [[1, 2]], "metadata": {"a": "b"}},
        {"input": MESSAGES, "instructions": "x", "max_output_tokens": 2},
    ],
    "/v1/messages": [{"messages": MESSAGES, "max_tokens": 2, "system": "x"}],
    "/v1/messages/count_tokens": [{"messages": MESSAGES}],
    "/v1/generate": [
        {"prompt": [1], "params": {"max_tokens": 2, "top_k": 1, "seed": 1, "n": 1, "stop": ["e"]}},
        {"prompt": "x", "params": {"max_tokens": 2, "replay_routing": 1, "json_schema": {}}},
    ],
    "/v1/logprobs": [{"prompts": [[1, 2]]}, {"prompts": ["x"]}],
    "/tokenize": [{"text": "x", "return_tokens": True}, {"messages": MESSAGES}],
    "/detokenize": [{"ids": [1]}],
    "/v1/load_lora_adapter": [{"lora_name": "x", "lora_path": "x"}],
    "/v1/unload_lora_adapter": [{"lora_name": "x"}],
    "/start_weight_update": [{"is_checkpoint_format": True}],
    "/finish_weight_update": [{"version": 1, "update": "x"}],
}


def marked(value: Any) -> Iterator[Any]:
    """Yield copies of a body with each part in turn replaced by the mark, and with the mark as a new key."""
    inner = value.items() if isinstance(value, dict) else []
    for key, part in enumerate(value) if isinstance(value, list) else inner:
        for changed in (MARK, *marked(part)):
            copy = value.copy()
            copy[key] = changed
            yield copy
    if isinstance(value, dict):
        yield value | {MARK: 1}
