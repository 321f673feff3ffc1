"""StoredLayer: a linear layer that holds a layout's tensors while a checkpoint is loaded, and becomes the quantized layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quark.checkpoint.layer_storage import LayerStorage, empty_layer
from quark.config.layer import QLayerConfig
from quark.modules import QuantizedLayer, quantized_class
from quark.modules.layers import linear_weight
from quark.modules.packed import Packed
from quark.modules.packed_layers import without_weights

__all__ = ["StoredLayer"]


class StoredLayer(Packed):
    """A linear layer with the tensors of a `LayerStorage`, by their own names; a layer whose weight is float keeps it.

    Args:
        layer: The float layer; its tensors may be on any device and are not used.
        config: The quantization of the layer.
        name: Full name of the layer in its model, for messages.
        storage: Of the layout.
    """

    def __init__(self, layer: nn.Module, config: QLayerConfig, name: str, storage: LayerStorage) -> None:
        super().__init__()
        weight = linear_weight(layer)
        self._shape = tuple(weight.shape)
        self._config, self._name, self._storage = config, name, storage
        self._quantized = (quantized_class(layer).from_float(without_weights(layer), config),)  # in a tuple: not a submodule
        self._leaves: tuple[str, ...] = ()
        bias = getattr(layer, "bias", None)
        self.register_parameter("bias", None if bias is None else _empty(bias))
        if config.weight is None:
            self.register_parameter("weight", _empty(weight))
            return
        stored = storage.stored(empty_layer(config, self._shape))
        self._leaves = tuple(stored)
        for leaf, tensor in stored.items():
            self.register_buffer(leaf, tensor)

    @torch.no_grad()
    def unpack(self) -> QuantizedLayer:
        """Return the quantized layer of the stored tensors, on their device.

        Raises:
            CheckpointError: A scale is not valid.
        """
        layer = self._quantized[0]
        layer._parameters["bias"] = self._parameters["bias"]
        if self._config.weight is None:
            layer._parameters["weight"] = self._parameters["weight"]
            return layer.train(self.training)
        coded = self._storage.restored(self._config, self._shape, {leaf: self.get_buffer(leaf) for leaf in self._leaves})
        coded.put_into(layer, self._name, keeps_codes=False)
        return layer.train(self.training)

    def extra_repr(self) -> str:
        """Return the shape of the weight and what is stored, for ``repr``."""
        return f"weight {list(self._shape)}, stored as {', '.join(self._leaves) or 'weight'}"


def _empty(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
