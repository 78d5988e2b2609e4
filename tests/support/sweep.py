"""Every architecture that transformers lists as a causal language model: its toy, and whether it opens.

An architecture is supported when its class is in `verbatim.model.trial.VERIFIED` and its name is not below.
`python tests/support/sweep.py` prints docs/architectures.md.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from support import toys, wrappers
from support.sweep_settings import DEFAULT, SETTINGS, SMALL, VARIANTS

_MADE_WITH = 24  # the minor version of transformers 5 that these lists describe

# Refused architectures: a part of the error message, the reason in the docs, and the names.
_REFUSALS: list[tuple[str, str, str]] = [
    ("exists only as a mask", "a custom attention mask", "doge"),
    ("sliding window", "a window that exists only as a mask", "phimoe:window"),
    ("attention interface", "a custom attention", "big_bird cpmant git reformer xlm"),
    ("torch.einsum", "a custom attention, by einsum", "prophetnet xlnet"),
    (
        "later tokens",
        "attention to later tokens",
        "bert:encoder bigbird_pegasus gemma3_text:bidirectional megatron-bert:encoder roformer:encoder",
    ),
    ("codebook", "generates several codebooks at once", "musicgen musicgen_melody"),
    ("patches", "attention to patches of bytes", "blt"),
    (
        "main model",
        "a draft head on another model's hidden states",
        "gemma4_assistant gemma4_unified_assistant",
    ),
]
REFUSED = {name: phrase for phrase, _, listed in _REFUSALS for name in listed.split()}
# Refused with older versions of transformers, which build no causal masks for these.
OLDER = dict.fromkeys(
    ("megatron-bert", "moshi", "rembert", "roformer", "roformer:values"), "later tokens"
)
UNBUILDABLE = {
    "gemma3n": "needs pillow and timm for its vision tower; its text model, gemma3n_text, is supported"
}


def names() -> dict[str, str]:
    """Return transformers' table of causal language models: the class of each name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def refusal(case: str) -> str | None:
    """Return a part of the message with which a case must be refused; None if it must open."""
    import transformers

    minor = int(transformers.__version__.split(".")[1])
    return REFUSED.get(case) or (OLDER.get(case) if minor < _MADE_WITH else None)


def cases() -> list[str]:
    """Return all names and the variants of architectures in the installed transformers."""
    known = names()
    return [*known, *(case for case in VARIANTS if case.partition(":")[0] in known)]


def supported() -> list[str]:
    """Return the cases that must open."""
    return [case for case in cases() if not refusal(case) and case not in UNBUILDABLE]


def settings_of(case: str) -> tuple[Any, dict[str, Any]]:
    """Return the config class of an architecture or a variant, and its toy's settings."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = case.partition(":")[0]
    cls = getattr(transformers, names()[name]).config_class or CONFIG_MAPPING[name]
    fields = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    settings = {key: value for key, value in SMALL.items() if key in fields}
    bare = name.removesuffix("_text")
    own = SETTINGS.get(name) or SETTINGS.get(f"{name}_text") or SETTINGS.get(bare) or {}
    settings |= copy.deepcopy(own) | copy.deepcopy(VARIANTS.get(case, {}))
    return cls, {key: value for key, value in settings.items() if value != DEFAULT}


def config_of(case: str) -> Any:
    """Return the toy config of an architecture or a variant."""
    cls, settings = settings_of(case)
    return cls(**settings)


def build(case: str) -> Any:
    """Return the toy of an architecture or a variant, with eager attention, in eval mode."""
    import transformers

    config = config_of(case)
    if case != "falcon:alibi":  # in eager attention transformers adds Falcon's ALiBi twice
        config._attn_implementation = "eager"
    if case == "gemma4_assistant":  # its config requires a value that its layers reject
        config.text_config.num_kv_shared_layers = 2
    cls = getattr(transformers, names()[case.partition(":")[0]])
    model = toys.build(cls, config)
    noise = torch.Generator().manual_seed(1)
    for weight in (p for m in model.modules() if hasattr(m, "top_k") for p in m.parameters()):
        if weight.ndim == 2 and len(weight) > 1 and not weight.any():
            # An all-zero router gives all experts equal scores, and topk breaks ties arbitrarily.
            torch.nn.init.normal_(weight, std=0.12, generator=noise)
    return model


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Cast a model, except weights that transformers keeps in float32 when it loads one."""
    kept = model._keep_in_fp32_modules_strict or ()
    exact = [p for n, p in model.named_parameters() if any(part in n for part in kept)]
    model.to(dtype)
    for parameter in exact:
        parameter.data = parameter.data.float()
    return model


def markdown() -> str:
    """Return docs/architectures.md for the installed transformers."""
    from verbatim.model.trial import VERIFIED

    known = names()
    supported = [n for n in known if n not in REFUSED and n not in UNBUILDABLE]
    assert {known[n] for n in supported} <= VERIFIED
    lines = [
        "# Architectures",
        "",
        "The architectures that transformers lists as causal language models, by `model_type`. Supported",
        "means tested with a toy model with random weights: on a packed batch its logits equal those of",
        "transformers' eager forward of each sequence alone, to 1e-5 (1e-4 with recurrent layers), and its",
        "bits are the same in chunks, alone and batched. `tests/oracle/test_sweep.py` checks this page.",
        "",
        "A class that is not listed is compared with its own forward when it is opened, and rejected if they",
        "differ. So is a listed class whose config needs an unsupported feature.",
        "",
        f"## Supported ({len(supported)})",
        "",
        ", ".join(f"`{name}`" for name in sorted(supported)),
        "",
        "## Refused",
        "",
        "| why | architectures |",
        "| --- | --- |",
    ]
    for _, why, listed in _REFUSALS:
        found = [f"`{name}`" for name in listed.split() if name in known]
        if found:
            lines.append(f"| {why} | {', '.join(found)} |")
    lines += ["", "## Not tried", ""]
    lines += [f"- `{name}`: {why}" for name, why in UNBUILDABLE.items()]
    lines += [
        "",
        f"## Models of images and sound, for text ({len(wrappers.SUPPORTED)})",
        "",
        "These are held to the same rules, live and from a folder, by `tests/oracle/test_wrappers.py`.",
        "Others are compared with their own forward when they are opened. Images and sounds are rejected.",
        "",
        ", ".join(f"`{name}`" for name in wrappers.SUPPORTED),
        "",
        "Refused: "
        + ", ".join(f"`{name}` ({why})" for name, (_, why) in wrappers.REFUSED.items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
