"""Tiny models of families, built from a template's example or from a small configuration, and tokens for
these models."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.models.layers import linear_weight
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.mixtures import separate_experts
from quark.plugins.model_records import TemplateRecord
from quark_devkit.check import NotApplicableError
from quark_devkit.small_models import InFloat64, run_config_of
from quark_devkit.subject import Subject

__all__ = [
    "IDS",
    "batches_of",
    "blocks_of",
    "coarse_config",
    "example_of",
    "facts_of",
    "float_logits",
    "inputs_of",
    "logits_of",
    "named_by",
    "of_experts",
    "readers_of_norms",
    "rows_of",
    "separated",
]

IDS = torch.arange(3, 63).reshape(3, 20)
"""Input tokens for example models, whose vocabulary has at least 64 tokens."""
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes for a family without an example; its configuration gets the sizes whose names it has."""


def facts_of(subject: Subject) -> Architecture:
    """Return the facts that a template states."""
    facts: Architecture = subject.load("architecture")
    return facts


def example_of(subject: Subject) -> Any:
    """Return a new tiny float32 model of a template's family.

    Raises:
        NotApplicableError: The record has no example, and transformers does not know the family.
    """
    record = subject.record
    assert isinstance(record, TemplateRecord)
    return deepcopy(_built(record))


def separated(subject: Subject, dtype: torch.dtype = torch.float64) -> Any:
    """Return the example with its experts as separate layers, as in a run, and with parameters of
    ``dtype``."""
    model = example_of(subject)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    separate_experts(model, coarse_config(subject))
    return model.requires_grad_(False)


def coarse_config(subject: Subject) -> QConfig:
    """Return a configuration with coarse weights for all layers that the template does not exclude."""
    return run_config_of(facts_of(subject))


def blocks_of(model: nn.Module, facts: Architecture) -> list[nn.Module]:
    """Return the decoder blocks of a model."""
    return [block.module for block in decoder_blocks(model, facts)]


def named_by(module: nn.Module, pattern: str) -> list[str]:
    """Return the names of submodules that match ``pattern``: a name, or a pattern with a star in place of an
    expert's number."""
    return [name for name, _ in module.named_modules() if fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")]


def of_experts(facts: Architecture, *names: str) -> tuple[str, ...]:
    """Turn names within an expert into patterns within a block. Return an empty tuple if the family has no
    experts."""
    return tuple(f"{facts.experts}.*.{name}" for name in names) if facts.experts else ()


def readers_of_norms(facts: Architecture) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each norm of a block with the names or patterns of the layers that read the norm's output."""
    mixer = tuple(name for name in facts.mixer[:-1] if name not in facts.mixer_context)
    experts = of_experts(facts, *facts.expert_inputs)
    mixture = (*facts.shared_experts[:-1], *(() if facts.experts_norm else (*experts, facts.router)), facts.shared_expert_gate)
    mlp = tuple(name for name in (*facts.mlp_inputs, *mixture) if name)
    attention = (*facts.attention_inputs, *mixer)
    if facts.attention_norm == facts.mlp_norm and facts.attention_norm is not None:
        yield facts.attention_norm, (*attention, *mlp)
    else:
        yield from ((norm, readers) for norm, readers in ((facts.attention_norm, attention), (facts.mlp_norm, mlp)) if norm and readers)
    yield from facts.attention_inner_norms
    if facts.experts_norm:
        yield facts.experts_norm, experts


def rows_of(module: nn.Module) -> Tensor:
    """Return a view of a layer's weight with one row for each output. For a norm, return the weight
    itself."""
    weight: Any = module.weight
    return weight if weight.ndim != 2 else linear_weight(module)


def float_logits(model: Any) -> Tensor:
    """Return the logits of a float64 model, computed in float64 throughout."""
    with InFloat64():
        return logits_of(model)


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Return the arguments for a forward pass of an example model: the model's ``example_inputs``, or token
    ids."""
    dtype = next(p.dtype for p in model.parameters())
    inputs: dict[str, Tensor] = getattr(model, "example_inputs", {"input_ids": IDS})
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def batches_of(model: Any) -> list[dict[str, Tensor]]:
    """Return the arguments of `inputs_of` as calibration data, one sample at a time."""
    parts = {name: tensor.split(1) for name, tensor in inputs_of(model).items()}
    return [dict(zip(parts, sample, strict=True)) for sample in zip(*parts.values(), strict=True)]


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """Return the logits of an example model. If the model has no logits, return its text embeddings and image
    embeddings, concatenated."""
    outputs = model(**inputs_of(model))
    logits: Tensor = outputs.logits if "logits" in outputs else torch.cat([outputs.text_embeds, outputs.image_embeds], dim=-1)
    return logits


@lru_cache(maxsize=4)
def _built(record: TemplateRecord) -> Any:
    if record.example is not None:
        return record.example.load()(record.name).eval()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if record.modeling is not None:
            import_module(record.modeling)
        default = AutoConfig.for_model(record.name)
        known = {*default.to_dict(), *default.attribute_map}
        config = AutoConfig.for_model(record.name, **{name: size for name, size in SIZES.items() if name in known})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception as error:
        raise NotApplicableError(
            f"transformers cannot build a tiny model of '{record.name}' ({type(error).__name__}), and its record has no example: write a "
            f"function that returns a model, and set TemplateRecord(example='package.module:function')"
        ) from None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + float(parameter.ndim == 1))
    return model
