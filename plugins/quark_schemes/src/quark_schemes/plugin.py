"""What quark-schemes registers. Nothing heavy is imported: records point at code by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark.plugins import FormatRecord, ObserverRecord, Option, SchemeRecord, hookimpl

QUARK_API = (1, 1)
_SPECS = "quark_schemes.specs:"
_CLASSES = "quark_schemes.scheme_classes:"
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
"""What runtimes import to emulate MX formats, by documented module and name."""


def _specs(*names: str) -> dict[str, str]:
    return {name: _SPECS + name for name in names}


def _classes(*names: str) -> dict[str, str]:
    return {name: _CLASSES + name for name in names}


def _integer(name: str, bits: int, *specs: str) -> FormatRecord:
    kind = "unsigned integers" if name.startswith("u") else "integers"
    reference = f"quark_schemes.formats.integer:{name.upper()}"
    return FormatRecord(name=name, summary=f"{kind} of {bits} bits", bits=bits, format=reference, exports=_specs(*specs))


def _minifloat(name: str, bits: int, summary: str, *specs: str) -> FormatRecord:
    reference = f"quark_schemes.formats.minifloat:{name.upper()}"
    exports = _specs(*specs) | (_EMULATION if name == "fp4" else {})
    return FormatRecord(name=name, summary=summary, bits=bits, format=reference, exports=exports)


def _block_float(name: str, bits: float, module: str, summary: str, *specs: str) -> FormatRecord:
    reference = f"quark_schemes.formats.{module}:{name.upper()}"
    return FormatRecord(name=name, summary=summary, bits=bits, format=reference, exports=_specs(*specs))


@hookimpl
def quark_register_formats() -> Iterator[FormatRecord]:
    """The number formats, with the documented helpers that build their specs."""
    yield _integer("int2", 2, "Int2PerGroupSpec")
    yield _integer("uint2", 2)
    yield _integer("int3", 3, "Int3PerChannelSpec", "Int3PerGroupSpec")
    yield _integer("int4", 4, "Int4PerTensorSpec", "Int4PerChannelSpec", "Int4PerGroupSpec")
    yield _integer("uint4", 4, "Uint4PerTensorSpec", "Uint4PerChannelSpec", "Uint4PerGroupSpec")
    yield _integer("int8", 8, "Int8PerTensorSpec", "Int8PerChannelSpec", "Int8PerGroupSpec")
    yield _integer("uint8", 8, "Uint8PerTensorSpec", "Uint8PerChannelSpec", "Uint8PerGroupSpec")
    yield _integer("int16", 16)
    e4m3 = ("FP8E4M3PerTensorSpec", "FP8E4M3PerChannelSpec", "FP8E4M3PerGroupSpec", "OCP_MXFP8E4M3Spec")
    e5m2 = ("FP8E5M2PerTensorSpec", "FP8E5M2PerChannelSpec", "FP8E5M2PerGroupSpec", "OCP_MXFP8E5M2Spec")
    yield _minifloat("fp8_e4m3", 8, "FP8 E4M3 (OCP, finite only): ±448", *e4m3)
    yield _minifloat("fp8_e5m2", 8, "FP8 E5M2 (OCP): ±57344", *e5m2)
    yield _minifloat("fp8_e5m3", 8, "unsigned FP8 E5M3, for scales: up to 114688", "FP8E5M3PerTensorSpec")
    e8m0 = "quark_schemes.formats.power_of_two:FP8_E8M0"
    yield FormatRecord(name="fp8_e8m0", summary="powers of two, for scales", bits=8, format=e8m0, aliases=("e8m0",))
    yield _minifloat("fp6_e3m2", 6, "FP6 E3M2: ±28", "FP6E3M2PerGroupSpec", "OCP_MXFP6E3M2Spec")
    yield _minifloat("fp6_e2m3", 6, "FP6 E2M3: ±7.5", "FP6E2M3PerGroupSpec", "OCP_MXFP6E2M3Spec")
    fp4 = ("FP4PerGroupSpec", "OCP_MXSpec", "OCP_MXFP4Spec", "OCP_MXFP4DiffsSpec", "AmdFP4Spec", "ProgressiveSpec", "ScaleQuantSpec")
    yield _minifloat("fp4", 4, "FP4 E2M1: 0, ½, 1, 1½, 2, 3, 4, 6", *fp4)
    yield FormatRecord(
        name="float16", summary="a cast to float16", bits=16, format="quark_schemes.formats.cast:FLOAT16", exports=_specs("Float16Spec")
    )
    yield FormatRecord(
        name="bfloat16", summary="a cast to bfloat16", bits=16, format="quark_schemes.formats.cast:BFLOAT16", exports=_specs("Bfloat16Spec")
    )
    yield _block_float("mx", 8, "block_float", "OCP MX, elements of mx_element_dtype: its own are INT8 in blocks of 32", "OCP_MXINT8Spec")
    yield _block_float("bfp16", 8, "block_float", "block floating point: 8-bit mantissas, an exponent for 8", "BFP16Spec")
    yield _block_float("mx6", 5.5, "microexponent", "shared microexponents: an exponent for 16, a bit for 2; 6 bits in all", "MX6Spec")
    yield _block_float("mx9", 8.5, "microexponent", "shared microexponents: an exponent for 16, a bit for 2; 9 bits in all", "MX9Spec")


def _observer(name: str, class_name: str, module: str, summary: str) -> ObserverRecord:
    reference = f"quark_schemes.observers.{module}:{class_name}"
    return ObserverRecord(name=name, class_name=class_name, observer=reference, summary=summary, exports={class_name: reference})


@hookimpl
def quark_register_observers() -> Iterator[ObserverRecord]:
    """The observers, under their documented class names."""
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
    yield ObserverRecord(
        name="per_tensor_percentile",
        class_name="PerTensorPercentileObserver",
        observer="quark_schemes.observers.percentile:PerTensorPercentileObserver",
        summary="the range that holds a given percentage of the values",
        exports={"PerTensorPercentileObserver": "quark_schemes.observers.percentile:PerTensorPercentileObserver"},
        options=(Option("percentile", float, 99.99999999, "Percentage of the values in the range: above 0, to 100; asymmetric from 50."),),
    )
    yield _observer("per_tensor_mse", "PerTensorMSEObserver", "mse", "least squared error, one range")
    yield _observer("per_channel_mse", "PerChannelMSEObserver", "mse", "least squared error, a range for each channel of a weight")
    yield _observer("per_group_mse", "PerGroupMSEObserver", "mse", "least squared error, a range for each group of a weight")
    narrowest = "of the narrowest ranges for given shares of the values, that of least squared error"
    yield _observer("per_tensor_histogram", "PerTensorHistogramObserver", "narrowing", narrowest)
    pairs = "of all ranges from bin to bin, that of least expected squared error; integers"
    yield _observer("per_tensor_histogram_pro", "PerTensorHistogramObserverPro", "narrowing", pairs)
    for name, title in (("per_tensor", "PerTensor"), ("per_channel", "PerChannel")):
        nearest, best = "the power of two nearest to the min-max scale", "of five powers of two, that of least squared error"
        yield _observer(f"{name}_pow2_min_max", f"{title}PowOf2MinMaxObserver", "power_of_two", nearest)
        yield _observer(f"{name}_pow2_min_mse", f"{title}PowOf2MinMSEObserver", "power_of_two", best)


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
    yield from _two_stage_schemes()
    yield _scheme("bfp16", "block_float", "BFP16 weights and activations, blocks of 8", _TRANSFORMERS, "BFP16Scheme")
    yield _scheme("mx6", "block_float", "MX6 weights and activations; option block_size (16)", _TRANSFORMERS, "MX6Scheme")
    yield _scheme("mx9", "block_float", "MX9 weights and activations; option block_size (16)", _TRANSFORMERS, "MX9Scheme")


def _integer_schemes() -> Iterator[SchemeRecord]:
    for size in (32, 64, 128):
        yield _scheme(f"int4_wo_{size}", "integer", f"symmetric INT4 weights, groups of {size}", _EVERYWHERE, "Int4WeightOnlyScheme")
        yield _scheme(f"uint4_wo_{size}", "integer", f"asymmetric UINT4 weights, groups of {size}", _EVERYWHERE, "Uint4WeightOnlyScheme")
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


def _two_stage_schemes() -> Iterator[SchemeRecord]:
    amd = "FP4 weights and dynamic activations, groups of {}, E5M3 scales"
    yield _scheme("amdfp4", "two_stage", amd.format(16), _TRANSFORMERS, "AmdFP4Scheme")
    yield _scheme("amdfp4_g32", "two_stage", amd.format(32), _TRANSFORMERS, "AmdFP4Scheme")
    # Runtimes fuse query, key and value projections, and gate and up, of this scheme: each such group has one outer scale.
    shared: dict[str, Any] = {"shares_global_scale": True}
    nv = "FP4 weights and activations, groups of 16, E4M3 scales under one more scale"
    classes = ("FP4Block16ScaleE4M3Scheme", "AmdFP4GlobalScaleScheme")
    yield _scheme("nvfp4", "two_stage", nv, _ON_GPU, classes[0], aliases=("fp4_block16_scale_e4m3",), **shared)
    for size in (16, 32):
        summary = f"FP4 weights and activations, groups of {size}, E5M3 scales under one more scale"
        yield _scheme(f"amdfp4_global{size}", "two_stage", summary, _TRANSFORMERS, classes[1])
    twice = "weights first in E4M3, from there in INT4 per channel; dynamic E4M3 activations"
    yield _scheme("int4_fp8", "two_stage", twice, _TRANSFORMERS, "INT4_FP8Scheme")
