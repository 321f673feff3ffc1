"""`AwqStorage`: scales at the ends of their dtype, and layers that the layout cannot hold."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import quark
from quark.config.layer import QLayerConfig
from quark.errors import UnsupportedError
from quark.models.layers.coded_layer import CodedLayer
from quark.numbers import QParams
from quark_devkit.small_models import run_config
from quark_exporters.awq import SCALE_TYPES, AwqStorage

ROWS, COLUMNS, GROUP = 8, 64, 32


def stored(scales: torch.Tensor, scale_type: str) -> torch.Tensor:
    """Scales of a layer as they are stored, ``[O, groups]``."""
    config = run_config("int4_wo_32").global_quant_config
    layer = CodedLayer(config, torch.ones(ROWS, COLUMNS, dtype=torch.int8), QParams(scales))
    return AwqStorage(scale_type).stored(layer)["scales"].t()


@pytest.mark.parametrize("scale_type", ["float16", "bfloat16"])
def test_scales_below_the_dtypes_range_become_its_smallest_number_and_not_zero(scale_type: str) -> None:
    """A scale of 0 would make a whole group 0."""
    dtype = SCALE_TYPES[scale_type]
    smallest = 2.0**-24 if scale_type == "float16" else 2.0**-133
    scales = torch.tensor([1.0, 3 * smallest, 1.4 * smallest, 0.4 * smallest]).repeat(ROWS * COLUMNS // GROUP // 4).reshape(ROWS, -1)
    found = stored(scales, scale_type)
    assert found.dtype is dtype
    assert found.unique().tolist() == [smallest, 3 * smallest, 1.0]
    assert torch.equal(found[scales >= smallest], scales[scales >= smallest].to(dtype)), "others are rounded to nearest"


def test_scales_above_the_dtypes_range_are_refused_with_a_wider_one() -> None:
    scales = torch.full((ROWS, COLUMNS // GROUP), 70_000.0)
    with pytest.raises(UnsupportedError, match=r"a scale is 7e\+04, too large for float16. Export with the option scale_type=bfloat16"):
        stored(scales, "float16")
    assert torch.equal(stored(scales, "bfloat16").float(), scales.bfloat16().float())


def test_output_channels_counted_from_the_last_axis_are_the_same_channels() -> None:
    config = run_config("int4_wo_per_channel").global_quant_config
    from_the_end = attrs.evolve(config, weight=attrs.evolve(config.weight, ch_axis=-2))
    assert AwqStorage().why_not(config, (ROWS, COLUMNS)) is AwqStorage().why_not(from_the_end, (ROWS, COLUMNS)) is None
    columns = attrs.evolve(config, weight=attrs.evolve(config.weight, ch_axis=1))
    assert AwqStorage().why_not(columns, (ROWS, COLUMNS)) == "AWQ has scales for groups of input channels, not per_channel"


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("int4_wo_32", None),
        ("uint4_wo_32", None),
        ("fp8", "its input is quantized, but AWQ quantizes only weights"),
        ("mxfp4_weight_only", "AWQ stores int4 without or uint4 with zero points, not"),
        (None, "its weight is float"),
    ],
)
def test_a_layer_that_it_does_not_hold_has_a_reason(scheme: str | None, reason: str | None) -> None:
    config: Any = QLayerConfig() if scheme is None else quark.schemes().load_config(scheme)()
    found = AwqStorage().why_not(config, (16, 64))
    assert found is None if reason is None else str(found).startswith(reason)


def test_output_channels_fill_words() -> None:
    config = quark.schemes().load_config("int4_wo_32")()
    assert AwqStorage().why_not(config, (12, 64)) == "AWQ needs a multiple of 8 output channels, but the weight has 12"
    assert AwqStorage().why_not(config, (24, 64)) is None
