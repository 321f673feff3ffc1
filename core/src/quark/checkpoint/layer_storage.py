"""LayerStorage: how a layout names and packs the tensors of a quantized linear layer, and back.

Writing and reading share one.

A layout whose codes are packed otherwise than their number formats do (``qweight``, ``weight_packed``, …)
implements `LayerStorage`; `quark.checkpoint.CheckpointExporter` and `quark.checkpoint.StorageReader` do the
rest, for whole models.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from quark.checkpoint.exported_layer import ExportedLayer
from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.slot import Slot
from quark.models.hf.dequantizer import LayerCodes
from quark.models.layers.coded_layer import CodedLayer
from quark.numbers import quantizer_for

__all__ = ["LayerStorage", "layer_codes", "meta_tensors", "tensors_of"]


class LayerStorage(Protocol):
    """Names and packs the tensors of a quantized linear layer.

    All methods are pure functions of their arguments.
    """

    def __hash__(self) -> int: ...

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        """Return why a layer with a weight of that shape, so quantized, cannot be stored.

        None where it can.
        """

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        """Return the tensors of a layer for which `why_not` gives None, by the last part of their names.

        Works on meta tensors.
        """

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        """Undo `stored`, for a layer with a weight of that shape."""


def layer_codes(
    layer: str, config: QLayerConfig, shape: tuple[int, ...], storage: LayerStorage, names: Mapping[str, str]
) -> tuple[LayerCodes, ...]:
    """Return how a stored layer can be written again.

    Nothing where its input is static and has no stored scale.

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


def tensors_of(layer: ExportedLayer, storage: LayerStorage) -> Mapping[str, Tensor]:
    """Return the tensors of a layer, by the last part of their names.

    Nothing for one whose weight is float.
    """
    if not layer.is_quantized(Slot.weight):
        return {}
    if layer.is_meta:
        return meta_tensors(storage, layer.config, layer.shape)
    return storage.stored(layer.coded())


def meta_tensors(storage: LayerStorage, config: QLayerConfig, shape: tuple[int, ...]) -> Mapping[str, Tensor]:
    """Return the stored tensors of a layer with a weight of that shape, by name, on the meta device.

    Layers of one shape share them.
    """
    return _on_meta(storage, _key(config.weight), _key(config.input_tensors), shape)


def _key(spec: TensorSpec | None) -> TensorSpec | None:
    """Return a spec that can be a key of a cache."""
    return tuple(spec) if isinstance(spec, list) else spec


# Operations on meta tensors are slow, and a model has few kinds of layers.
@lru_cache(maxsize=1024)
def _on_meta(storage: LayerStorage, weight: TensorSpec, inputs: TensorSpec | None, shape: tuple[int, ...]) -> Mapping[str, Tensor]:
    return storage.stored(CodedLayer.empty(QLayerConfig(weight=weight, input_tensors=inputs), shape))
