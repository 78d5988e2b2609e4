"""Tensors of a checkpoint that a model does not use: an error, unless they are of parts that are left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from verbatim.errors import InvalidRequest, ModelError

UNUSED_WEIGHTS = ("error", "ignore")
QWENS_NUMBER = "mtp_num_hidden_layers"  # Qwen3.5's name; the layers have full attention
# Parts of a model of images or sound, of which only the language model is opened.
_OTHER_PARTS = r"(^|[._])(vision|visual|audio|image|speech|mm|multi_?modal|patch)\w*\."


def check_unused_weights(value: Any) -> str:
    """Return the option `unused_weights`.

    Raises:
        InvalidRequest: it is another value than those allowed.
    """
    if value not in UNUSED_WEIGHTS:
        raise InvalidRequest(f"unused_weights={value!r}: must be one of {UNUSED_WEIGHTS}")
    return str(value)


def refuse_unused(source: object, module: Any, wrapper: Any, names: Iterable[Any]) -> None:
    """Refuse a checkpoint with tensors that nothing uses, as its config may be that of another model.

    Args:
        names: of the tensors, but for those that transformers' class of the module lists as ignorable.
        wrapper: the config of the checkpoint; of more than the module, if it has images or sound, too.

    Raises:
        ModelError: there are some that are neither MTP layers nor parts of another modality.
    """
    patterns = list(mtp_names(module.config))
    if type(wrapper) is not type(module.config):
        patterns.append(_OTHER_PARTS)
    known = [re.compile(pattern) for pattern in patterns]
    unused = sorted(n for n in map(str, names) if not any(p.search(n) for p in known))
    if unused:
        raise ModelError(
            f"{source}: {len(unused)} tensors are not used by the model of its config, such as {unused[0]}; "
            "if that is right, pass unused_weights='ignore'"
        )


def mtp_names(config: Any) -> tuple[str, ...]:
    """Return patterns of the names of MTP layers in a checkpoint.

    They are numbered after the model's own layers, or are below `mtp`, as Qwen's.
    """
    config = config.get_text_config(decoder=True)
    number = mtp_number(config)
    if type(number) is not int or number < 0:
        return ()
    first = config.num_hidden_layers
    return (r"^mtp\.", *(rf"(^|\.)layers\.{n}\." for n in range(first, first + number)))


def mtp_number(config: Any) -> Any:
    """Return the number of MTP layers as a text config says it."""
    return getattr(config, "num_mtp_layers", getattr(config, QWENS_NUMBER, None))
