"""The hooks of quark-schemes. No torch here: records point at code by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark.plugins import FormatRecord, ObserverRecord, SchemeRecord, hookimpl

_SPECS = "quark_schemes.specs:"
_CLASSES = "quark_schemes.schemes.classes:"
_EMULATION = {
    f"quark.torch.{module}:{name}": f"quark_schemes.emulation:{name}"
    for module, names in {
        "kernel.mx": ("dq_mxfp4", "qdq_mxfp4"),
        "kernel.hw_emulation.hw_emulation_interface": ("fake_quantize_fp4_fp6_per_group_with_scale", "dequantize_fp4_fp6_per_group"),
        "quantization.utils": ("even_round", "reshape_to_blocks"),
        "utils.pack": ("create_pack_method",),
    }.items()
    for name in names
}
"""The functions that runtimes import to emulate MX formats, by module and name in AMD Quark's public API."""


def _specs(*names: str) -> dict[str, str]:
    return {name: _SPECS + name for name in names}


def _classes(*names: str) -> dict[str, str]:
    return {name: _CLASSES + name for name in names}


def _format(name: str, value: str, bits: float, summary: str, *specs: str, **more: Any) -> FormatRecord:
    exports = _specs(*specs) | more.pop("exports", {})
    return FormatRecord(name=name, summary=summary, bits=bits, format=f"quark_schemes.formats.{value}", exports=exports, **more)


@hookimpl
def quark_register_formats() -> Iterator[FormatRecord]:
    """The number formats, with the helpers of AMD Quark's public API that build their specs."""
    yield _format("int2", "integer:INT2", 2, "integers of 2 bits", "Int2PerGroupSpec")
    yield _format("uint2", "integer:UINT2", 2, "unsigned integers of 2 bits")
    yield _format("int3", "integer:INT3", 3, "integers of 3 bits", "Int3PerChannelSpec", "Int3PerGroupSpec")
    int4 = ("Int4PerTensorSpec", "Int4PerChannelSpec", "Int4PerGroupSpec")
    uint4 = ("Uint4PerTensorSpec", "Uint4PerChannelSpec", "Uint4PerGroupSpec")
    int8 = ("Int8PerTensorSpec", "Int8PerChannelSpec", "Int8PerGroupSpec")
    uint8 = ("Uint8PerTensorSpec", "Uint8PerChannelSpec", "Uint8PerGroupSpec")
    yield _format("int4", "integer:INT4", 4, "integers of 4 bits", *int4)
    yield _format("uint4", "integer:UINT4", 4, "unsigned integers of 4 bits", *uint4)
    yield _format("int8", "integer:INT8", 8, "integers of 8 bits", *int8)
    yield _format("uint8", "integer:UINT8", 8, "unsigned integers of 8 bits", *uint8)
    yield _format("int16", "integer:INT16", 16, "integers of 16 bits")
    e4m3 = ("FP8E4M3PerTensorSpec", "FP8E4M3PerChannelSpec", "FP8E4M3PerGroupSpec", "OCP_MXFP8E4M3Spec")
    e5m2 = ("FP8E5M2PerTensorSpec", "FP8E5M2PerChannelSpec", "FP8E5M2PerGroupSpec", "OCP_MXFP8E5M2Spec")
    yield _format("fp8_e4m3", "minifloat:FP8_E4M3", 8, "FP8 E4M3 (OCP, finite only): ±448", *e4m3)
    yield _format("fp8_e5m2", "minifloat:FP8_E5M2", 8, "FP8 E5M2 (OCP): ±57344", *e5m2)
    yield _format("fp8_e5m3", "minifloat:FP8_E5M3", 8, "unsigned FP8 E5M3, for scales: up to 114688", "FP8E5M3PerTensorSpec")
    yield _format("fp8_e8m0", "e8m0:FP8_E8M0", 8, "powers of two, for scales", aliases=("e8m0",))
    yield _format("fp6_e3m2", "minifloat:FP6_E3M2", 6, "FP6 E3M2: ±28", "FP6E3M2PerGroupSpec", "OCP_MXFP6E3M2Spec")
    yield _format("fp6_e2m3", "minifloat:FP6_E2M3", 6, "FP6 E2M3: ±7.5", "FP6E2M3PerGroupSpec", "OCP_MXFP6E2M3Spec")
    fp4 = ("FP4PerGroupSpec", "OCP_MXSpec", "OCP_MXFP4Spec", "OCP_MXFP4DiffsSpec", "AmdFP4Spec", "ProgressiveSpec", "ScaleQuantSpec")
    yield _format("fp4", "minifloat:FP4", 4, "FP4 E2M1: 0, ½, 1, 1½, 2, 3, 4, 6", *fp4, exports=_EMULATION)
    yield _format("float16", "cast:FLOAT16", 16, "a cast to float16", "Float16Spec")
    yield _format("bfloat16", "cast:BFLOAT16", 16, "a cast to bfloat16", "Bfloat16Spec")
    yield _format("mx", "block_float:MX", 8, "OCP MX, elements of mx_element_dtype: its own are INT8 in blocks of 32", "OCP_MXINT8Spec")
    yield _format("bfp16", "block_float:BFP16", 8, "block floating point: 8-bit mantissas, an exponent for 8", "BFP16Spec")
    shared = "shared microexponents: an exponent for 16, a bit for 2; {} bits in all"
    yield _format("mx6", "microexponent:MX6", 5.5, shared.format(6), "MX6Spec")
    yield _format("mx9", "microexponent:MX9", 8.5, shared.format(9), "MX9Spec")


