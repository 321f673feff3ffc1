"""Tiny randomly initialised mixtures with forms of their own, from transformers."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from quark_templates.examples import EXPERTS, config_of
from quark_templates.plugin import OWN_FORMS

from .lacking_families import why_lacking

IDS = torch.arange(3, 63).reshape(3, 20)
SEEING = {name for name in OWN_FORMS if why_lacking(name) is None and hasattr(config_of(name), "vision_config")}


def model_of(model_type: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The caller's own, its norms different from each other."""
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if model_type in SEEING else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    torch.manual_seed(0)
    model = getattr(transformers, names[model_type])._from_config(config_of(model_type), dtype=dtype).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # which experts a token goes to, chosen by its number
                table.copy_((torch.arange(len(table))[:, None] + torch.arange(table.shape[1])) % EXPERTS)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found
