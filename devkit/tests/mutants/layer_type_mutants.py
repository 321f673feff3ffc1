"""Layer types with one thing wrong each."""

from __future__ import annotations

from typing import Any, Self

import attrs
import torch
from torch import Tensor, nn

from quark.base.lazy import ObjectRef
from quark.config.layer import QLayerConfig, Slot, TensorSpec
from quark.config.tensor import QTensorConfig
from quark.models.layers import QuantizedConvolution, QuantizedLayer
from quark.models.layers.layer_types import LayerShape
from quark.numbers import TensorQuantizer
from quark.plugins import LayerTypeRecord

from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS", "OF_FOUR_SIZES"]


class Gained(nn.Linear):
    """A linear layer whose output is multiplied by a gain: the float class of the healthy layer type."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.ones(outputs))
        self.register_buffer("offset", torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.gain + self.offset
        return y


class OwnTransposed(nn.ConvTranspose1d):
    """A class of transposed convolutions that nobody else claims."""


class OwnStrided(nn.Conv1d):
    """A class of convolutions that is made with four sizes."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__(inputs, outputs, kernel, stride)


class OwnEmbedding(nn.Embedding):
    """A class of embeddings that nobody else claims."""


TRANSPOSED = {"layer": ObjectRef(OwnTransposed), "planned_as": None, "transposed": True}
LOOKUP = {"layer": ObjectRef(OwnEmbedding), "planned_as": None, "lookup": True}


class QuantGained(QuantizedLayer, Gained):  # type: ignore[misc]
    """The healthy quantized class from which the mutants differ in one thing."""


class ForgetsGain(QuantizedLayer, Gained):  # type: ignore[misc]
    def product(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        x = x if self.input_quantizer is None else self.input_quantizer(x)
        return nn.functional.linear(x, self.weight, self.bias)


class CopiesTensors(QuantGained):
    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        quantized = super().from_float(layer, config)
        quantized._parameters = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in layer.named_parameters()}
        return quantized


class CopiesTheWeight(QuantGained):
    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        quantized = super().from_float(layer, config)
        quantized._parameters["weight"] = nn.Parameter(layer.get_parameter("weight").detach().clone())
        return quantized


class ForgetsHooks(QuantGained):
    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        quantized = super().from_float(layer, config)
        quantized._forward_hooks.clear()
        return quantized


class AlwaysFloat32(QuantGained):
    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        quantized = super().from_float(layer, config)
        if layer.weight.dtype is not torch.float64:
            quantized._parameters["weight"] = nn.Parameter(layer.weight.detach().float())  # type: ignore[operator]
        return quantized


class LeavesMeta(QuantGained):
    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        quantized = super().from_float(layer, config)
        if layer.weight.is_meta:
            quantized._parameters["weight"] = nn.Parameter(torch.empty_like(layer.weight, device="cpu"))  # type: ignore[arg-type]
        return quantized


class RenamesState(QuantGained):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}factor"] = destination.pop(f"{prefix}gain")


class SavesOtherValues(QuantGained):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}gain"] = 2 * destination[f"{prefix}gain"]


