"""A tiny model of any family, in float64 and with separate experts, for tests of exact laws."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import quark
from quark.config.architecture import Architecture
from quark.models.plan.mixtures import separate_experts
from quark.torch import LLMTemplate
from quark_devkit.small_models import InFloat64
from quark_templates.examples import config_of
from quark_templates.plugin import CONVOLUTIONAL, DENSE, MIXTURES, MULTIMODAL, OWN_FORMS, REMOTE_CODE, TEXT_PARTS

from . import own_forms, seeing_models, test_mixtures
from .conftest import tiny_model
from .skeletons import SKELETONS
from .skeletons.parts import HEADS

ALL = sorted(DENSE | MIXTURES | REMOTE_CODE | CONVOLUTIONAL | MULTIMODAL | OWN_FORMS | TEXT_PARTS)
IDS = torch.arange(3, 63).reshape(3, 20)
IMAGE = 5
"""The token in whose place a part of an image stands.

An image is 16 pixels wide and high, in patches of 4.
"""


def facts_of(model_type: str) -> Architecture:
    found: Architecture = quark.templates().load_architecture(model_type)
    return found


def whole_model(model_type: str) -> nn.Module:
    """The caller's own. Norms differ from each other, and so do the biases of norms."""
    model = _made(model_type).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.ndim == 1):
            vector.add_(torch.rand(vector.shape, generator=generator, dtype=torch.float64) * 0.2)
    separate_experts(model, LLMTemplate.get(model_type).get_config("int4_wo_32"))
    return model


def _made(model_type: str) -> nn.Module:
    if model_type in DENSE:
        return deepcopy(tiny_model(model_type))
    if model_type in MIXTURES:
        return test_mixtures.model_of(model_type)
    if model_type in OWN_FORMS:
        return own_forms.model_of(model_type)
    if model_type in REMOTE_CODE:
        return SKELETONS[model_type]()
    if model_type in CONVOLUTIONAL:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config_of(model_type), dtype=torch.float32).eval()
    return seeing_models.model_of(model_type)


def heads_of(model: nn.Module) -> int:
    config = getattr(model.config, "text_config", model.config)
    return int(getattr(config, "num_attention_heads", HEADS))


def batch_for(model_type: str, model: nn.Module) -> dict[str, Tensor]:
    """Text, with an image where the model sees, but for mixtures with forms of their own."""
    if model_type in ("gemma3", "mllama"):
        return {name: t.double() if t.is_floating_point() else t for name, t in seeing_models.image_batch(model_type).items()}
    if model_type in OWN_FORMS or not hasattr(model.config, "vision_config"):
        return {"input_ids": IDS}
    model.config.image_token_id = IMAGE
    ids = torch.tensor([[1, *[IMAGE] * (16 if model_type == "llava" else 4), 9, 10, 11]])
    generator = torch.Generator().manual_seed(1)
    vision, kinds = model.config.vision_config, (ids == IMAGE).long()
    if model_type == "gemma4_unified":
        places = torch.tensor([[[0, 0], [1, 0], [0, 1], [1, 1]]])
        pixels = torch.randn(1, 4, 3 * (vision.patch_size * vision.pooling_kernel_size) ** 2, dtype=torch.float64, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": kinds}
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None)
    if frames is None:
        pixels = torch.randn(1, 3, 16, 16, dtype=torch.float64, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, **({"image_sizes": torch.tensor([[16, 16]])} if model_type == "mistral3" else {})}
    pixels = torch.randn(16, 3 * frames * vision.patch_size**2, dtype=torch.float64, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": kinds}


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In float64."""
    with torch.no_grad(), InFloat64():
        found: Tensor = model(**batch).logits
    assert found.dtype is torch.float64
    return found


def blocks_of(model: nn.Module, facts: Architecture) -> list[nn.Module]:
    return list(model.get_submodule(facts.decoder_blocks or "").children())


def named_by(module: nn.Module, pattern: str) -> list[str]:
    """Names of submodules that a name, or a pattern with a star, stands for."""
    return [name for name, _ in module.named_modules() if fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")]


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def weights_of(module: nn.Module) -> Tensor:
    """A view with one row for each output."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.t() if type(module).__name__ == "Conv1D" else weight


def each_block(model: nn.Module, facts: Architecture, names: tuple[str, ...]) -> Iterator[tuple[nn.Module, list[list[str]]]]:
    """Yield the blocks that have modules for each name, with their names."""
    for block in blocks_of(model, facts):
        found = [named_by(block, name) for name in names]
        if all(found):
            yield block, found
