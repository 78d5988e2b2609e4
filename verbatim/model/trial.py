"""Inspection of a model, with a trial if its class is not in the list of verified ones.

In a trial, two short sequences run through the flat path, in one piece and in two. Their logits must agree
with the model's own forward on each sequence, and be bit-identical to the flat path on each sequence alone.
This detects what inspection can't: custom attention scores, positions with an offset, keyword arguments with
an effect, scales computed over all rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.kv.store import KVStore
from verbatim.model.adapters import has_indexers, runs_indexer
from verbatim.model.differential import bit_equal, largest_error, tolerance
from verbatim.model.flat import FlatContext, noise_store, span_batch, trial_logits
from verbatim.model.patching import patched, quiet, replaced_forwards
from verbatim.model.recurrent_ops import has_supported_states
from verbatim.model.spec import ModelSpec, OwnModel, inner_model, inspect_once

_LENGTHS = (9, 6)
_FIRST_PIECE = (4, 1)
Spans = dict[int, tuple[int, int]]  # positions in a forward, by sequence
# Classes verified by comparing flat logits with transformers' eager ones; without the suffix "ForCausalLM".
_CAUSAL_PREFIXES = """
    Afmoe Apertus Apertus1p5Text Arcee AriaText AXK1 AXK2 BailingHybrid Bamba Bart Beam BioGpt BitNet
    Blenderbot BlenderbotSmall Bloom Camembert CodeGen Cohere Cohere2 Cohere2Moe CohereCompass Cwm
    Data2VecText Dbrx DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 DiffLlama Dory Dots1 Dots3Note Electra
    Emu3 Ernie Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba FlexOlmo Flint Fuyu
    Gemma Gemma2 Gemma3 Gemma3n Gemma4 Gemma4Unified Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GPTBigCode
    GPTJ GPTNeo GPTNeoX GPTNeoXJapanese GptOss Granite GraniteMoe GraniteMoeHybrid GraniteMoeShared
    GraniteMoeSWA GraniteSWA Helium HrmText HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX HYV3 HYV4 Inkling
    Inkling2 Inkling2Loop Jais2 Jamba JetMoe KimiLinear Kolibri1 Laguna LaraMini Lfm2 Lfm2Moe Lfm3 Llama
    Llama4 LongcatFlash Mamba Mamba2 Marian MBart MegatronBert Mellum MiMoV2Flash MiniCPM3 MiniMax
    MiniMaxM2 MiniMaxM3VL Ministral Ministral3 Mistral Mixtral Mllama ModernBertDecoder Moshi Mpt Mvp
    NanoChat Nemotron NemotronH Olmo Olmo2 Olmo3 Olmoe OlmoHybrid OPT Pegasus Persimmon Phi Phi3
    Phi4Multimodal Phimoe PLBart Qwen2 Qwen2Moe Qwen3 Qwen3_5 Qwen3_5Moe Qwen3Moe Qwen3Next Qwen4Exp
    RecurrentGemma RemBert Roberta RobertaPreLayerNorm RoCBert RoFormer Rwkv SeedOss SmolLM3 SolarOpen
    StableLm Starcoder2 TrOCR VaultGemma Whisper XGLM XLMRoberta XLMRobertaXL xLSTM Xmod Youtu Zamba
    Zamba2 Zaya
"""
_OTHER_CLASSES = """
    BertGenerationDecoder BertLMHeadModel CTRLLMHeadModel Gemma3ForConditionalGeneration
    Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GotOcr2ForConditionalGeneration
    GPT2LMHeadModel Mistral4ForCausalLM MossTranscribeDiarizeForConditionalGeneration
    NemotronH_Omni_Reasoning_V3 OpenAIGPTLMHeadModel Qwen4ExpForConditionalGeneration
"""
# Multimodal classes, without the suffix "ForConditionalGeneration".
_MULTIMODAL_PREFIXES = """
    Apertus1p5 Aria AyaVision Chameleon Cohere2Vision CohereCompass Cosmos3Edge Cosmos3Omni DeepseekOcr2
    DeepseekVL DeepseekVLHybrid Ernie4_5_VLMoe Exaone4_5_ FunAsrNano Glm46V Glm4v Glm4vMoe Glm5Next GlmAsr
    GlmOcr Granite4Vision GraniteDocling GraniteSpeech GraniteSpeechPlus HunYuanVL HyperCLOVAXVisionV2
    HYV4VL Idefics2 Idefics3 Inkling2 Inkling2Loop Inkling InternVL Janus Kimi_K25 Kosmos2_5 Lfm2Vl
    Lfm3Vl LightOnOcr Llava LlavaNext LlavaNextVideo LlavaOnevision MiniCPMOcr MiniCPMV4_6 MiniCPMV4_7
    MiniMaxM3Sparse Mistral3 MistralLarge4 Molmo2 MuseGlimmer MuseSpark OmniASR Ovis2 PaddleOCRVL
    QianfanOCR Qwen2_5_VL Qwen2_5OmniThinker Qwen2Audio Qwen2VL Qwen3_5 Qwen3_5Moe Qwen3ASR
    Qwen3OmniMoeThinker Qwen3VL Qwen3VLMoe SmolVLM Step3p7 UnlimitedOcr VideoLlama3 VideoLlava VipLlava
    Voxtral