class IgnoresInput(QuantGained):
    def product(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return Gained.forward(self, x)


class IgnoresOutput(QuantGained):
    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.product(x, *args, **kwargs)


class KeepsFloatWeight(QuantGained):
    """Computes with the weight that it had at first, which is not the one that is exported."""

    @classmethod
    def from_float(cls, layer: nn.Module, config: QLayerConfig) -> Self:
        quantized = super().from_float(layer, config)
        quantized.first = layer.weight.detach().clone()  # type: ignore[operator]
        return quantized

    def product(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return nn.functional.linear(x, self.first, self.bias) * self.gain + self.offset


class LosesGain(QuantGained):
    """Says that it has no further tensors, so that none are exported."""

    def other_state(self) -> dict[str, Tensor]:
        return {}


class ByInput(QuantizedLayer, OwnTransposed):  # type: ignore[misc]
    """Has scales of axis 0 of the weight as torch keeps it: input channels of a transposed convolution."""


class QuantStrided(QuantizedConvolution, OwnStrided):  # type: ignore[misc]
    """A healthy one too."""


class ForgetsGroups(QuantizedConvolution, OwnTransposed):  # type: ignore[misc]
    """Takes the weight of all groups for one matrix."""

    @classmethod
    def quantizer_of(cls, slot: Slot, spec: TensorSpec, shape: LayerShape) -> TensorQuantizer:
        return super().quantizer_of(slot, spec, attrs.evolve(shape, groups=1))


class ByFeature(QuantizedLayer, OwnEmbedding):  # type: ignore[misc]
    """Has scales of features where scales of tokens are asked for."""

    @classmethod
    def quantizer_of(cls, slot: Slot, spec: TensorSpec, shape: LayerShape) -> TensorQuantizer:
        own = spec.set(ch_axis=1) if isinstance(spec, QTensorConfig) and spec.ch_axis == 0 else spec
        return super().quantizer_of(slot, own, shape)


def record_of(quantized: type[QuantizedLayer] | None = QuantGained, **fields: Any) -> LayerTypeRecord:
    usual = {"name": "mutant_layer", "layer": ObjectRef(Gained), "quantized": quantized and ObjectRef(quantized), "planned_as": "linear"}
    return LayerTypeRecord(**(usual | fields))


def mutant(check: str, about: str, quantized: type[QuantizedLayer] | None = QuantGained, says: str = "", **fields: Any) -> Mutant:
    return Mutant(f"layer_type:{check}", about, (record_of(quantized, **fields),), says=says)


HEALTHY = (record_of(),)
OF_FOUR_SIZES = (record_of(QuantStrided, layer=ObjectRef(OwnStrided), planned_as=None),)
MUTANTS = (
    Mutant("layer_type:is_found_by_its_class", "claims a class that another claims", (record_of(), record_of(name="another_layer"))),
    mutant("is_planned_as_a_known_type", "is planned as nothing that is there", planned_as="no_such_layer"),
    mutant("is_planned_as_a_known_type", "is planned as indices", planned_as="embedding"),
    mutant("says_whether_it_takes_indices", "says that its input is indices", lookup=True, planned_as="embedding"),
    mutant("computes_what_the_layer_computes", "forgets the gain", ForgetsGain),
    mutant("keeps_what_the_layer_has", "copies tensors", CopiesTensors),
    mutant("keeps_what_the_layer_has", "copies the weight", CopiesTheWeight, "copies the weight before anything is rounded"),
    mutant("keeps_what_the_layer_has", "forgets hooks", ForgetsHooks),
    mutant("keeps_dtype_and_device", "makes float32 of 16-bit weights", AlwaysFloat32),
    mutant("keeps_dtype_and_device", "makes data up", LeavesMeta),
    mutant("has_the_layout_it_says", "says that its weight is transposed", transposed=True),
    mutant("has_a_scale_for_each_output", "has scales of input channels", ByInput, **TRANSPOSED),
    mutant("has_a_scale_for_each_output", "forgets the groups", ForgetsGroups, **TRANSPOSED),
    mutant("has_a_scale_for_each_output", "has scales of features", ByFeature, "has 48 scales, not 32", **LOOKUP),
    mutant("saves_what_the_float_layer_loads", "saves a tensor under another name", RenamesState),
    mutant("saves_what_the_float_layer_loads", "saves other values", SavesOtherValues, "values that differ from the float layer's in gain"),
    mutant("applies_its_quantizers", "does not quantize its input", IgnoresInput),
    mutant("applies_its_quantizers", "does not quantize its output", IgnoresOutput),
    mutant("is_quantized_exported_and_loaded", "computes with another weight than it exports", KeepsFloatWeight),
    mutant("is_quantized_exported_and_loaded", "does not export all of its tensors", LosesGain),
)
