"""Read a block that was written before into the model again, as it was when it was written: the inverse of `quark_layout.layout`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.model_tensors import attention_quantizers, state_name
from quark.checkpoint.region import Region
from quark.config.slot import PARAMETERS, Slot
from quark.modules import QuantizedLayer, QuantizerModule
from quark.modules.attention import PROBABILITIES
from quark.modules.layer_shape import LayerShape
from quark.modules.packed_layers import packed_meta
from quark.planning.plan import QuantPlan
from quark.quantizers import cast_finite
from quark_exporters.quark_layout.layout import output_quantizers
from quark_exporters.quark_layout.tensor_names import checkpoint_name, probabilities_name

__all__ = ["WrittenTensors", "read_block"]


class WrittenTensors(Protocol):
    """The tensors that were written."""

    def __contains__(self, name: object) -> bool:
        """Return whether a tensor of that full name is among them."""

    def read(self, name: str) -> Tensor:
        """Return a tensor, on the CPU."""


@torch.no_grad()
def read_block(model: nn.Module, plan: QuantPlan, options: ExportOptions, region: Region, written: WrittenTensors) -> None:
    """Set weights, scales and other tensors of a region to those that were written; changed in place.

    Args:
        model: Its quantized layers and the quantizers of attention are in place, with float weights and without scales.
        plan: Of the model.
        options: With which the tensors were written.
        region: The block.
        written: The tensors.
    """
    modules = region.modules(model)
    layers = {name: m for name, m in modules.items() if isinstance(m, QuantizedLayer)}
    attention = attention_quantizers(modules)
    outputs = output_quantizers(model, plan, layers)
    others = {f"{name}.{other}" for name, layer in layers.items() for other in layer.other_state()}
    inside = tuple(f"{name}." for name in (*layers, *attention))
    for name, tensor in region.state(model).items():
        if name in written and (name in others or not name.startswith(inside)):
            tensor.copy_(written.read(name))  # in place: tied modules share it
    for name, layer in layers.items():
        for slot in PARAMETERS:
            _read_parameter(name, layer, slot, options, written)
        shapes = LayerShape.of(layer)
        for slot, quantizer in ((Slot.input_tensors, layer.input_quantizer), (Slot.output_tensors, outputs.get(name))):
            name_of = partial(checkpoint_name, name, slot)
            _read_scales(quantizer, name_of, options, written, shapes.of_slot(slot))
    for name, quantizer in attention.items():
        owner, _, attribute = name.rpartition(".")
        if attribute == PROBABILITIES:
            _read_scales(quantizer, partial(probabilities_name, owner), options, written)
    for row in plan.attentions:
        for state in row.states if row.fused else ():
            if f"{row.name}.{state}" in attention:
                _read_scales(attention[f"{row.name}.{state}"], partial(state_name, row.name, state), options, written)


def _read_parameter(name: str, layer: QuantizedLayer, slot: Slot, options: ExportOptions, written: WrittenTensors) -> None:
    parameter: Tensor | None = getattr(layer, slot)
    if parameter is None:
        return
    quantizer: QuantizerModule | None = getattr(layer, slot.quantizer_attribute)
    own = checkpoint_name(name, slot, "")
    if quantizer is None or quantizer.quantizer.is_float:
        stored = layer.as_stored(written.read(own))
        layer._parameters[slot] = nn.Parameter(stored.to(parameter.device, parameter.dtype), requires_grad=False)
        return
    shape, tensor_quantizer = tuple(parameter.shape), quantizer.quantizer
    names = {suffix: checkpoint_name(name, slot, suffix) for suffix in packed_meta(tensor_quantizer, shape, options.pack_method)}
    stored_of = {suffix: written.read(full).to(parameter.device) for suffix, full in names.items() if full in written}
    stored_of[""] = layer.as_stored(stored_of[""])
    if options.weight_format == "fake_quantized":
        values = stored_of.pop("")
        qparams = tensor_quantizer.unpack_qparams(stored_of, shape, order=options.pack_method)
    else:
        codes, qparams = tensor_quantizer.unpack(stored_of, shape, order=options.pack_method)
        values = cast_finite(tensor_quantizer.dequantize(codes, qparams), parameter.dtype)
    quantizer.set_qparams(qparams)
    layer._parameters[slot] = nn.Parameter(values, requires_grad=False)


def _read_scales(
    quantizer: QuantizerModule | None,
    name_of: Callable[[str], str],
    options: ExportOptions,
    written: WrittenTensors,
    shape: tuple[int, ...] = (1,),
) -> None:
    """Set the scales of a static activation; ``shape`` is that of a batch of one, with the channels that may have a scale each."""
    if quantizer is None or quantizer.quantizer.is_dynamic or quantizer.quantizer.is_float:
        return
    suffixes = quantizer.quantizer.pack_qparams(quantizer.quantizer.empty_qparams(shape, "meta"), order=options.pack_method)
    stored: Mapping[str, Tensor] = {suffix: written.read(name_of(suffix)) for suffix in suffixes if name_of(suffix) in written}
    quantizer.set_qparams(quantizer.quantizer.unpack_qparams(dict(stored), shape, order=options.pack_method))
