"""What this distribution registers: one template per model family."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import TemplateRecord, hookimpl

FAMILIES = {
    "llama": "Llama 1 to 3, SmolLM2, TinyLlama and other models of that form",
    "mistral": "Mistral 7B and its relatives",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3, dense",
    "gemma2": "Gemma 2",
    "opt": "OPT",
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
    "smollm3": "SmolLM3",
    "stablelm": "StableLM, sequential",
    "starcoder2": "StarCoder2",
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
    "glm4_moe": "GLM-4.5 and 4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5",
    "granitemoehybrid": "Granite 4",
    "minimax_m2": "MiniMax-M2",
    "phimoe": "Phi-3.5-MoE",
    "qwen3_next": "Qwen3-Next",
}
"""Families of mixtures of experts."""


@hookimpl
def quark_register_templates() -> Iterator[TemplateRecord]:
    """One record per family; its architecture is the constant of the same name in the file of the same name."""
    for name, summary in (FAMILIES | MIXTURES).items():
        yield TemplateRecord(name=name, summary=summary, architecture=f"quark_templates.{name}:{name.upper()}")
