"""Inspection of a model, and a trial run for classes that are not in the list of verified ones.

Two short sequences go through the flat path, in one piece and in two, and must give what the model's
own forward gives for each of them alone; and bit for bit what the flat path gives for each alone. What the
inspection cannot see shows here: scores changed in ways of the model's own, positions that start
elsewhere, keyword arguments that mean something, a scale taken over all rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.kv.store import KVStore
from verbatim.model.adapters import has_indexers, runs_indexer
from verbatim.model.differential import differential_check, largest_error, tolerance
from verbatim.model.flat import FlatContext, noise_store, span_batch, trial_logits
from verbatim.model.patching import patched, quiet, replaced_forwards
from verbatim.model.recurrent_layers import has_supported_states
from verbatim.model.spec import ModelSpec, OwnModel, inner_model, inspect_once

_LENGTHS = (9, 6)
_CUT = (4, 1)
Spans = dict[int, tuple[int, int]]  # positions in a forward, by sequence
# Classes whose flat logits were compared with transformers' eager ones; these in front of ForCausalLM.
_CAUSAL = """
    Afmoe Apertus Apertus1p5Text Arcee AriaText AXK1 AXK2 BailingHybrid Bamba Bart Beam BioGpt BitNet
    Blenderbot BlenderbotSmall Bloom Camembert CodeGen Cohere Cohere2 Cohere2Moe CohereCompass Cwm
    Data2VecText Dbrx DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 DiffLlama Dory Dots1 Dots3Note Electra
    Emu3 Ernie Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba FlexOlmo Flint Fuyu
    Gemma Gemma2 Gemma3 Gemma3n Gemma4 Gemma4Unified Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GPTBigCode
    GPTJ GPTNeo GPTNeoX GPTNeoXJapanese GptOss Granite GraniteMoe GraniteMoeHybrid GraniteMoeShared
    GraniteMoeSWA GraniteSWA Helium HrmText HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX HYV3 HYV4 Jais2 Jamba
    JetMoe KimiLinear Kolibri1 Laguna LaraMini Lfm2 Lfm2Moe Lfm3 Llama Llama4 LongcatFlash Mamba Mamba2
    Marian MBart MegatronBert Mellum MiMoV2Flash MiniCPM3 MiniMax MiniMaxM2 MiniMaxM3VL Ministral
    Ministral3 Mistral Mixtral Mllama ModernBertDecoder Moshi Mpt Mvp NanoChat Nemotron NemotronH Olmo
    Olmo2 Olmo3 Olmoe OlmoHybrid OPT Pegasus Persimmon Phi Phi3 Phi4Multimodal Phimoe PLBart Qwen2
    Qwen2Moe Qwen3 Qwen3_5 Qwen3_5Moe Qwen3Moe Qwen3Next Qwen4Exp RecurrentGemma RemBert Roberta
    RobertaPreLayerNorm RoCBert RoFormer Rwkv SeedOss SmolLM3 SolarOpen StableLm Starcoder2 TrOCR
    VaultGemma Whisper XGLM XLMRoberta XLMRobertaXL xLSTM Xmod Youtu Zamba Zamba2 Zaya
"""
_OTHERS = """
    BertGenerationDecoder BertLMHeadModel CTRLLMHeadModel Gemma3ForConditionalGeneration
    Gemma4ForConditionalGeneration GotOcr2ForConditionalGeneration GPT2LMHeadModel
    MossTranscribeDiarizeForConditionalGeneration OpenAIGPTLMHeadModel Qwen4ExpForConditionalGeneration
