"""The records of the templates, with one row for each model family.

Rows are grouped: tests check all families of a group in the same way.

To add a family, write its `Architecture` into the file of its lineage and add a row here. If no tiny model
can be built with the default sizes, add sizes to `quark_templates.examples`.
"""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import TemplateRecord, hookimpl

QUARK_API = (2, 2)
"""Supported versions of the plugin API."""


_TINY_MODEL = "quark_templates.examples:tiny_model"


def _records(*rows: tuple[str, str, str], example: str | None = _TINY_MODEL) -> dict[str, TemplateRecord]:
    """Return a dictionary from model type to record.

    A row consists of the model type, the names of the models in the family, and a reference to the
    architecture.
    """
    return {name: TemplateRecord(name=name, summary=summary, architecture=reference, example=example) for name, summary, reference in rows}


DENSE = _records(
    ("llama", "Llama 1 to 3, SmolLM2, TinyLlama and other models of that form", "quark_templates.llama:LLAMA"),
    ("mistral", "Mistral 7B and its relatives", "quark_templates.llama:MISTRAL"),
    ("qwen2", "Qwen2 and Qwen2.5", "quark_templates.qwen:QWEN2"),
    ("qwen3", "Qwen3, dense", "quark_templates.qwen:QWEN3"),
    ("gemma2", "Gemma 2", "quark_templates.gemma:GEMMA2"),
    ("opt", "OPT", "quark_templates.gpt:OPT"),
    ("bloom", "BLOOM", "quark_templates.gpt:BLOOM"),
    ("falcon", "Falcon 7B", "quark_templates.gpt:FALCON"),
    ("gpt2", "GPT-2", "quark_templates.gpt:GPT2"),
    ("phi3", "Phi-3 and Phi-4", "quark_templates.llama:PHI3"),
    ("cohere", "Command R and Command R+", "quark_templates.llama:COHERE"),
    ("cohere2", "Command R7B and Command A", "quark_templates.llama:COHERE2"),
    ("exaone4", "EXAONE 4", "quark_templates.llama:EXAONE4"),
    ("gemma", "Gemma 1", "quark_templates.gemma:GEMMA"),
    ("gemma3_text", "Gemma 3, text only", "quark_templates.gemma:GEMMA3_TEXT"),
    ("glm4", "GLM-4-0414, dense", "quark_templates.glm:GLM4"),
    ("gpt_neox", "GPT-NeoX and Pythia", "quark_templates.gpt:GPT_NEOX"),
    ("gptj", "GPT-J", "quark_templates.gpt:GPTJ"),
    ("granite", "Granite 3, dense", "quark_templates.llama:GRANITE"),
    ("helium", "Helium", "quark_templates.llama:HELIUM"),
    ("ministral", "Ministral", "quark_templates.llama:MINISTRAL"),
    ("nemotron", "Nemotron-4 and Minitron", "quark_templates.llama:NEMOTRON"),
    ("olmo", "OLMo 1", "quark_templates.llama:OLMO"),
    ("olmo2", "OLMo 2", "quark_templates.llama:OLMO2"),
    ("olmo3", "OLMo 3", "quark_templates.llama:OLMO3"),
    ("phi", "Phi-1, Phi-1.5 and Phi-2", "quark_templates.llama:PHI"),
    ("ministral3", "Ministral 3, text only", "quark_templates.llama:MINISTRAL3"),
    ("smollm3", "SmolLM3", "quark_templates.llama:SMOLLM3"),
    ("stablelm", "StableLM, sequential", "quark_templates.llama:STABLELM"),
    ("starcoder2", "StarCoder2", "quark_templates.llama:STARCODER2"),
    ("glm", "GLM-4-9B, in transformers' form", "quark_templates.glm:GLM"),
    ("seed_oss", "Seed-OSS", "quark_templates.llama:SEED_OSS"),
    ("ernie4_5", "ERNIE 4.5, dense", "quark_templates.llama:ERNIE4_5"),
    ("hunyuan_v1_dense", "Hunyuan, dense", "quark_templates.llama:HUNYUAN_V1_DENSE"),
    ("arcee", "AFM", "quark_templates.llama:ARCEE"),
    ("apertus", "Apertus", "quark_templates.llama:APERTUS"),
)
"""Dense families, checked on tiny models of transformers' own code."""

