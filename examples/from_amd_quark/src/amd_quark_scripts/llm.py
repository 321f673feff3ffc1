"""The module ``quark.torch.utils.llm``. Its functions have AMD Quark's names, and use this project's loaders
to prepare models and data."""

from __future__ import annotations

from amd_quark_scripts.data_preparation import get_calib_dataloader, get_pile10k_dataloader, get_wikitext2
from amd_quark_scripts.model_preparation import (
    check_compatibility_before_quantization,
    create_model_skeleton,
    get_model,
    get_model_type,
    get_tokenizer,
    maybe_save_preprocessors,
    prepare_for_moe_quant,
    preprocess_for_quantization,
    revert_model_patching,
    save_model,
    set_seed,
)

__all__ = [
    "check_compatibility_before_quantization",
    "create_model_skeleton",
    "get_calib_dataloader",
    "get_model",
    "get_model_type",
    "get_pile10k_dataloader",
    "get_tokenizer",
    "get_wikitext2",
    "maybe_save_preprocessors",
    "prepare_for_moe_quant",
    "preprocess_for_quantization",
    "revert_model_patching",
    "save_model",
    "set_seed",
]
