"""What this distribution registers: one template per model family."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import TemplateRecord, hookimpl

QUARK_API = (1, 1)
FAMILIES = {
    "llama": "Llama 1 to 3, SmolLM2, TinyLlama and other models of that form",
    "mistral": "Mistral 7B and its relatives",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3, dense",
    "gemma2": "Gemma 2",
    "opt": "OPT",
    "bloom": "BLOOM",
    "falcon": "Falcon 7B",
    "gpt2": "GPT-2",
    "phi3": "Phi-3 and Phi-4",
    "cohere": "Command R and Command R+",
    "cohere2": "Command R7B and Command A",
    "exaone4": "EXAONE 4",
    "gemma": "Gemma 1",
    "gemma3_text": "Gemma 3, text only",
    "glm4": "GLM-4-0414, dense",
    "gpt_neox": "GPT-NeoX and Pythia",
    "gptj": "GPT-J",
    "granite": "Granite 3, dense",
    "helium": "Helium",
    "ministral": "Ministral",
    "nemotron": "Nemotron-4 and Minitron",
    "olmo": "OLMo 1",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "phi": "Phi-1, Phi-1.5 and Phi-2",
    "ministral3": "Ministral 3, text only",
    "smollm3": "SmolLM3",
    "stablelm": "StableLM, sequential",
    "starcoder2": "StarCoder2",
    "glm": "GLM-4-9B, in transformers' form",
    "seed_oss": "Seed-OSS",
    "ernie4_5": "ERNIE 4.5, dense",
    "hunyuan_v1_dense": "Hunyuan, dense",
    "arcee": "AFM",
    "apertus": "Apertus",
}

MIXTURES = {
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen1.5-MoE and Qwen2-MoE",
    "qwen3_moe": "Qwen3, mixtures of experts",
    "olmoe": "OLMoE",
    "gpt_oss": "GPT-OSS",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3 and R1",
    "deepseek_v32": "DeepSeek-V3.2",
    "dots1": "dots.llm1",
    "ernie4_5_moe": "ERNIE 4.5, mixtures of experts",
    "glm4_moe": "GLM-4.5 and 4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5",
    "granitemoehybrid": "Granite 4",
    "minimax_m2": "MiniMax-M2",
    "phimoe": "Phi-3.5-MoE",
    "qwen3_next": "Qwen3-Next",
}
"""Families of mixtures of experts."""

REMOTE = {
    "chatglm": "ChatGLM2, ChatGLM3 and GLM-4-9B",
    "deepseek": "DeepSeek-MoE, the first",
    "deepseek_vl_v2": "DeepSeek-OCR",
    "grok-1": "Grok-1",
    "instella": "Instella",
    "kimi_k2": "Kimi-K2",
    "qwen": "Qwen, the first",
}
"""Families whose code comes with their checkpoints."""

CONVOLUTIONAL = {"lfm2": "LFM2"}
"""Families some of whose blocks convolve in place of attention."""


MULTIMODAL = {
    "gemma3": "Gemma 3 with its vision tower",
    "glm4v": "GLM-4.1V",
    "internvl": "InternVL 2.5 to 3.5, as transformers has it",
    "llava": "LLaVA 1.5 and its relatives",
    "mistral3": "Mistral Small 3.1 and later, and Ministral 3",
    "mllama": "Llama 3.2 Vision",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_5": "Qwen3.5, dense",
    "qwen3_5_moe": "Qwen3.5, mixtures of experts",
    "qwen3_vl": "Qwen3-VL, dense",
    "qwen3_vl_moe": "Qwen3-VL, mixtures of experts",
}
"""Families of language models that also see."""

OWN_FORMS = {
    "dbrx": "DBRX",
    "deepseek_v4": "DeepSeek-V4",
    "kimi_k25": "Kimi-K2.5 and K2.6",
    "llama4": "Llama 4 with its vision tower",
    "llama4_text": "Llama 4, text only",
    "minimax_m3_vl": "MiniMax-M3",
}
"""Mixtures with a form of their own, of experts, of blocks, or of names in checkpoints; some of them see."""

TEXT_PARTS = {
    "qwen3_5_text": "Qwen3.5, dense, text only",
    "qwen3_5_moe_text": "Qwen3.5, mixtures of experts, text only",
}
"""What remains of some of them without vision; each is stated in the file of the whole."""


@hookimpl
def quark_register_templates() -> Iterator[TemplateRecord]:
    """One record per family; its architecture is the constant of the same name in the file of the same name, dashes as underscores."""
    for name, summary in (FAMILIES | MIXTURES | REMOTE | CONVOLUTIONAL | MULTIMODAL | OWN_FORMS | TEXT_PARTS).items():
        written = name.replace("-", "_")
        file = written.removesuffix("_text") if name in OWN_FORMS | TEXT_PARTS else written
        yield TemplateRecord(name=name, summary=summary, architecture=f"quark_templates.{file}:{written.upper()}")
