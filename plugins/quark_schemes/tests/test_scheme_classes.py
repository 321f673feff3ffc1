"""The documented scheme classes give what the named schemes give."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import quark
from quark.specs.layer import stages
from quark.templates import QuantizationScheme
from quark_schemes import scheme_classes as classes

REGISTERED: dict[str, Callable[[], QuantizationScheme]] = {
    "int4_wo_32": lambda: classes.Int4WeightOnlyScheme(group_size=32),
    "int4_wo_64": lambda: classes.Int4WeightOnlyScheme(group_size=64),
    "int4_wo_128": lambda: classes.Int4WeightOnlyScheme(group_size=128),
    "int4_wo_per_channel": classes.Int4WeightOnlyPerChannelScheme,
    "int4_wa_64": lambda: classes.Int4WeightAndActivationScheme(group_size=64),
    "uint4_wo_32": lambda: classes.Uint4WeightOnlyScheme(group_size=32),
    "uint4_wo_64": lambda: classes.Uint4WeightOnlyScheme(group_size=64),
    "uint4_wo_128": lambda: classes.Uint4WeightOnlyScheme(group_size=128),
    "uint4_wo_per_channel": classes.Uint4WeightOnlyPerChannelScheme,
    "int8": classes.Int8Scheme,
    "fp8": classes.FP8Scheme,
    "ptpc_fp8": classes.PTPCFP8Scheme,
    "mxfp4": classes.MXFP4Scheme,
    "mxfp4_weight_only": classes.MXFP4WeightOnlyScheme,
}
DESCRIBED: dict[str, tuple[Callable[[], QuantizationScheme], list[str], list[str]]] = {
    "mxfp6_e3m2": (classes.MXFP6E3M2Scheme, ["fp6_e3m2"], ["fp6_e3m2"]),
    "mxfp6_e2m3": (classes.MXFP6E2M3Scheme, ["fp6_e2m3"], ["fp6_e2m3"]),
    "mxfp4_mxfp6_e2m3": (classes.MXFP4_MXFP6E2M3Scheme, ["fp4"], ["fp6_e2m3"]),
    "mxfp4_fp8": (classes.MXFP4_FP8Scheme, ["fp4"], ["fp8_e4m3"]),
    "amdfp4": (classes.AmdFP4Scheme, ["fp4"], ["fp4"]),
    "amdfp4_global16": (lambda: classes.AmdFP4GlobalScaleScheme(group_size=16), ["fp4", "fp8_e5m3"], ["fp4", "fp8_e5m3"]),
    "nvfp4": (classes.FP4Block16ScaleE4M3Scheme, ["fp4", "fp8_e4m3"], ["fp4", "fp8_e4m3"]),
    "mx6": (classes.MX6Scheme, ["mx6"], ["mx6"]),
    "bfp16": (classes.BFP16Scheme, ["bfp16"], ["bfp16"]),
    "int4_fp8": (classes.INT4_FP8Scheme, ["fp8_e4m3", "int4"], ["fp8_e4m3"]),
}


def test_every_registered_scheme_has_a_class() -> None:
    ours = [r.name for r in quark.schemes() if quark.schemes().source(r.name).distribution == "quark-schemes"]
    assert set(ours) <= set(REGISTERED) | set(DESCRIBED)


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_a_class_gives_the_configuration_of_its_named_scheme(name: str) -> None:
    assert REGISTERED[name]().config == quark.schemes().load(name, "config")()


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_a_class_of_a_later_scheme_describes_its_formats(name: str) -> None:
    make, weight, inputs = DESCRIBED[name]
    config = make().config
    assert [stage.dtype.name for stage in stages(config.weight)] == weight
    assert [stage.dtype.name for stage in stages(config.input_tensors)] == inputs
    assert all(isinstance(stage.is_dynamic, bool | None) for stage in (*stages(config.weight), *stages(config.input_tensors)))
