"""The architecture of a given model: from its config's model type, through the registered templates."""

from __future__ import annotations

from typing import Any

from torch import nn

from quark.plugins import templates
from quark.specs.architecture import Architecture


def model_type_of(model_config: Any) -> str | None:
    """``model_type`` of a transformers config, or its first architecture's name where that is missing; None for other objects."""
    found = getattr(model_config, "model_type", None) or next(iter(getattr(model_config, "architectures", None) or []), None)
    return found if isinstance(found, str) and found else None


def architecture_of(model: nn.Module) -> Architecture | None:
    """Facts about the family of ``model``, or None where no template is registered for it."""
    name = model_type_of(getattr(model, "config", None))
    if name is None or name not in templates():
        return None
    found: Architecture = templates().load(name, "architecture")
    return found
