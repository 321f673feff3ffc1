"""PackedQuantizer: a quantizer of an attention module that holds the scales of a checkpoint."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quark.config.layer import TensorSpec
from quark.errors import CheckpointError
from quark.modules.packed import Packed
from quark.modules.packed_layers import PackedScales
from quark.modules.quantizer_module import QuantizerModule
from quark.quantizers import quantizer_for

__all__ = ["PackedQuantizer", "packed_scales"]


def packed_scales(spec: TensorSpec, order: str) -> dict[str, Tensor]:
    """Return the stored scales of a per-tensor activation by suffix, on the meta device; empty where they are dynamic."""
    quantizer = quantizer_for(spec, activation=True)
    if quantizer.is_dynamic or quantizer.is_float:
        return {}
    return quantizer.pack_qparams(quantizer.empty_qparams((1,), "meta"), order=order)


class PackedQuantizer(PackedScales, Packed):
    """The scales of a quantizer, which a checkpoint loader fills and `unpack` converts to the quantizer.

    Args:
        spec: Spec of an activation with one scale per tensor.
        order: Order of 4-bit codes in a word in the checkpoint.
        stored: The module that holds the scales, if it is another one: a checkpoint stores scales of keys with the projection.
        largest: Upper bound of valid scales.
    """

    def __init__(self, spec: TensorSpec, order: str, stored: PackedScales | None = None, largest: float = math.inf) -> None:
        super().__init__(packed_scales(spec, order) if stored is None else {})
        self.spec = spec
        self.order = order
        self.largest = largest
        self._stored = (stored or self,)  # in a tuple, so that it is not registered a second time
        self._ready: QuantizerModule | None = None

    def unpack(self) -> QuantizerModule:
        """Return the quantizer, on the device of its scales.

        Raises:
            CheckpointError: The scales are not positive and finite: a loader that only warns of missing tensors leaves them uninitialized.
        """
        module = QuantizerModule(self.spec, activation=True)
        tensors = self._stored[0].tensors()
        if tensors:
            qparams = module.quantizer.unpack_qparams(tensors, (1,), order=self.order)
            if not bool(((qparams.scale > 0) & (qparams.scale <= self.largest) & torch.isfinite(qparams.scale)).all()):
                raise CheckpointError(
                    f"a scale inside attention is {qparams.scale.tolist()}, which is not valid: the checkpoint says in softmax_quant_spec "
                    "or kv_cache_post_rope that it holds such scales and lacks them. import_model_from_safetensors names them, and leaves "
                    "probabilities without scales float"
                )
            module.set_qparams(qparams)
        return module.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the quantizer's output; the first call unpacks, and frees the packed scales."""
        if self._ready is None:
            self._ready = self.unpack()
            self._buffers.clear()
            self._stored = (self,)
        output: Tensor = self._ready(x)
        return output
