"""Refuses checkpoints with tensors that the model does not use, except those of skipped parts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from verbatim.errors import InvalidRequest, ModelError

UNUSED_WEIGHTS = ("error", "ignore")
QWEN_NUM_LAYERS = "mtp_num_hidden_layers"  # Qwen3.5's config field; the layers have full attention
# Names of the parts of a multimodal model other than the language model.
_OTHER_PARTS = r"(^|[._])(vision|visual|audio|image|speech|mm|multi_?modal|patch)\w*\."
_SPEECH = r"^(talker|token2wav|code2wav)\."  # the parts of Qwen's Omni models that speak
# The logit of masked positions, in old GPT-2 and GPT-Neo checkpoints.
_OLD_CONSTANT = r"(^|\.)masked_bias$"


def check_unused_weights(value: Any) -> str:
    """Return the option `unused_weights`; raise InvalidRequest if it is not allowed."""
    if value not in UNUSED_WEIGHTS:
        raise InvalidRequest(f"unused_weights={value!r}: must be one of {UNUSED_WEIGHTS}")
    return str(value)


def refuse_unused(source: object, module: Any, wrapper: Any, names: Iterable[Any]) -> None:
    """Refuse a checkpoint with unused tensors, as its config may be that of another model.

    Args:
        names: names of the unused tensors, except those that the module's class ignores.
        wrapper: the checkpoint's config; for a multimodal model it differs from the module's.

    Raises:
        ModelError: a tensor belongs neither to MTP layers nor to another modality, nor is it a buffer, such
            as a mask, that old checkpoints contain and the module computes.
    """
    patterns = [*mtp_names(module.config), _OLD_CONSTANT]
    if type(wrapper) is not type(module.config):
        patterns.append(_OTHER_PARTS)
    if "Thinker" in type(module).__name__:
        patterns.append(_SPEECH)
    known = [re.compile(pattern) for pattern in patterns]
    buffers = {name for name, _ in module.named_buffers()}
    prefix = f"{module.base_model_prefix}."  # many checkpoints leave it out
    unused = sorted(
        name
        for name in map(str, names)
        if buffers.isdisjoint({name, prefix + name}) and not any(p.search(name) for p in known)
    )
    if unused:
        raise ModelError(
            f"{source}: {len(unused)} tensors are not used by the model of its config, such as {unused[0]}; "
            "if that is right, pass unused_weights='ignore'"
        )


def mtp_names(config: Any) -> tuple[str, ...]:
    """Return patterns for the names of MTP layers in a checkpoint.

    These layers are numbered after the model's own, or have the prefix `mtp`, as in Qwen.
    """
    config = config.get_text_config(decoder=True)
    number = mtp_number(config)
    if type(number) is not int or number < 0:
        return ()
    first = config.num_hidden_layers
    return (r"^mtp\.", *(rf"(^|\.)layers\.{n}\." for n in range(first, first + number)))


def mtp_number(config: Any) -> Any:
    """Return the number of MTP layers in a text config, unvalidated."""
    return getattr(config, "num_mtp_layers", getattr(config, QWEN_NUM_LAYERS, None))