"""
VERIFIED = frozenset(_OTHERS.split()) | {f"{name}ForCausalLM" for name in _CAUSAL.split()}

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

# Whose layers leave a verified model a verified model.
_KNOWN_SOURCES = (
    "torch.nn.modules.",
    "torch.nn.parallel.",
    "transformers.",
    "peft.",
    "verbatim.model.packed",
)


def inspect_model(module: nn.Module) -> ModelSpec:
    """Run one small forward of `module`, and return its spec.

    Raises:
        UnsupportedModel: the reason why it can't be run on flat batches.
    """
    inner = inner_model(module)
    try:
        reason = reason_to_refuse(inner)
        if reason is not None:
            raise UnsupportedModel(reason)
        spec = inspect_once(module, inner)
        if not (isinstance(inner, OwnModel) or is_verified(module, inner)):
            try_out(module, spec)
    except UnsupportedModel as reason:
        name = type(inner).__name__
        raise UnsupportedModel(
            f"{name} can't be run on flat batches: {reason}; verbatim.open_forward(module, max_length=...) "
            "runs any module that returns logits by its own forward, row by row"
        ) from reason.__cause__
    return spec


def try_out(module: nn.Module, spec: ModelSpec) -> None:
    """Compare the flat path with the model's own forward.

    Raises:
        UnsupportedModel: they differ.
    """
    device = next(module.parameters()).device
    high = max(2, min(spec.vocab_size, 1000) - 3)  # special ids stand at either end
    whole = [(torch.arange(n) * 37 + 5 * n) % high + 2 for n in _LENGTHS]
    rows = [dict(input_ids=ids[None].to(device), use_cache=False) for ids in whole]
    with quiet(), patched(module, [], hooks=False, attention="eager"):
        plain: list[Tensor] = [module(**row).logits[0] for row in rows]
    scale = max(float(logits.abs().max()) for logits in plain)
    if not math.isfinite(scale):  # a matter of weights
        return

    forwards = replaced_forwards(module)

    def memory() -> KVStore:
        return noise_store(spec.layers, spec.states, spec.dtype, device)

    def flat(store: KVStore, spans: Spans) -> dict[int, Tensor]:
        """Return the logits of each sequence, in one flat forward."""
        ids = torch.cat([whole[s][slice(*at)] for s, at in spans.items()])
        context = FlatContext(spec.slots, span_batch(spans, ids), store)
        logits = trial_logits(module, spec, forwards, context)
        lengths = [stop - start for start, stop in spans.values()]
        return dict(zip(spans, logits.split(lengths), strict=True))

    every: Spans = {s: (0, length) for s, length in enumerate(_LENGTHS)}
    cut: Spans = {s: (0, length) for s, length in enumerate(_CUT)}
    rest: Spans = {s: (cut[s][1], every[s][1]) for s in every}
    together, in_two = flat(memory(), every), memory()
    first, second = flat(in_two, cut), flat(in_two, rest)

    def otherwise(s: int) -> list[Tensor]:
        """Return the logits of one sequence alone, and in two pieces."""
        alone = flat(memory(), {s: every[s]})[s]
        return [alone, torch.cat([first[s], second[s]])]

    if differential_check(otherwise, lambda s: [together[s]] * 2, every):
        raise UnsupportedModel("in a trial its logits changed with the rows beside them")
    found = differential_check(
        lambda s: [together[s]],
        lambda s: [plain[s]],
        every,
        lambda ours, theirs: largest_error(ours, theirs) <= tolerance(ours, scale),
    )
    if found is not None:
        raise UnsupportedModel(
            "in a trial its logits on a flat batch were off by "
            f"{largest_error(found.ours, found.theirs):.2g} (largest logit: {scale:.2g}) from its own forward"
        )


def is_verified(module: Any, inner: Any) -> bool:
    """Return whether `inner` is of a listed class of transformers, with none of its layers replaced."""
    cls = type(inner)
    return (
        cls.__module__.startswith("transformers.models.")
        and cls.__name__ in VERIFIED
        and all(type(layer).__module__.startswith(_KNOWN_SOURCES) for layer in module.modules())
    )


def reason_to_refuse(inner: Any) -> str | None:
    """Return why the config or a part of the transformers model `inner` can't run on flat batches, or None.

    Only what inspection would not find, or not the reason of; unknown architectures are judged by behaviour.
    """
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
