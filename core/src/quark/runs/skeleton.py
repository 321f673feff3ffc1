"""Quantized skeleton: a quantized model on the meta device, from which the layout of an export is
computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from quark.algorithms.branching import BranchSite, branching_of
from quark.calibration.attention import attention_quantizers, install
from quark.config.layer import Slot
from quark.models.layers import QuantizedLayer, QuantizerModule, quantized_class
from quark.models.layers.attention import PROBABILITIES
from quark.models.layers.quantized_layers import copied
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan
from quark.numbers import QParams, TensorQuantizer


@torch.no_grad()
def quantized_skeleton(model: nn.Module, plan: QuantPlan) -> nn.Module:
    """Return a quantized copy of ``model``. All scales have their final shapes and dtypes.

    Args:
        model: The float model, with its parameters on the meta device.
        plan: The plan of the model.
    """
    skeleton = _structure(model)
    modules = dict(skeleton.named_modules(remove_duplicate=False))
    layers = _quantized_layers(modules, plan.distinct)
    if (branching := branching_of(plan.config)) is not None:
        for row in plan.distinct:
            branching.add_to(layers[row.name], BranchSite.of(row.name, modules[row.name], row.quantized_to))
    plan.share_codes(layers)
    attention = attention_quantizers(layers, plan.attentions)
    for attention_row in plan.attentions:
        for attribute, quantizer in attention[attention_row.name].items():
            _give_scale(quantizer, (1,) if attribute == PROBABILITIES else attention_row.state_shape)
    install(skeleton, attention)
    for row in plan.quantized:
        owner, _, leaf = row.name.rpartition(".")
        modules[owner]._modules[leaf] = layers[row.same_as or row.name]
    return skeleton


def _quantized_layers(modules: Mapping[str, nn.Module], rows: Iterable[PlanRow]) -> dict[str, QuantizedLayer]:
    """Create the quantized layer of each row, and return the layers by full name.

    For equal layers, such as experts, one layer is created and copied. Each copy has its own parameters,
    because shared parameters would be treated as tied weights.
    """
    layers: dict[str, QuantizedLayer] = {}
    first_of: dict[object, tuple[nn.Module, QuantizedLayer]] = {}
    for row in rows:
        layer = modules[row.name]
        kind = (type(layer), id(row.config), *_shapes(layer._parameters), *_shapes(layer._buffers))
        if kind not in first_of or layer._modules:
            first_of[kind] = layer, quantized_class(layer).from_float(layer, row.quantized_to)
            _give_scales(first_of[kind][1], row)
        first, quantized = first_of[kind]
        layers[row.name] = copied(quantized, type(quantized))
        kept = (name for name, parameter in first._parameters.items() if quantized._parameters.get(name) is parameter)
        layers[row.name]._parameters |= {name: layer._parameters[name] for name in kept}
    return layers


def _shapes(tensors: Mapping[str, Tensor | None]) -> Iterator[object]:
    return ((name, None if tensor is None else (tensor.shape, tensor.dtype)) for name, tensor in tensors.items())


def _structure(model: nn.Module) -> nn.Module:
    """Return a copy of the module tree. The copy has the same tensor objects.

    A module that occurs twice in the tree is copied once.
    """
    copies: dict[int, nn.Module] = {}
    for module in model.modules():
        copies[id(module)] = copied(module, type(module))
    for copy in copies.values():
        copy._modules = {name: None if child is None else copies[id(child)] for name, child in copy._modules.items()}
    return copies[id(model)]


def _give_scales(layer: QuantizedLayer, row: PlanRow) -> None:
    for slot in Slot:
        quantizer: QuantizerModule | None = getattr(layer, slot.quantizer_attribute)
        if quantizer is not None:
            _give_scale(quantizer, row.shapes.of_slot(slot))


def _give_scale(module: QuantizerModule, shape: tuple[int, ...]) -> None:
    if module.is_static:
        module.set_qparams(_empty(module.quantizer, shape))


# The result is cached, because layers of one kind share a quantizer, and operations on meta tensors are slow.
@lru_cache(maxsize=1024)
def _empty(quantizer: TensorQuantizer, shape: tuple[int, ...]) -> QParams:
    return quantizer.empty_qparams(shape, "meta")
