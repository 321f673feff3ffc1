"""Tiny randomly initialised models with eyes, from transformers, and what they are called with."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

IDS = torch.arange(3, 63).reshape(3, 20)
EXPERTS = 4
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR_FIRST = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MIXTURE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**MIXTURE, "shared_expert_intermediate_size": 32}
CROSS = {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SIGHT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
VISUAL = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TILES = {
    **SIGHT,
    "attention_heads": 2,
    "num_global_layers": 1,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 64,
    "supported_aspect_ratios": [[1, 1]],
    "max_num_tiles": 1,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}}
SLIM = {**VISUAL, "fullatt_block_indexes": [0], "image_size": 16}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "gemma3": ({}, SIGHT),
    "glm4v": (SECTIONS, SLIM),
    "internvl": ({}, {**SIGHT, "image_size": [16, 16], "patch_size": [4, 4]}),
    "llava": ({}, SIGHT),
    "mistral3": ({}, SIGHT),
    "mllama": (CROSS, TILES),
    "qwen2_vl": (SECTIONS, {**VISUAL, "embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": (SECTIONS, SLIM),
    "qwen3_5": (LINEAR_FIRST, VISUAL),
    "qwen3_5_moe": ({**LINEAR_FIRST, **SHARED}, VISUAL),
    "qwen3_5_text": (LINEAR_FIRST, None),
    "qwen3_5_moe_text": ({**LINEAR_FIRST, **SHARED}, None),
    "qwen3_vl": ({}, VISUAL),
    "qwen3_vl_moe": (MIXTURE, VISUAL),
}
"""What is special in the text config, and the vision config where there is one."""


def model_of(model_type: str) -> nn.Module:
    """A float32 model, its norms different from each other."""
    text, vision = PARTS[model_type]
    sizes = {**TEXT, **text} if vision is None else {"text_config": {**TEXT, **text}, "vision_config": vision}
    image = {"image_token_index": 5, "mm_tokens_per_image": 4} if model_type == "gemma3" else {}
    config = AutoConfig.for_model(model_type, **sizes, **image)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if vision is None else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    torch.manual_seed(0)
    model = getattr(transformers, names[model_type])._from_config(config, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return model


def image_batch(model_type: str) -> dict[str, Tensor]:
    """A text with an image, as the model wants it."""
    torch.manual_seed(1)
    if model_type == "gemma3":
        return {"input_ids": torch.tensor([[1, 5, 5, 5, 5, 9, 10, 11]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    ones = torch.ones(1, 1, 1, dtype=torch.long)
    return {
        "input_ids": IDS[:1],
        "pixel_values": torch.randn(1, 1, 1, 3, 16, 16),
        "aspect_ratio_ids": ones[0],
        "aspect_ratio_mask": ones,
        "cross_attention_mask": ones[None].expand(1, IDS.shape[1], 1, 1),
    }


def logits(model: nn.Module, **batch: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**(batch or {"input_ids": IDS})).logits
    return found