MIXTURES = _records(
    ("mixtral", "Mixtral", "quark_templates.llama:MIXTRAL"),
    ("qwen2_moe", "Qwen1.5-MoE and Qwen2-MoE", "quark_templates.qwen:QWEN2_MOE"),
    ("qwen3_moe", "Qwen3, mixtures of experts", "quark_templates.qwen:QWEN3_MOE"),
    ("olmoe", "OLMoE", "quark_templates.llama:OLMOE"),
    ("gpt_oss", "GPT-OSS", "quark_templates.gpt:GPT_OSS"),
    ("deepseek_v2", "DeepSeek-V2", "quark_templates.deepseek:DEEPSEEK_V2"),
    ("deepseek_v3", "DeepSeek-V3 and R1", "quark_templates.deepseek:DEEPSEEK_V3"),
    ("deepseek_v32", "DeepSeek-V3.2", "quark_templates.deepseek:DEEPSEEK_V32"),
    ("dots1", "dots.llm1", "quark_templates.deepseek:DOTS1"),
    ("ernie4_5_moe", "ERNIE 4.5, mixtures of experts", "quark_templates.llama:ERNIE4_5_MOE"),
    ("glm4_moe", "GLM-4.5 and 4.6", "quark_templates.glm:GLM4_MOE"),
    ("glm4_moe_lite", "GLM-4.7-Flash", "quark_templates.glm:GLM4_MOE_LITE"),
    ("glm_moe_dsa", "GLM-5", "quark_templates.glm:GLM_MOE_DSA"),
    ("granitemoehybrid", "Granite 4", "quark_templates.llama:GRANITEMOEHYBRID"),
    ("minimax_m2", "MiniMax-M2", "quark_templates.other_mixtures:MINIMAX_M2"),
    ("phimoe", "Phi-3.5-MoE", "quark_templates.llama:PHIMOE"),
    ("qwen3_next", "Qwen3-Next", "quark_templates.qwen:QWEN3_NEXT"),
)
"""Families of mixtures of experts."""

REMOTE_CODE = _records(
    ("chatglm", "ChatGLM2, ChatGLM3 and GLM-4-9B", "quark_templates.glm:CHATGLM"),
    ("deepseek", "DeepSeek-MoE, the first", "quark_templates.deepseek:DEEPSEEK"),
    ("deepseek_vl_v2", "DeepSeek-OCR", "quark_templates.deepseek:DEEPSEEK_VL_V2"),
    ("grok-1", "Grok-1", "quark_templates.other_mixtures:GROK_1"),
    ("instella", "Instella", "quark_templates.llama:INSTELLA"),
    ("kimi_k2", "Kimi-K2", "quark_templates.deepseek:KIMI_K2"),
    ("kimi_k3", "Kimi-K3", "quark_templates.deepseek:KIMI_K3"),
    ("qwen", "Qwen, the first", "quark_templates.qwen:QWEN"),
    example=None,
)
"""Families whose code comes with their checkpoints, checked on module skeletons."""

CONVOLUTIONAL = _records(("lfm2", "LFM2", "quark_templates.llama:LFM2"))
"""Families with a convolution instead of attention in some blocks."""

MULTIMODAL = _records(
    ("gemma3", "Gemma 3 with its vision tower", "quark_templates.gemma:GEMMA3"),
    ("gemma4_unified", "Gemma 4, of all inputs without towers", "quark_templates.gemma:GEMMA4_UNIFIED"),
    ("glm4v", "GLM-4.1V", "quark_templates.glm:GLM4V"),
    ("internvl", "InternVL 2.5 to 3.5, as transformers has it", "quark_templates.qwen:INTERNVL"),
    ("llava", "LLaVA 1.5 and its relatives", "quark_templates.llama:LLAVA"),
    ("mistral3", "Mistral Small 3.1 and later, and Ministral 3", "quark_templates.llama:MISTRAL3"),
    ("mllama", "Llama 3.2 Vision", "quark_templates.llama:MLLAMA"),
    ("muse_glimmer", "Muse Glimmer", "quark_templates.gemma:MUSE_GLIMMER"),
    ("qwen2_vl", "Qwen2-VL", "quark_templates.qwen:QWEN2_VL"),
    ("qwen2_5_vl", "Qwen2.5-VL", "quark_templates.qwen:QWEN2_5_VL"),
    ("qwen3_5", "Qwen3.5, dense", "quark_templates.qwen:QWEN3_5"),
    ("qwen3_5_moe", "Qwen3.5, mixtures of experts", "quark_templates.qwen:QWEN3_5_MOE"),
    ("qwen3_vl", "Qwen3-VL, dense", "quark_templates.qwen:QWEN3_VL"),
    ("qwen3_vl_moe", "Qwen3-VL, mixtures of experts", "quark_templates.qwen:QWEN3_VL_MOE"),
)
"""Vision-language families."""

