"""A layer that runs from codes has its weight at hand while it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quark.config.layer import QLayerConfig
from quark.models.layers import QuantLinear
from quark.models.layers.layers_from_codes import runs_from_codes
from quark.models.layers.packed_weight import FormatPacking, PackedWeight
from quark_devkit.example_specs import int8_spec


def from_codes(linear: nn.Linear) -> Any:
    made = QuantLinear.from_float(linear, QLayerConfig(weight=int8_spec()))
    assert made.weight_quantizer is not None
    quantizer, weight = made.weight_quantizer.quantizer, linear.weight.detach()
    packing, qparams = FormatPacking(quantizer, "reorder", lambda codes: codes), quantizer.find_qparams(weight)
    tensors = packing.pack(quantizer.quantize(weight, qparams), qparams)
    return runs_from_codes(made, PackedWeight(packing, tensors, tuple(weight.shape), weight.dtype))


def test_the_weight_of_the_layer_that_computes_is_unpacked_once_and_that_of_another_is_its_own() -> None:
    one, other = from_codes(nn.Linear(8, 4)), from_codes(nn.Linear(8, 4))
    seen: list[Tensor] = []

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend([one.weight, one.weight, other.weight.clone()])
            return x

    one.input_quantizer = Reads()
    one(torch.randn(3, 8))
    assert seen[0].data_ptr() == seen[1].data_ptr()
    assert torch.equal(seen[2], other.weight)
    assert not torch.equal(one.weight, other.weight)
