"""The architecture of a given model: from its config's model type, through the registered templates."""

from __future__ import annotations

from typing import Any

import attrs
from torch import nn

from quark.base.log import get_logger
from quark.config.architecture import Architecture
from quark.config.templates import LLMTemplate
from quark.errors import UnknownNameError
from quark.models.plan.inferred_architecture import fitted, infer_architecture, inferred_lines, one_block
from quark.plugins import templates


@attrs.frozen
class StatedFamily:
    """Facts that a model states about its family, in its attribute ``stated_family``.

    A model that is built from tensor names alone has this attribute. A transformers model needs none: its
    modules show its family.

    Attributes:
        architecture: Facts about the family.
        notes: Remarks for the user, which a plan adds to its own notes.
    """

    architecture: Architecture
    notes: tuple[str, ...] = ()


def stated_family(model: nn.Module) -> StatedFamily | None:
    """Return the `StatedFamily` of a model, or None."""
    stated = getattr(model, "stated_family", None)
    return stated if isinstance(stated, StatedFamily) else None


def model_type_of(model_config: Any) -> str | None:
    """Return ``model_type`` of a transformers config, or its first architecture's name if that is missing.

    None for other objects.
    """
    model_type = getattr(model_config, "model_type", None) or next(iter(getattr(model_config, "architectures", None) or []), None)
    return model_type if isinstance(model_type, str) and model_type else None


def architecture_of(model: nn.Module) -> Architecture | None:
    """Return facts about the family of ``model``, from its template or inferred from its modules; or None."""
    if (stated := stated_family(model)) is not None:
        return stated.architecture
    name = model_type_of(getattr(model, "config", None))
    if name is None:
        return None
    registered = templates().find_architecture(name)
    if registered is not None and (here := fitted(registered, model)) is not None:
        return here
    return infer_architecture(model, name) or registered


def weight_converters_of(model: nn.Module) -> list[Any]:
    """Return the weight converters (`quark.models.hf.weight_converters`) of the template of ``model``.

    Empty if it has no template.
    """
    name = model_type_of(getattr(model, "config", None))
    try:
        return list(LLMTemplate.get(name).f2f_weight_converters or ()) if name else []
    except UnknownNameError:
        return []


def text_config(model: nn.Module) -> Any:
    """Return the configuration of a model, or of its text part; None if it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def template_of(model: nn.Module) -> LLMTemplate:
    """Return the template of a model's type, or one inferred from its modules; the inference is logged.

    Raises:
        UnknownNameError: (a ValueError) There is no template, and the model is not a transformers model.
    """
    if (stated := stated_family(model)) is not None:
        return LLMTemplate.from_architecture(stated.architecture)
    name = model_type_of(getattr(model, "config", None)) or "(none)"
    try:
        return LLMTemplate.get(name)
    except UnknownNameError:
        if not hasattr(model, "get_output_embeddings"):
            raise
        architecture = infer_architecture(model, name) or one_block(model, name)
    for line in inferred_lines(architecture):
        get_logger(__name__).warning(line)
    return LLMTemplate.from_architecture(architecture)
