"""What the runner does to a layer beside its weight."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from quark.algorithms import Hessian, Rounding, RoundToNearest
from quark.calibration.batches import calls
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.planning.plan import make_plan
from quark.plugins import documented_object
from quark.runs.quantize_block import quantize_block, quantize_blocks
from quark.runs.sink import InPlaceSink

INT8 = documented_object("Int8PerTensorSpec")(is_dynamic=False, symmetric=True).to_quantization_spec()


class Calibrated(RoundToNearest):
    """Rounds to nearest, but wants to see inputs first, so that layers are finished in the middle of the forwards."""

    needs = (Hessian,)


@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize("rounding", [RoundToNearest(), Calibrated()], ids=lambda r: type(r).__name__)
def test_a_bias_is_rounded_to_nearest_by_its_own_spec(rounding: Rounding, two_passes: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    before = [layer.bias.detach().clone() for layer in model]
    plan = make_plan(model, QConfig(global_quant_config=QLayerConfig(weight=INT8, bias=INT8)), None)
    quantize_blocks(model, plan, calls([torch.randn(24, 16)]), rounding, InPlaceSink(model), two_passes=two_passes)
    for layer, bias in zip(model, before, strict=True):
        scale = layer.bias_quantizer.scale
        assert scale is not None, "the bias has not been rounded"
        codes = layer.bias / scale
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
        assert codes.abs().max().round() in (127, 128), "the largest takes the whole range"
        assert (layer.bias - bias).abs().max() <= scale / 2 * (1 + 1e-5)
        assert not torch.equal(layer.bias, bias)


def test_what_happens_to_one_block_is_one_function_of_less_than_sixty_lines() -> None:
    assert len(inspect.getsource(quantize_block).splitlines()) < 60
