"""Functions that write the notes and the warning of a plan about the classes of its layers. The notes explain
axes, and name layers that stay float."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from quark.base.names import folded
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers.layer_types import layer_type_of_class
from quark.models.plan.plan_row import PlanRow


def layer_notes(rows: Sequence[PlanRow], model: nn.Module) -> Iterator[str]:
    """Yield notes on what axes mean in specs of convolutions and embeddings, and on layers of unknown
    classes."""
    quantized = [row for row in rows if row.has_quantized_weight]
    if kernels := [row.name for row in quantized if len(row.shape) > 2]:
        yield (
            f"{len(kernels)} convolution(s) are quantized: {folded(kernels)}. Axis 0 of their weights is the output channels, also in "
            "transposed convolutions. Groups run along the input channels of a kernel position, and axis 1 of activations is the channels"
        )
    if lookups := [row.name for row in quantized if row.is_lookup]:
        yield (
            f"{len(lookups)} embedding(s) are quantized: {folded(lookups)}. Axis 0 of their weights is the token, and their inputs are "
            "indices, which are not quantized"
        )
    for (unknown, known), names in _unknown_layers(rows, model).items():
        yield (
            f"{len(names)} layer(s) of the class {unknown} stay float, because they compute something else than {known}: {folded(names)}. "
            "A plugin can register the class as a layer type"
        )


def _unknown_layers(rows: Sequence[PlanRow], model: nn.Module) -> dict[tuple[str, str], list[str]]:
    """Find the layers that have no row, although the layer type of a base class is quantized by default.

    The result is a dictionary from a pair of class names to the full names of layers. The pair is the class
    of the layers and the base class.
    """
    planned = {row.name for row in rows}
    layers: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        for base in () if name in planned else type(module).__mro__[1:]:
            layer_type = layer_type_of_class(base)
            if layer_type is not None and layer_type.record.quantized is not None and not layer_type.record.by_name:
                layers.setdefault((type(module).__name__, base.__name__), []).append(name)
                break
    return layers


def nothing_quantized(rows: Sequence[PlanRow], config: QConfig) -> Iterator[str]:
    """Yield a warning if the configuration quantizes layers by default, and the model has no such layer."""
    if config.global_quant_config != QLayerConfig() and all(row.is_by_name for row in rows):
        yield "this model stays float, because it has no layer of a class that is quantized by default"
