"""Functions that find the architecture of a model, from a registered template or from the model's modules."""

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
    """The value of a model's attribute ``stated_family``: facts about the family of the model.

    quark sets this attribute on a model that it has built from tensor names alone. A transformers model does
    not need the attribute, because its configuration and its modules show the family.

    Attributes:
        architecture: Facts about the family.
        notes: Remarks for the user. A plan of the model contains them.
    """

    architecture: Architecture
    notes: tuple[str, ...] = ()


def stated_family(model: nn.Module) -> StatedFamily | None:
    """Return the attribute ``stated_family`` of a model, or None if the model has no such attribute."""
    stated = getattr(model, "stated_family", None)
    return stated if isinstance(stated, StatedFamily) else None


def model_type_of(model_config: Any) -> str | None:
    """Return the ``model_type`` of a transformers config.

    If the config has no ``model_type``, return the first entry of ``architectures``. Return None if the
    config has neither.
    """
    model_type = getattr(model_config, "model_type", None) or next(iter(getattr(model_config, "architectures", None) or []), None)
    return model_type if isinstance(model_type, str) and model_type else None


def architecture_of(model: nn.Module) -> Architecture | None:
    """Return the facts about the family of ``model``, or None if the family is unknown.

    The facts come from the model itself (`stated_family`), from a registered template, or from the names of
    the model's modules.
    """
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

    The list is empty if no template is registered for the model.
    """
    name = model_type_of(getattr(model, "config", None))
    try:
        return list(LLMTemplate.get(name).f2f_weight_converters or ()) if name else []
    except UnknownNameError:
        return []


def text_config(model: nn.Module) -> Any:
    """Return the transformers config of the text part of ``model``, or None if the model has no config.

    If the model has only one part, this is the config of the model.
    """
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def template_of(model: nn.Module) -> LLMTemplate:
    """Return the template that is registered for the type of ``model``.

    If no template is registered, infer one from the modules of the model, and log what was inferred.

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
