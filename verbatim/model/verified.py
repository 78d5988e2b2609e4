"""Model classes whose flat logits were compared with transformers' eager ones."""

from __future__ import annotations

from typing import Any

VERIFIED = frozenset(
    """
    AfmoeForCausalLM Apertus1p5TextForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
    AXK1ForCausalLM AXK2ForCausalLM BailingHybridForCausalLM BambaForCausalLM BartForCausalLM
    BeamForCausalLM BertGenerationDecoder BertLMHeadModel BioGptForCausalLM BitNetForCausalLM
    BlenderbotForCausalLM BlenderbotSmallForCausalLM BloomForCausalLM CamembertForCausalLM
    CodeGenForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM CohereCompassForCausalLM
    CohereForCausalLM CTRLLMHeadModel CwmForCausalLM Data2VecTextForCausalLM DbrxForCausalLM
    DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM
    DiffLlamaForCausalLM DoryForCausalLM Dots1ForCausalLM Dots3NoteForCausalLM ElectraForCausalLM
    Emu3ForCausalLM Ernie4_5_MoeForCausalLM Ernie4_5ForCausalLM ErnieForCausalLM Exaone4ForCausalLM
    ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM
    FlintForCausalLM FuyuForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration
    Gemma3nForCausalLM Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForCausalLM
    GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM
    GlmMoeDsaForCausalLM GotOcr2ForConditionalGeneration GPT2LMHeadModel GPTBigCodeForCausalLM
    GPTJForCausalLM GPTNeoForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM GptOssForCausalLM
    GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM
    GraniteMoeSWAForCausalLM GraniteSWAForCausalLM HeliumForCausalLM HrmTextForCausalLM
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM HYV3ForCausalLM
    HYV4ForCausalLM Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM KimiLinearForCausalLM
    Kolibri1ForCausalLM LagunaForCausalLM LaraMiniForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM
    Lfm3ForCausalLM Llama4ForCausalLM LlamaForCausalLM LongcatFlashForCausalLM Mamba2ForCausalLM
    MambaForCausalLM MarianForCausalLM MBartForCausalLM MegatronBertForCausalLM MellumForCausalLM
    MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM
    MiniMaxM3VLForCausalLM Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM
    MixtralForCausalLM MllamaForCausalLM ModernBertDecoderForCausalLM MoshiForCausalLM
    MossTranscribeDiarizeForConditionalGeneration MptForCausalLM MvpForCausalLM NanoChatForCausalLM
    NemotronForCausalLM NemotronHForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM
    OlmoForCausalLM OlmoHybridForCausalLM OpenAIGPTLMHeadModel OPTForCausalLM PegasusForCausalLM
    PersimmonForCausalLM Phi3ForCausalLM Phi4MultimodalForCausalLM PhiForCausalLM PhimoeForCausalLM
    PLBartForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen4ExpForCausalLM
    Qwen4ExpForConditionalGeneration RecurrentGemmaForCausalLM RemBertForCausalLM RobertaForCausalLM
    RobertaPreLayerNormForCausalLM RoCBertForCausalLM RoFormerForCausalLM RwkvForCausalLM
    SeedOssForCausalLM SmolLM3ForCausalLM SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
    TrOCRForCausalLM VaultGemmaForCausalLM WhisperForCausalLM XGLMForCausalLM XLMRobertaForCausalLM
    XLMRobertaXLForCausalLM xLSTMForCausalLM XmodForCausalLM YoutuForCausalLM Zamba2ForCausalLM
    ZambaForCausalLM ZayaForCausalLM
    """.split()
)


# Whose layers leave a verified model a verified model.
_KNOWN_SOURCES = (
    "torch.nn.modules.",
    "torch.nn.parallel.",
    "transformers.",
    "peft.",
    "verbatim.model.packed",
)


def is_verified(module: Any, inner: Any) -> bool:
    """Return whether `inner` is of a listed class of transformers, with none of its layers replaced."""
    cls = type(inner)
    return (
        cls.__module__.startswith("transformers.models.")
        and cls.__name__ in VERIFIED
        and all(type(layer).__module__.startswith(_KNOWN_SOURCES) for layer in module.modules())
    )
