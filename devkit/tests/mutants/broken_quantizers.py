"""Number formats with a quantizer of their own that is broken."""

from __future__ import annotations

from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import QParams, TensorQuantizer
from quark.numbers.from_spec import level_quantizer
from quark.numbers.single_level import SingleLevelQuantizer

from .broken_formats import Plain


class WritesItsSource(SingleLevelQuantizer):
    """A quantizer that clips the tensor it is given."""

    def round_to_nearest(self, x: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, QParams]:
        return super().round_to_nearest(x.clamp_(-1, 1), out=out)


class OwnQuantizer(Plain):
    def quantizer(self, levels: tuple[QTensorConfig, ...], *, activation: bool) -> TensorQuantizer | None:
        usual = level_quantizer(levels[0], activation=activation)
        return WritesItsSource(usual.spec, usual.granularity, usual.format, usual.observer_class)