OWN_FORMS = _records(
    ("dbrx", "DBRX", "quark_templates.other_mixtures:DBRX"),
    ("deepseek_v4", "DeepSeek-V4", "quark_templates.deepseek:DEEPSEEK_V4"),
    ("gemma4", "Gemma 4, dense and mixtures of experts", "quark_templates.gemma:GEMMA4"),
    ("glm5_next", "GLM-5.3-Flash", "quark_templates.glm:GLM5_NEXT"),
    ("kimi_k25", "Kimi-K2.5 and K2.6", "quark_templates.deepseek:KIMI_K25"),
    ("llama4", "Llama 4 with its vision tower", "quark_templates.llama:LLAMA4"),
    ("llama4_text", "Llama 4, text only", "quark_templates.llama:LLAMA4_TEXT"),
    ("minimax_m3_vl", "MiniMax-M3", "quark_templates.other_mixtures:MINIMAX_M3_VL"),
    ("qwen4_exp", "Qwen4", "quark_templates.qwen:QWEN4_EXP"),
    ("qwen4_exp_text", "Qwen4, text only", "quark_templates.qwen:QWEN4_EXP_TEXT"),
)
"""Mixtures with special experts, blocks or checkpoint names; some are vision-language models."""

TEXT_PARTS = _records(
    ("qwen3_5_text", "Qwen3.5, dense, text only", "quark_templates.qwen:QWEN3_5_TEXT"),
    ("qwen3_5_moe_text", "Qwen3.5, mixtures of experts, text only", "quark_templates.qwen:QWEN3_5_MOE_TEXT"),
)
"""Decoders of vision-language families as separate models."""


ENCODERS = _records(
    ("bert", "BERT, and embedders, rerankers and classifiers made of it", "quark_templates.encoders:BERT"),
    ("roberta", "RoBERTa", "quark_templates.encoders:ROBERTA"),
    ("xlm-roberta", "XLM-RoBERTa, BGE-M3 and multilingual E5", "quark_templates.encoders:XLM_ROBERTA"),
    ("deberta", "DeBERTa, the first", "quark_templates.encoders:DEBERTA"),
    ("deberta-v2", "DeBERTa-v2 and v3", "quark_templates.encoders:DEBERTA_V2"),
    ("modernbert", "ModernBERT", "quark_templates.encoders:MODERNBERT"),
    ("t5", "T5 and Flan-T5", "quark_templates.encoders:T5"),
    ("mt5", "mT5", "quark_templates.encoders:MT5"),
    ("umt5", "UMT5", "quark_templates.encoders:UMT5"),
    ("bart", "BART", "quark_templates.encoders:BART"),
    ("whisper", "Whisper", "quark_templates.encoders:WHISPER"),
    ("wav2vec2", "Wav2Vec2", "quark_templates.encoders:WAV2VEC2"),
    ("vit", "ViT", "quark_templates.encoders:VIT"),
    ("clip", "CLIP", "quark_templates.encoders:CLIP"),
    ("siglip", "SigLIP", "quark_templates.encoders:SIGLIP"),
    example="quark_templates.encoder_examples:tiny_encoder",
)
"""Encoders of text, speech and images, alone or before a decoder."""


@hookimpl
def quark_register_templates() -> Iterator[TemplateRecord]:
    """Yield the record of each model family."""
    for group in (DENSE, MIXTURES, REMOTE_CODE, CONVOLUTIONAL, MULTIMODAL, OWN_FORMS, TEXT_PARTS, ENCODERS):
        yield from group.values()
