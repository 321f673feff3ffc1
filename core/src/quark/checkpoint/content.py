"""CheckpointContent: what an exporter writes and a reader returns, a quantized model with its configuration and its plan."""

from __future__ import annotations

from typing import Any

import attrs
from torch import nn

from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.planning.plan import QuantPlan

__all__ = ["CheckpointContent", "content_of", "set_results"]


@attrs.frozen(eq=False)
class CheckpointContent:
    """What a checkpoint holds.

    Attributes:
        model: The model. Its layers are quantized; while an export is streamed, those of the blocks that are finished.
        config: The configuration, resolved for this model.
        plan: What each layer got.
    """

    model: nn.Module
    config: QConfig
    plan: QuantPlan


def content_of(model: Any) -> CheckpointContent:
    """What the attributes of a quantized model say about it, which `quark.runs.ModelQuantizer` and `set_results` leave for users.

    Raises:
        ConfigError: (a ValueError) The model has not been quantized.
    """
    if not getattr(model, "quark_quantized", False):
        raise ConfigError("this model has not been quantized: give ModelQuantizer(config).quantize_model(model) what it needs, then export")
    return CheckpointContent(model, model.quant_config, model.quark_plan)


def set_results(content: CheckpointContent) -> None:
    """Set the attributes that tell users of a quantized model about it."""
    model: Any = content.model
    model.quant_config, model.quark_plan, model.quark_quantized = content.config, content.plan, True
