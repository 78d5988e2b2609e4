"""Models refused by their config or parts, as inspection would not find the problem or its reason.

Other models are refused by inspection and trial, so that unknown architectures are judged by behaviour.
"""

from __future__ import annotations

from typing import Any

from verbatim.model.adapters import has_indexers, runs_indexer
from verbatim.model.recurrent_layers import has_supported_states

# Substrings of layer types, and the reason to refuse them.
_STATE = "keep a recurrent state, which is not in K and V"
_INDEXER = "choose the keys they attend to by an indexer with keys of its own"
_KINDS = {
    "linear_attention": _STATE,
    "mamba": _STATE,
    "recurrent": _STATE,
    "hybrid": _STATE,
    "conv": "keep a convolution's state, which is not in K and V",
    "compressed": "attend to compressed keys",
    "indexed": _INDEXER,
    "sparse": _INDEXER,
}
_RECURRENT = frozenset({"linear_attention", "mamba", "recurrent", "hybrid", "conv", "compressed"})
_WITHOUT_STATE = frozenset({"full_attention", "sliding_attention", "attention", "mlp", "moe"})

_CODEBOOKS = "every position holds an id of each codebook, not one id"
_ASSISTANT = "it drafts from hidden states and keys of its main model, which a batch of ids has not"
_CLASSES = {
    "BltForCausalLM": "it attends to patches of bytes, not to positions",
    "Gemma4AssistantForCausalLM": _ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": _ASSISTANT,
    "MusicgenForCausalLM": _CODEBOOKS,
    "MusicgenMelodyForCausalLM": _CODEBOOKS,
}


def reason_to_refuse(inner: Any) -> str | None:
    """Return why the transformers model `inner` can't run on flat batches, or None."""
    config = inner.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; only causal models are run"
    known = _CLASSES.get(type(inner).__name__)
    if known is not None:
        return known
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    run_here = has_supported_states(inner)
    indexed = has_indexers(inner)
    for part, what in _KINDS.items():
        for kind in kinds:
            supported = run_here if part in _RECURRENT else indexed and what is _INDEXER
            if part in kind and not supported:
                return f"its {kind} layers {what}"
    stateless = kinds and _WITHOUT_STATE.issuperset(kinds)
    if getattr(inner, "_is_stateful", False) and not (run_here or stateless):
        return "it keeps a recurrent state, which is not in K and V"
    for layer in inner.modules():
        if type(layer).__name__.endswith("Indexer") and not runs_indexer(layer):
            return (
                f"its attention chooses keys by {type(layer).__name__}, which has keys of its own"
            )
    return None