def _observer(name: str, class_name: str, module: str, summary: str) -> ObserverRecord:
    reference = f"quark_schemes.observers.{module}:{class_name}"
    return ObserverRecord(name=name, class_name=class_name, observer=reference, summary=summary, exports={class_name: reference})


@hookimpl
def quark_register_observers() -> Iterator[ObserverRecord]:
    """The observers, under their class names in AMD Quark's public API."""
    yield _observer("placeholder", "PlaceholderObserver", "placeholder", "observes nothing")
    base = "quark_schemes.observers.min_max:MinMaxObserver"
    names = {"MinMaxObserver": base, "UniformScalingObserver": base}
    anything = "all that was seen, whatever shares a range"
    yield ObserverRecord(name="min_max", class_name="MinMaxObserver", observer=base, summary=anything, exports=names)
    yield _observer("per_tensor_min_max", "PerTensorMinMaxObserver", "min_max", "all that was seen, one range")
    yield _observer("per_channel_min_max", "PerChannelMinMaxObserver", "min_max", "all that was seen, a range for each channel or token")
    yield _observer("per_group_min_max", "PerGroupMinMaxObserver", "min_max", "all that was seen, a range for each group")
    yield _observer("per_block_mx", "PerBlockMXObserver", "min_max", "all that was seen, a range for each block of an MX format")
    yield _observer("per_block_2d_min_max", "PerBlock2DMinMaxObserver", "min_max", "all that was seen, a range for each 2-D block")
    same = "all that was seen, a range for each block"
    yield _observer("per_block_bfp", "PerBlockBFPObserver", "min_max", f"{same} of a block float")
    yield _observer("per_block_mx_buffer_reuse", "PerBlockMXBufferReuseObserver", "min_max", f"{same} of an MX format")
    yield _observer("per_block_mx_diffs", "PerBlockMXDiffsObserver", "min_max", f"{same} of an MX format")
    share = "a given share of the values; option percentile (99.99999999)"
    yield _observer("per_tensor_percentile", "PerTensorPercentileObserver", "percentile", share)
    yield _observer("per_tensor_mse", "PerTensorMSEObserver", "mse", "least squared error, one range")
    yield _observer("per_channel_mse", "PerChannelMSEObserver", "mse", "least squared error, a range for each channel of a weight")
    yield _observer("per_group_mse", "PerGroupMSEObserver", "mse", "least squared error, a range for each group of a weight")
    narrowest = "of the narrowest ranges for given shares of the values, that of least squared error"
    yield _observer("per_tensor_histogram", "PerTensorHistogramObserver", "histogram_ranges", narrowest)
    pairs = "of all ranges from bin to bin, that of least expected squared error; integers"
    yield _observer("per_tensor_histogram_pro", "PerTensorHistogramObserverPro", "histogram_ranges", pairs)
    nearest, best = "the power of two nearest to the min-max scale", "of five powers of two, that of least squared error"
    yield _observer("per_tensor_pow2_min_max", "PerTensorPowOf2MinMaxObserver", "power_of_two_scales", nearest)
    yield _observer("per_tensor_pow2_min_mse", "PerTensorPowOf2MinMSEObserver", "power_of_two_scales", best)
    yield _observer("per_channel_pow2_min_max", "PerChannelPowOf2MinMaxObserver", "power_of_two_scales", nearest)
    yield _observer("per_channel_pow2_min_mse", "PerChannelPowOf2MinMSEObserver", "power_of_two_scales", best)


_EVERYWHERE = ("transformers", "vLLM (CPU, CUDA, ROCm)")
_ON_GPU = ("transformers", "vLLM (CUDA, ROCm)")
_EMULATED = ("transformers", "vLLM (emulated)")
_TRANSFORMERS = ("transformers",)


def _scheme(name: str, module: str, summary: str, clients: tuple[str, ...], *classes: str, **more: Any) -> SchemeRecord:
    reference = f"quark_schemes.schemes.{module}:"
    parts = {part: reference + more.pop(part) for part in ("kv_cache", "attention") if part in more}
    return SchemeRecord(name=name, summary=summary, config=reference + name, clients=clients, exports=_classes(*classes), **parts, **more)


@hookimpl
def quark_register_schemes() -> Iterator[SchemeRecord]:
    """The named schemes."""
    yield from _integer_schemes()
    yield from _float_schemes()
    yield from _two_level_schemes()
    yield _scheme("bfp16", "block_float", "BFP16 weights and activations, blocks of 8", _TRANSFORMERS, "BFP16Scheme")
    yield _scheme("mx6", "block_float", "MX6 weights and activations; option block_size (16)", _TRANSFORMERS, "MX6Scheme")
    yield _scheme("mx9", "block_float", "MX9 weights and activations; option block_size (16)", _TRANSFORMERS, "MX9Scheme")