"""
VERIFIED = frozenset(_OTHER_CLASSES.split()) | {
    *(f"{name}ForCausalLM" for name in _CAUSAL_PREFIXES.split()),
    *(f"{name}ForConditionalGeneration" for name in _MULTIMODAL_PREFIXES.split()),
}

# Reasons to refuse layer types, by a substring of the type.
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
_WITHOUT_STATE = frozenset({"full_attention", "sliding_attention", "attention", "mlp", "moe"})

_CODEBOOKS = "every position holds an id of each codebook, not one id"
_ASSISTANT = "it drafts from hidden states and keys of its main model, which a batch of ids lacks"
_CLASSES = {
    "BltForCausalLM": "it attends to patches of bytes, not to positions",
    "Gemma4AssistantForCausalLM": _ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": _ASSISTANT,
    "MusicgenForCausalLM": _CODEBOOKS,
    "MusicgenMelodyForCausalLM": _CODEBOOKS,
}

# Prefixes of modules that define the layer classes allowed in a verified model.
_KNOWN_SOURCES = (
    "torch.nn.modules.",
    "torch.nn.parallel.",
    "transformers.",
    "peft.",
    "verbatim.model.quantized",
    "verbatim.model.shard",
)


def inspect_model(module: nn.Module, *, latent: bool) -> ModelSpec:
    """Return a module's spec, by an inspection and perhaps a trial; raise UnsupportedModel if they fail.

    `latent`: as for `inspect_once`.
    """
    inner = inner_model(module)
    try:
        reason = reason_to_refuse(inner)
        if reason is not None:
            raise UnsupportedModel(reason)
        spec = inspect_once(module, inner, latent=latent)
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
    """Compare the flat path with the model's own forward; raise UnsupportedModel if results differ."""
    device = next(module.parameters()).device
    config = inner_model(module).config.get_text_config(decoder=True)
    # A part of a model that is not its last returns hidden states, which may be wider than the vocabulary.
    vocab_size = min(spec.vocab_size, getattr(config, "vocab_size", spec.vocab_size))
    high = max(2, min(vocab_size, 1000) - 3)  # avoids special ids, which are at both ends
    sequences = [(torch.arange(n) * 37 + 5 * n) % high + 2 for n in _LENGTHS]
    rows = [dict(input_ids=ids[None].to(device), use_cache=False) for ids in sequences]
    with quiet(), patched(module, [], hooks=False, attention="eager"):
        expected: list[Tensor] = [module(**row).logits[0] for row in rows]
    scale = max(float(logits.abs().max()) for logits in expected)
    if not math.isfinite(scale):  # because of the weights
        return

    forwards = replaced_forwards(module)

    def memory() -> KVStore:
        return noise_store(spec.layers, spec.states, spec.dtype, device)

    def flat(store: KVStore, spans: Spans) -> dict[int, Tensor]:
        """Return the logits of each sequence from one flat forward."""
        ids = torch.cat([sequences[s][slice(*at)] for s, at in spans.items()])
        context = FlatContext(spec.slots, span_batch(spans, ids), store)
        logits = trial_logits(module, spec, forwards, context)
        lengths = [stop - start for start, stop in spans.values()]
        return dict(zip(spans, logits.split(lengths), strict=True))

    all_rows: Spans = {s: (0, length) for s, length in enumerate(_LENGTHS)}
    cut: Spans = {s: (0, length) for s, length in enumerate(_FIRST_PIECE)}
    rest: Spans = {s: (cut[s][1], all_rows[s][1]) for s in all_rows}
    joint, store_in_two = flat(memory(), all_rows), memory()
    first, second = flat(store_in_two, cut), flat(store_in_two, rest)
    for s, logits in joint.items():
        alone = flat(memory(), {s: all_rows[s]})[s]
        if not (bit_equal(alone, logits) and bit_equal(torch.cat([first[s], second[s]]), logits)):
            raise UnsupportedModel("in a trial its logits changed with the other rows of the batch")
    # Some heads return float32 in a model of half precision.
    dtype = min(spec.dtype, expected[0].dtype, key=lambda dtype: dtype.itemsize)
    for actual, theirs in zip(joint.values(), expected, strict=True):
        error = largest_error(actual.to(dtype), theirs.to(dtype))
        if not error <= tolerance(dtype, scale):
            raise UnsupportedModel(
                f"in a trial its logits on a flat batch were off by {error:.2g} (largest logit: "
                f"{scale:.2g}) from its own forward"
            )


def is_verified(module: Any, inner: Any) -> bool:
    """Return whether the class of `inner`, and that of its text model, is verified, and no layer replaced."""
    from transformers.models.auto import modeling_auto as auto

    cls, text = type(inner), inner.config.get_text_config(decoder=True)
    same_package = type(text).__module__.rpartition(".")[0] == cls.__module__.rpartition(".")[0]
    names = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    kind = text.model_type.removesuffix("_text")
    return (
        cls.__module__.startswith("transformers.models.")
        and cls.__name__ in VERIFIED
        and (same_package or any(classes.get(kind) in VERIFIED for classes in names))
        and all(type(layer).__module__.startswith(_KNOWN_SOURCES) for layer in module.modules())
    )


def reason_to_refuse(inner: Any) -> str | None:
    """Return why the transformers model `inner` can't run on flat batches, or None.

    Only checks what inspection would miss or not name.
    """
    config = inner.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; only causal models are run"
    reason = _CLASSES.get(type(inner).__name__)
    if reason is not None:
        return reason
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    run_here = has_supported_states(inner)
    indexed = has_indexers(inner)
    for part, problem in _KINDS.items():
        for kind in kinds:
            if part in kind and not (indexed if problem is _INDEXER else run_here):
                return f"its {kind} layers {problem}"
    stateless = kinds and _WITHOUT_STATE.issuperset(kinds)
    if getattr(inner, "_is_stateful", False) and not (run_here or stateless):
        return "it keeps a recurrent state, which is not in K and V"
    for layer in inner.modules():
        if type(layer).__name__.endswith("Indexer") and not runs_indexer(layer):
            return (
                f"its attention chooses keys by {type(layer).__name__}, which has keys of its own"
            )
    return None
