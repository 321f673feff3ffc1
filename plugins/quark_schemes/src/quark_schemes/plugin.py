"""What quark-schemes registers. Nothing heavy is imported: records point at code by name."""

from __future__ import annotations

from collections.abc import Iterator

from quark.plugins import FormatRecord, ObserverRecord, SchemeRecord, hookimpl

_SPECS = "quark_schemes.specs:"
_CLASSES = "quark_schemes.scheme_classes:"


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
    return FormatRecord(name=name, summary=summary, bits=bits, format=reference, exports=_specs(*specs))


@hookimpl
def quark_register_formats() -> Iterator[FormatRecord]:
    """The number formats, with the documented helpers that build their specs."""
    yield _integer("int2", 2, "Int2PerGroupSpec")
    yield _integer("uint2", 2)
    yield _integer("int3", 3, "Int3PerChannelSpec", "Int3PerGroupSpec")
    yield _integer("int4", 4, "Int4PerTensorSpec", "Int4PerChannelSpec", "Int4PerGroupSpec")
    yield _integer("uint4", 4, "Uint4PerTensorSpec", "Uint4PerChannelSpec", "Uint4PerGroupSpec")
    yield _integer("int8", 8, "Int8PerTensorSpec", "Int8PerChannelSpec", "Int8PerGroupSpec", "OCP_MXINT8Spec")
    yield _integer("uint8", 8, "Uint8PerTensorSpec", "Uint8PerChannelSpec", "Uint8PerGroupSpec")
    e4m3 = ("FP8E4M3PerTensorSpec", "FP8E4M3PerChannelSpec", "FP8E4M3PerGroupSpec", "OCP_MXFP8E4M3Spec", "FP8E5M3PerTensorSpec")
    e5m2 = ("FP8E5M2PerTensorSpec", "FP8E5M2PerChannelSpec", "FP8E5M2PerGroupSpec", "OCP_MXFP8E5M2Spec")
    yield _minifloat("fp8_e4m3", 8, "FP8 E4M3 (OCP, finite only): ±448", *e4m3)
    yield _minifloat("fp8_e5m2", 8, "FP8 E5M2 (OCP): ±57344", *e5m2)
    yield _minifloat("fp6_e3m2", 6, "FP6 E3M2: ±28", "FP6E3M2PerGroupSpec", "OCP_MXFP6E3M2Spec")
    yield _minifloat("fp6_e2m3", 6, "FP6 E2M3: ±7.5", "FP6E2M3PerGroupSpec", "OCP_MXFP6E2M3Spec")
    fp4 = ("FP4PerGroupSpec", "OCP_MXSpec", "OCP_MXFP4Spec", "OCP_MXFP4DiffsSpec", "AmdFP4Spec", "ProgressiveSpec", "ScaleQuantSpec")
    yield _minifloat("fp4", 4, "FP4 E2M1: 0, ½, 1, 1½, 2, 3, 4, 6", *fp4)
    yield FormatRecord(
        name="float16", summary="a cast to float16", bits=16, format="quark_schemes.formats.cast:FLOAT16", exports=_specs("Float16Spec")
    )
    # The helpers of block floating point only describe: the formats they name are not registered by this version.
    block_float = _specs("Bfloat16Spec", "MX6Spec", "MX9Spec", "BFP16Spec")
    yield FormatRecord(
        name="bfloat16", summary="a cast to bfloat16", bits=16, format="quark_schemes.formats.cast:BFLOAT16", exports=block_float
    )


def _observer(name: str, class_name: str, module: str, summary: str) -> ObserverRecord:
    reference = f"quark_schemes.observers.{module}:{class_name}"
    return ObserverRecord(name=name, class_name=class_name, observer=reference, summary=summary, exports={class_name: reference})


@hookimpl
def quark_register_observers() -> Iterator[ObserverRecord]:
    """The observers, under their documented class names."""
    yield _observer("placeholder", "PlaceholderObserver", "placeholder", "observes nothing")
    yield _observer("per_tensor_min_max", "PerTensorMinMaxObserver", "min_max", "all that was seen, one range")
    yield _observer("per_channel_min_max", "PerChannelMinMaxObserver", "min_max", "all that was seen, a range for each channel or token")
    yield _observer("per_group_min_max", "PerGroupMinMaxObserver", "min_max", "all that was seen, a range for each group")
    yield _observer("per_block_mx", "PerBlockMXObserver", "min_max", "all that was seen, a range for each block of an MX format")
    yield _observer("per_block_2d_min_max", "PerBlock2DMinMaxObserver", "min_max", "all that was seen, a range for each 2-D block")


def _scheme(name: str, module: str, summary: str, *classes: str, **parts: str) -> SchemeRecord:
    reference = f"quark_schemes.schemes.{module}:"
    refs = {part: reference + function for part, function in parts.items()}
    return SchemeRecord(name=name, summary=summary, config=reference + name, exports=_classes(*classes), **refs)  # type: ignore[arg-type]


@hookimpl
def quark_register_schemes() -> Iterator[SchemeRecord]:
    """The named schemes."""
    for size in (32, 64, 128):
        yield _scheme(f"int4_wo_{size}", "integer", f"symmetric INT4 weights, groups of {size}", "Int4WeightOnlyScheme")
        yield _scheme(f"uint4_wo_{size}", "integer", f"asymmetric UINT4 weights, groups of {size}", "Uint4WeightOnlyScheme")
    yield _scheme("int4_wo_per_channel", "integer", "symmetric INT4 weights, a scale per channel", "Int4WeightOnlyPerChannelScheme")
    yield _scheme("uint4_wo_per_channel", "integer", "asymmetric UINT4 weights, a scale per channel", "Uint4WeightOnlyPerChannelScheme")
    yield _scheme("int4_wa_64", "integer", "INT4 weights, dynamic INT4 activations, groups of 64", "Int4WeightAndActivationScheme")
    yield _scheme("int8", "integer", "INT8 weights and static activations, one scale each", "Int8Scheme")
    cache = {"kv_cache": "fp8_outputs", "attention": "fp8_outputs"}
    yield _scheme("fp8", "float8", "E4M3 weights and static activations, one scale each", "FP8Scheme", **cache)
    yield _scheme("ptpc_fp8", "float8", "E4M3 weights per channel, dynamic E4M3 activations per token", "PTPCFP8Scheme")
    # These classes only describe, as the helpers above do: schemes of their names are not registered by this version.
    described: tuple[str, ...] = (
        "MXFP6E3M2Scheme",
        "MXFP6E2M3Scheme",
        "MXFP4_MXFP6E2M3Scheme",
        "MXFP4_FP8Scheme",
        "MX6Scheme",
        "BFP16Scheme",
    )
    described += ("AmdFP4Scheme", "AmdFP4GlobalScaleScheme", "FP4Block16ScaleE4M3Scheme", "INT4_FP8Scheme")
    yield _scheme("mxfp4", "mxfp4", "MXFP4 weights and dynamic activations", "MXFP4Scheme", *described)
    yield _scheme("mxfp4_weight_only", "mxfp4", "MXFP4 weights", "MXFP4WeightOnlyScheme")