def _integer_schemes() -> Iterator[SchemeRecord]:
    int4, uint4 = "symmetric INT4 weights, groups of {}", "asymmetric UINT4 weights, groups of {}"
    yield _scheme("int4_wo_32", "integer", int4.format(32), _EVERYWHERE, "Int4WeightOnlyScheme")
    yield _scheme("uint4_wo_32", "integer", uint4.format(32), _EVERYWHERE, "Uint4WeightOnlyScheme")
    yield _scheme("int4_wo_64", "integer", int4.format(64), _EVERYWHERE, "Int4WeightOnlyScheme")
    yield _scheme("uint4_wo_64", "integer", uint4.format(64), _EVERYWHERE, "Uint4WeightOnlyScheme")
    yield _scheme("int4_wo_128", "integer", int4.format(128), _EVERYWHERE, "Int4WeightOnlyScheme")
    yield _scheme("uint4_wo_128", "integer", uint4.format(128), _EVERYWHERE, "Uint4WeightOnlyScheme")
    per_channel = ("Int4WeightOnlyPerChannelScheme", "Uint4WeightOnlyPerChannelScheme")
    yield _scheme("int4_wo_per_channel", "integer", "symmetric INT4 weights, a scale per channel", _TRANSFORMERS, per_channel[0])
    yield _scheme("uint4_wo_per_channel", "integer", "asymmetric UINT4 weights, a scale per channel", _TRANSFORMERS, per_channel[1])
    both = "INT4 weights, dynamic INT4 activations, groups of 64"
    yield _scheme("int4_wa_64", "integer", both, _TRANSFORMERS, "Int4WeightAndActivationScheme")
    yield _scheme("int8", "integer", "INT8 weights and static activations, one scale each", _EVERYWHERE, "Int8Scheme")


def _float_schemes() -> Iterator[SchemeRecord]:
    cache = {"kv_cache": "fp8_outputs", "attention": "fp8_outputs"}
    static = "E4M3 weights and static activations, one scale each"
    yield _scheme("fp8", "float8", static, (*_ON_GPU, "SGLang"), "FP8Scheme", **cache)
    ptpc = "E4M3 weights per channel, dynamic E4M3 activations per token"
    yield _scheme("ptpc_fp8", "float8", ptpc, (*_EVERYWHERE, "SGLang"), "PTPCFP8Scheme")
    mxfp4 = "MXFP4 weights and dynamic activations"
    yield _scheme("mxfp4", "microscaling", mxfp4, (*_ON_GPU, "SGLang (ROCm)"), "MXFP4Scheme")
    yield _scheme("mxfp4_weight_only", "microscaling", "MXFP4 weights", _ON_GPU, "MXFP4WeightOnlyScheme")
    mxfp6 = "MXFP6 weights and dynamic activations of {} elements"
    yield _scheme("mxfp6_e3m2", "microscaling", mxfp6.format("E3M2"), _EMULATED, "MXFP6E3M2Scheme", aliases=("mxfp6",))
    yield _scheme("mxfp6_e2m3", "microscaling", mxfp6.format("E2M3"), _EMULATED, "MXFP6E2M3Scheme")
    mixed = "MXFP4 weights, dynamic MXFP6 activations of E2M3 elements"
    yield _scheme("mxfp4_mxfp6_e2m3", "microscaling", mixed, _EMULATED, "MXFP4_MXFP6E2M3Scheme")
    yield _scheme("mxfp4_fp8", "microscaling", "MXFP4 weights, static E4M3 activations", _EMULATED, "MXFP4_FP8Scheme")


def _two_level_schemes() -> Iterator[SchemeRecord]:
    amd = "FP4 weights and dynamic activations, groups of {}, E5M3 scales"
    yield _scheme("amdfp4", "two_level", amd.format(16), _TRANSFORMERS, "AmdFP4Scheme")
    yield _scheme("amdfp4_g32", "two_level", amd.format(32), _TRANSFORMERS, "AmdFP4Scheme")
    # Runtimes fuse query, key and value projections, and gate and up, of this scheme: each such group has one outer scale.
    shared: dict[str, Any] = {"shares_global_scale": True}
    nv = "FP4 weights and activations, groups of 16, E4M3 scales under one more scale"
    classes = ("FP4Block16ScaleE4M3Scheme", "AmdFP4GlobalScaleScheme")
    yield _scheme("nvfp4", "two_level", nv, _ON_GPU, classes[0], aliases=("fp4_block16_scale_e4m3",), **shared)
    one_more = "FP4 weights and activations, groups of {}, E5M3 scales under one more scale"
    yield _scheme("amdfp4_global16", "two_level", one_more.format(16), _TRANSFORMERS, classes[1])
    yield _scheme("amdfp4_global32", "two_level", one_more.format(32), _TRANSFORMERS, classes[1])
    twice = "weights first in E4M3, from there in INT4 per channel; dynamic E4M3 activations"
    yield _scheme("int4_fp8", "two_level", twice, _TRANSFORMERS, "INT4_FP8Scheme")
