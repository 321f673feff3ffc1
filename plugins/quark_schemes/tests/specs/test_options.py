"""The documented options of the ``*Spec`` helpers reach the quantizer."""

from typing import Any

import pytest
import torch

from quark.config.tensor import QTensorConfig
from quark.numbers import quantizer_for
from quark.plugins import documented_object
from quark_schemes.specs.floats import FP8E4M3PerTensorSpec
from quark_schemes.specs.integer import Int4PerTensorSpec, Int8PerTensorSpec, Uint8PerTensorSpec
from quark_schemes.specs.options import PER_TENSOR_OBSERVERS


@pytest.mark.parametrize("method", PER_TENSOR_OBSERVERS)
@pytest.mark.parametrize("helper", [Int8PerTensorSpec, Uint8PerTensorSpec, Int4PerTensorSpec, FP8E4M3PerTensorSpec])
def test_every_documented_observer_method_quantizes_a_tensor(helper: Any, method: str) -> None:
    spec = helper(observer_method=method, is_dynamic=False).to_quantization_spec()
    quantizer = quantizer_for(spec, activation=False)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    if method == "histogrampro" and helper is FP8E4M3PerTensorSpec:
        assert "supports integers" in (quantizer.shape_error((64, 64)) or "")
        return
    assert quantizer.shape_error((64, 64)) is None
    y, _ = quantizer.round_to_nearest(x)
    unsigned_symmetric = helper is Uint8PerTensorSpec and spec.symmetric
    step = 8 / (15 if helper is Int4PerTensorSpec else 255)
    assert unsigned_symmetric or float((y - x).abs().mean()) < step


@pytest.mark.parametrize("helper", ["Int8PerTensorSpec", "FP8E4M3PerTensorSpec", "FP8E5M2PerTensorSpec"])
def test_helpers_pass_options_on_and_json_keeps_them(helper: str) -> None:
    made = documented_object(helper)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    scales = {}
    for percentile in (90.0, 99.9):
        spec = made(observer_method="percentile", observer_options={"percentile": percentile}).to_quantization_spec()
        assert QTensorConfig.from_dict(spec.to_dict()) == spec
        assert spec.to_dict()["observer_options"] == {"percentile": percentile}
        scales[percentile] = float(quantizer_for(spec, activation=False).find_qparams(x).scale)
    assert scales[90.0] < scales[99.9]
    assert "observer_options" not in made().to_quantization_spec().to_dict(), "readers that know no such key are spared it"


@pytest.mark.parametrize("helper", ["Int4PerGroupSpec", "Uint4PerGroupSpec", "Int8PerGroupSpec"])
def test_groups_are_static_where_nothing_is_said(helper: str) -> None:
    assert documented_object(helper)(ch_axis=-1, group_size=32).to_quantization_spec().is_dynamic is False


MODES = ("even", "floor", "ceil", "rceil")
BLOCKS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("OCP_MXFP8E4M3Spec", "OCP_MXFP8E5M2Spec", "OCP_MXFP6E3M2Spec", "OCP_MXFP6E2M3Spec", "OCP_MXFP4Spec")},
    **{name: {} for name in ("OCP_MXINT8Spec", "OCP_MXFP4DiffsSpec", "BFP16Spec")},
    "MX6Spec": {"block_size": 16},
    "MX9Spec": {"block_size": 16},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("helper", BLOCKS)
def test_every_helper_of_blocks_takes_the_mode_of_its_scales_by_one_name_and_passes_it_on(helper: str, mode: str) -> None:
    spec = documented_object(helper)(ch_axis=-1, scale_calculation_mode=mode, **BLOCKS[helper]).to_quantization_spec()
    assert spec.scale_calculation_mode == mode
    assert quantizer_for(spec, activation=False).shape_error((4, 64)) is None
