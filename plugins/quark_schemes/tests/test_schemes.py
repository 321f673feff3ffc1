"""The documented scheme classes give the configurations of the named schemes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import quark
from quark.config.layer import Slot, levels
from quark.config.templates import QuantizationScheme, QuantizationSchemeCollection
from quark_schemes import schemes

REGISTERED: dict[str, Callable[[], QuantizationScheme]] = {
    "int4_wo_32": lambda: schemes.Int4WeightOnlyScheme(group_size=32),
    "int4_wo_64": lambda: schemes.Int4WeightOnlyScheme(group_size=64),
    "int4_wo_128": lambda: schemes.Int4WeightOnlyScheme(group_size=128),
    "int4_wo_per_channel": schemes.Int4WeightOnlyPerChannelScheme,
    "int3_wo_64": lambda: schemes.Int3WeightOnlyScheme(group_size=64),
    "int3_wo_128": lambda: schemes.Int3WeightOnlyScheme(group_size=128),
    "int2_wo_32": lambda: schemes.Int2WeightOnlyScheme(group_size=32),
    "int2_wo_64": lambda: schemes.Int2WeightOnlyScheme(group_size=64),
    "int8_wo_32": lambda: schemes.Int8WeightOnlyScheme(group_size=32),
    "int8_wo_per_channel": schemes.Int8WeightOnlyPerChannelScheme,
    "int4_wa_64": lambda: schemes.Int4WeightAndActivationScheme(group_size=64),
    "uint4_wo_32": lambda: schemes.Uint4WeightOnlyScheme(group_size=32),
    "uint4_wo_64": lambda: schemes.Uint4WeightOnlyScheme(group_size=64),
    "uint4_wo_128": lambda: schemes.Uint4WeightOnlyScheme(group_size=128),
    "uint4_wo_per_channel": schemes.Uint4WeightOnlyPerChannelScheme,
    "int8": schemes.Int8Scheme,
    "fp8": schemes.FP8Scheme,
    "fp8_per_head": schemes.FP8Scheme,
    "ptpc_fp8": schemes.PTPCFP8Scheme,
    "mxfp4": schemes.MXFP4Scheme,
    "mxfp4_weight_only": schemes.MXFP4WeightOnlyScheme,
    "mxfp6_e3m2": schemes.MXFP6E3M2Scheme,
    "mxfp6_e2m3": schemes.MXFP6E2M3Scheme,
    "mxfp4_mxfp6_e2m3": schemes.MXFP4_MXFP6E2M3Scheme,
    "mxfp4_fp8": schemes.MXFP4_FP8Scheme,
    "amdfp4": schemes.AmdFP4Scheme,
    "amdfp4_g32": lambda: schemes.AmdFP4Scheme(group_size=32),
    "amdfp4_global16": lambda: schemes.AmdFP4GlobalScaleScheme(group_size=16),
    "amdfp4_global32": lambda: schemes.AmdFP4GlobalScaleScheme(group_size=32),
    "nvfp4": schemes.FP4Block16ScaleE4M3Scheme,
    "int4_fp8": schemes.INT4_FP8Scheme,
    "mx6": schemes.MX6Scheme,
    "mx9": schemes.MX9Scheme,
    "bfp16": schemes.BFP16Scheme,
}
SEED = """int4_wo_32 int4_wo_64 int4_wo_128 int4_wo_per_channel int4_wa_64 uint4_wo_32 uint4_wo_64 uint4_wo_128 uint4_wo_per_channel
int8 fp8 ptpc_fp8 mxfp4 mxfp4_weight_only mxfp6_e3m2 mxfp6_e2m3 mxfp4_mxfp6_e2m3 mxfp4_fp8 amdfp4 amdfp4_g32 int4_fp8 mx6 bfp16
nvfp4 fp4_block16_scale_e4m3 amdfp4_global16 amdfp4_global32"""
"""The scheme names of the documentation, an alias among them."""


def test_every_documented_name_is_a_scheme_and_so_are_its_relatives() -> None:
    assert len(SEED.split()) == 27
    for name in (*SEED.split(), "mxfp6", "mx9"):
        assert name in quark.schemes()


def test_every_registered_scheme_has_a_class() -> None:
    ours = [r.name for r in quark.schemes() if quark.schemes().source(r.name).distribution == "quark-schemes"]
    assert sorted(ours) == sorted(REGISTERED)


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_a_class_gives_the_configuration_of_its_named_scheme(name: str) -> None:
    assert REGISTERED[name]().config == quark.schemes().load_config(name)()


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_each_call_builds_a_layer_configuration_of_its_own(name: str) -> None:
    scheme = QuantizationSchemeCollection().get_scheme(name)
    first, second, third = scheme.config, scheme.config, REGISTERED[name]().config
    assert first == second
    parts = [part for config in (first, second, third) for slot in Slot for part in levels(getattr(config, slot))]
    assert len({id(part) for part in parts}) == len(parts), "no tensor's spec is that of another"
    for part in levels(first.weight):
        part.group_size = 7
    first.input_tensors = None
    assert scheme.config == second == third


@pytest.mark.parametrize("name", ["mx6", "mx9"])
def test_the_block_size_of_microexponents_is_an_option(name: str) -> None:
    build = quark.schemes().load_config(name)
    assert [build(**o).weight.group_size for o in ({}, {"block_size": 16}, {"block_size": 32})] == [16, 16, 32]
    assert schemes.MX6Scheme(block_size=32).config == quark.schemes().load_config("mx6")(block_size=32)


def test_the_weight_of_each_scheme_has_the_bits_that_its_tensors_take() -> None:
    import torch

    from quark.config.describe import effective_bits
    from quark.numbers import number_format, quantizer_for

    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for name in REGISTERED:
        spec = quark.schemes().load_config(name)().weight
        quantizer = quantizer_for(spec, activation=False)
        values, qparams = quantizer.round_to_nearest(x)
        packed = quantizer.pack(quantizer.codes_of(values, qparams), qparams)
        # Zero points of symmetric schemes say nothing; what a channel or tensor shares is not counted.
        stored = sum(t.nbytes for key, t in packed.items() if not (key.startswith("zero_point") and qparams.zero_point is None))
        told = effective_bits(spec, lambda fmt: float(number_format(fmt).bits))
        assert told is not None
        assert 0 <= stored * 8 / x.numel() - told < 0.1, name
