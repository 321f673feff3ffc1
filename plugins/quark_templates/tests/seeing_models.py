"""Tiny randomly initialised vision-language models, from transformers, and their inputs."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from quark_templates.examples import config_of

IDS = torch.arange(3, 63).reshape(3, 20)


def model_of(model_type: str) -> nn.Module:
    """A float32 model, its norms different from each other."""
    config = config_of(model_type)
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if hasattr(config, "vision_config") else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
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
