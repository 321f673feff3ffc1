"""PackedQuantizer: a quantizer of an attention module that holds the scales of a checkpoint."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quark.config.layer import TensorSpec
from quark.errors import CheckpointError
from quark.models.layers.packed_layers import Packed, PackedScales, packed_scales
from quark.models.layers.quantizer_module import QuantizerModule
from quark.numbers import quantizer_for

__all__ = ["PackedQuantizer", "ScalesOf"]


class ScalesOf:
    """Stored scales that are buffers of another module, where loaders look for them.

    ``k_scale`` of an attention module is one.

    Args:
        owner: The module, which gets the buffers.
        name: What their names begin with, such as ``k``.
        tensors: The scales by suffix, from `quark.models.layers.packed_layers.packed_scales`.
    """

    def __init__(self, owner: nn.Module, name: str, tensors: dict[str, Tensor]) -> None:
        self._owner = owner
        self._names = {suffix: f"{name}_{suffix}" for suffix in tensors}
        for suffix, tensor in tensors.items():
            owner.register_buffer(self._names[suffix], tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by suffix."""
        return {suffix: self._owner.get_buffer(name) for suffix, name in self._names.items()}

    def free(self) -> None:
        """Take the buffers from the module again."""
        for name in self._names.values():
            del self._owner._buffers[name]
        self._names = {}


class PackedQuantizer(PackedScales, Packed):
    """The scales of a quantizer, which a checkpoint loader fills and `unpack` converts to the quantizer.

    Args:
        spec: Spec of an activation with one scale per tensor.
        order: Order of 4-bit codes in a word in the checkpoint.
        stored: What holds the scales, if it is not this module: a checkpoint stores scales of keys with the
            projection, or, where that is fused, with the attention module.
        largest: Upper bound of valid scales.
    """

    def __init__(self, spec: TensorSpec, order: str, stored: PackedScales | ScalesOf | None = None, largest: float = math.inf) -> None:
        own = packed_scales(quantizer_for(spec, activation=True), (1,), order) if stored is None else {}
        super().__init__(own, spec)
        self.spec = spec
        self.order = order
        self.largest = largest
        self._stored: tuple[PackedScales | ScalesOf] = (stored or self,)  # in a tuple, so that it is not registered a second time

    def unpack(self) -> QuantizerModule:
        """Return the quantizer, on the device of its scales.

        Raises:
            CheckpointError: The scales are not positive and finite: a loader that only warns of missing
                tensors leaves them uninitialized.
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
            if isinstance(self._stored[0], ScalesOf):
                self._stored[0].free()
        return module.train(self.training)
