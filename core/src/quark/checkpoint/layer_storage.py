"""LayerStorage: how a layout names and packs the tensors of a quantized linear layer, and back. Writing and reading share one.

A layout with a vocabulary of its own (``qweight``, ``weight_packed``, …) implements `LayerStorage`; `storage_parts` and
`quark.checkpoint.stored_layer` do the rest, for whole models.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from quark.checkpoint import LayerCodes
from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.model_tensors import attention_quantizers, plain_parts, state_parts
from quark.checkpoint.region import WHOLE, Region
from quark.checkpoint.shard_writer import Part
from quark.config.layer import QLayerConfig, TensorSpec
from quark.modules import QuantizedLayer, QuantizerModule
from quark.modules.coded_layer import CodedLayer
from quark.modules.packed_layers import checked_codes
from quark.planning.plan import QuantPlan
from quark.quantizers import QParams, quantizer_for

__all__ = ["CodedLayer", "LayerStorage", "empty_layer", "layer_codes", "storage_parts"]


class LayerStorage(Protocol):
    """Names and packs the tensors of a quantized linear layer. All methods are pure functions of their arguments."""

    def __hash__(self) -> int: ...

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        """Return why a layer with a weight of that shape, so quantized, cannot be stored; None where it can."""

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        """Return the tensors of a layer for which `why_not` gives None, by the last part of their names; works on meta tensors."""

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        """Undo `stored`, for a layer with a weight of that shape."""


def layer_codes(
    layer: str, config: QLayerConfig, shape: tuple[int, ...], storage: LayerStorage, names: Mapping[str, str]
) -> tuple[LayerCodes, ...]:
    """Return how a stored layer can be written again; nothing where its input is static and has no stored scale.

    Args:
        layer: Its full name.
        config: How it is quantized.
        shape: Of its weight.
        storage: Of the layout.
        names: Full name of each of its stored tensors, by the name that ``storage`` has for it.
    """
    inputs = None if config.input_tensors is None else quantizer_for(config.input_tensors, activation=True)
    if inputs is not None and not inputs.is_dynamic and not any(leaf.startswith("input_") for leaf in names):
        return ()

    def read(tensors: Mapping[str, Tensor]) -> CodedLayer:
        return storage.restored(config, shape, {leaf: tensors[name] for leaf, name in names.items()})

    return (LayerCodes(name=layer, config=config, shape=shape, read=read),)


def storage_parts(model: nn.Module, plan: QuantPlan, options: ExportOptions, storage: LayerStorage, region: Region = WHOLE) -> list[Part]:
    """Return a part for each quantized layer and for each other tensor of a region, and for the scales of keys and values.

    Args:
        model: The quantized model, or its skeleton; `LayerStorage.why_not` has refused none of its layers.
        plan: Of the model.
        options: Of the export.
        storage: Of the layout.
        region: What is written.
    """
    modules = region.modules(model)
    layers = {name: m for name, m in modules.items() if isinstance(m, QuantizedLayer)}
    coded = {name: layer for name, layer in layers.items() if layer.weight_quantizer is not None}
    others = {f"{name}.{other}" for name, layer in layers.items() for other in ("bias", *layer.other_state())}
    others |= {f"{name}.weight" for name in layers.keys() - coded.keys()}
    plain = plain_parts(region.state(model), [*layers, *attention_quantizers(modules)], others)
    parts = [_layer_part(name, layer, storage) for name, layer in coded.items()]
    return [*plain, *parts, *map(_as_vectors, state_parts(model, plan.attentions, layers, options))]


def _as_vectors(part: Part) -> Part:
    """Return the part with each scale in the shape ``[1]``, on which readers of compressed-tensors insist; others take both shapes."""
    return Part(
        {name: tensor.reshape(1) for name, tensor in part.meta.items()},
        lambda: {name: tensor.reshape(1) for name, tensor in part.make().items()},
    )


def _layer_part(name: str, layer: QuantizedLayer, storage: LayerStorage) -> Part:
    config, weight = layer.layer_config, layer.weight
    assert isinstance(weight, Tensor)
    meta = _meta(storage, _key(config.weight), _key(config.input_tensors), tuple(weight.shape))

    def make() -> dict[str, Tensor]:
        quantizer = layer.weight_quantizer
        assert quantizer is not None
        assert quantizer.qparams is not None
        codes = checked_codes(f"{name}.weight", quantizer, weight)
        coded = CodedLayer(config, codes, quantizer.qparams, _static_scale(layer.input_quantizer))
        return {f"{name}.{leaf}": tensor for leaf, tensor in storage.stored(coded).items()}

    return Part({f"{name}.{leaf}": tensor for leaf, tensor in meta.items()}, make)


def _static_scale(module: QuantizerModule | None) -> QParams | None:
    return None if module is None or module.quantizer.is_dynamic or module.quantizer.is_float else module.qparams


def empty_layer(config: QLayerConfig, shape: tuple[int, ...]) -> CodedLayer:
    """Return a layer with a weight of that shape on the meta device."""
    assert config.weight is not None
    quantizer = quantizer_for(config.weight, activation=False)
    qparams = quantizer.empty_qparams(shape, "meta")
    codes = quantizer.quantize(torch.empty(shape, dtype=torch.float32, device="meta"), qparams)
    inputs = None if config.input_tensors is None else quantizer_for(config.input_tensors, activation=True)
    is_static = inputs is not None and not inputs.is_dynamic and not inputs.is_float
    return CodedLayer(config, codes, qparams, inputs.empty_qparams((1,), "meta") if inputs is not None and is_static else None)


def _key(spec: TensorSpec | None) -> TensorSpec | None:
    """Return a spec that can be a key of a cache."""
    return tuple(spec) if isinstance(spec, list) else spec


# Operations on meta tensors are slow, and a model has few kinds of layers.
@lru_cache(maxsize=1024)
def _meta(storage: LayerStorage, weight: TensorSpec, inputs: TensorSpec | None, shape: tuple[int, ...]) -> Mapping[str, Tensor]:
    return storage.stored(empty_layer(QLayerConfig(weight=weight, input_tensors=inputs), shape))
