"""Tiny models of the families, of random weights, on which the facts about a family are checked."""

from __future__ import annotations

from typing import Any

from torch import nn

from quark_templates.examples import dense, mixtures, own_forms

__all__ = ["config_of", "tiny_model"]


def tiny_model(model_type: str) -> nn.Module:
    """Return a tiny model of a family that transformers knows, of random weights.

    It has two or three blocks, in float32, and is in evaluation mode.
    """
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    config = config_of(model_type)
    seeing_names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = seeing_names if hasattr(config, "vision_config") else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model: Any = getattr(transformers, names[model_type])._from_config(config, dtype=torch.float32).eval()
    if model_type in {*mixtures.OWN_SIZES, *own_forms.SIZES, *dense.PARTS}:
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + float(parameter.ndim == 1))
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # which experts a token goes to, chosen by its number
                table.copy_((torch.arange(len(table))[:, None] + torch.arange(table.shape[1])) % own_forms.EXPERTS)
    tiny: nn.Module = model
    return tiny


def config_of(model_type: str) -> Any:
    """Return the configuration of that model."""
    from transformers import AutoConfig

    if model_type in own_forms.SIZES:
        return AutoConfig.for_model(model_type, **own_forms.SIZES[model_type])
    if model_type in dense.PARTS:
        return AutoConfig.for_model(model_type, **dense.sizes_of(model_type))
    if model_type in mixtures.OWN_SIZES:
        return AutoConfig.for_model(model_type, **{**mixtures.SIZES, **mixtures.OWN_SIZES[model_type]})
    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map}
    sizes = dense.CONVOLUTIONAL if "layer_types" in known and "conv_L_cache" in known else dense.SIZES
    chosen = {name: size for name, size in sizes.items() if name in known or sizes is dense.CONVOLUTIONAL}
    return AutoConfig.for_model(model_type, **chosen, **dense.OTHER_NAMES.get(model_type, {}))
