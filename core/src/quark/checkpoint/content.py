"""`CheckpointContent`, which contains a quantized model, its configuration and its plan.

Exporters write a `CheckpointContent`, and readers return one. The functions `is_float` and `routers` find
layers that stay float.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
from torch import nn

from quark.base.names import folded
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.layers.layers_from_codes import Packed
from quark.models.layers.quantized_layers import is_quantized
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan, is_left_alone


@attrs.frozen(eq=False)
class CheckpointContent:
    """The content of a checkpoint.

    Attributes:
        model: The quantized model. While an export is streamed, only the layers of finished blocks are
            quantized.
        config: The configuration, resolved for this model.
        plan: The quantization of each layer. For a model that was quantized in FX graph mode, this is the
            plan of that mode. Only exporters with the capability ``graphs`` get such a content.
    """

    model: nn.Module
    config: QConfig
    plan: QuantPlan

    @property
    def blocks(self) -> Sequence[Block]:
        """The decoder blocks, in the order of streamed exports. If there are none, the model is one block."""
        return decoder_blocks(self.model, self.plan.architecture)


def content_of(model: Any) -> CheckpointContent:
    """Return the content that the attributes of a quantized model describe.

    `quark.runs.ModelQuantizer` and `quark.checkpoint.save_pretrained.set_results` set these attributes.

    Raises:
        ConfigError: (a ValueError) The model has not been quantized, it runs from codes, or it is compiled.
            Or another module has replaced a quantized layer.
    """
    if not getattr(model, "quark_quantized", False):
        raise ConfigError("this model has not been quantized. Call ModelQuantizer(config).quantize_model(model) first, then export it")
    if packed := [name for name, layer in model.named_modules() if isinstance(layer, Packed)]:
        raise ConfigError(f"this model runs from codes ({folded(packed)}). Call quark.checkpoint.unpack_model(model) first, then export it")
    if any(name.rpartition(".")[2] == "_orig_mod" for name, _ in model.named_modules()):
        raise ConfigError(
            "this model or a part of it was compiled with torch.compile, which renames tensors. Export the original module, which is "
            "model._orig_mod"
        )
    if isinstance(model.quark_plan, QuantPlan):
        refuse_replaced(model, model.quark_plan)
    return CheckpointContent(model, model.quant_config, model.quark_plan)


def refuse_replaced(model: nn.Module, plan: QuantPlan) -> None:
    """Check that every layer that was quantized is still a quantized layer.

    Otherwise a checkpoint would lack the scales of the layer.

    Raises:
        ConfigError: Another module has replaced a quantized layer.
    """
    quantized = {row.name for row in plan.quantized}
    if replaced := [n for n, module in model.named_modules(remove_duplicate=False) if n in quantized and not is_quantized(module)]:
        raise ConfigError(
            f"{len(replaced)} quantized layer(s) were replaced after quantization: {folded(replaced)}. Make such changes, for example with "
            "resize_token_embeddings, before you quantize the model"
        )


def is_float(row: PlanRow) -> bool:
    """Return whether the weight and the input of the layer in ``row`` stay float.

    A stored configuration must list such a layer as excluded. The output of the layer may still enter a
    quantized cache.
    """
    return is_left_alone(row) and not row.is_by_name


def routers(model: nn.Module, config: QConfig, plan: QuantPlan) -> list[str]:
    """Return the full names of excluded modules that have a weight, but are not linear layers in ``model``.

    Checkpoints list these modules as excluded, because runtimes may implement them as linear layers.
    """
    known = {row.name for row in plan.rows}
    return [
        name
        for name, module in model.named_modules()
        if name not in known
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and any(fnmatchcase(name, p) for p in config.exclude)
    ]
