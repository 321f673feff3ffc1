"""Quantizers compute the same in programs of ``torch.export`` as in a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.models.layers import QuantizerModule
from quark.numbers import ChannelsLast, quantizer_for, viewed

STATIC = QTensorConfig(dtype="int8", qscheme="per_tensor", observer_cls="PerTensorMinMaxObserver", symmetric=True, is_dynamic=False)
PER_TOKEN = QTensorConfig(dtype="int8", qscheme="per_channel", ch_axis=-1, symmetric=True, is_dynamic=True)
BLOCKS = QTensorConfig(dtype="fp4", qscheme="per_group", ch_axis=-1, group_size=32, scale_format="e8m0", is_dynamic=True)
X = torch.randn(3, 64)


class Model(nn.Module):
    def __init__(self, quantizer: QuantizerModule) -> None:
        super().__init__()
        self.quantizer = quantizer

    def forward(self, x: Tensor) -> Tensor:
        return self.quantizer(x) + 1


@pytest.mark.parametrize(
    "spec", [STATIC, STATIC.set(dtype="uint8", symmetric=False), PER_TOKEN, BLOCKS], ids=lambda s: f"{s.dtype.name} {s.qscheme.name}"
)
def test_a_program_computes_the_same(spec: TensorSpec) -> None:
    module = QuantizerModule(spec, activation=True)
    if not module.quantizer.is_dynamic:
        module.set_qparams(module.quantizer.find_qparams(X))
    model = Model(module)
    program = torch.export.export(model, (X,)).module()
    assert torch.equal(program(X * 1.5), model(X * 1.5))


def test_a_quantizer_of_which_the_spec_does_not_tell_all_is_refused() -> None:
    module = QuantizerModule(BLOCKS, activation=True, quantizer=viewed(quantizer_for(BLOCKS, activation=True), ChannelsLast(-2)))
    with pytest.raises(UnsupportedError, match="in a rearranged view of the tensor"):
        torch.export.export(Model(module), (X.repeat(16, 1),))
