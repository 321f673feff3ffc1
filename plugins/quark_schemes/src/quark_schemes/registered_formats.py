"""The number formats that this distribution registers, with the ``*Spec`` classes that come with each.

Imports no torch.
"""

from __future__ import annotations

from quark.plugins import FormatRecord

__all__ = ["FORMATS"]

_SPECS = "quark_schemes.specs:"
_EMULATION = {
    "quark.torch.kernel.mx:dq_mxfp4": "quark_schemes.emulation:dq_mxfp4",
    "quark.torch.kernel.mx:qdq_mxfp4": "quark_schemes.emulation:qdq_mxfp4",
    "quark.torch.kernel.hw_emulation.hw_emulation_interface:fake_quantize_fp4_fp6_per_group_with_scale": (
        "quark_schemes.emulation:fake_quantize_fp4_fp6_per_group_with_scale"
    ),
    "quark.torch.kernel.hw_emulation.hw_emulation_interface:dequantize_fp4_fp6_per_group": (
        "quark_schemes.emulation:dequantize_fp4_fp6_per_group"
    ),
    "quark.torch.quantization.utils:even_round": "quark_schemes.emulation:even_round",
    "quark.torch.quantization.utils:reshape_to_blocks": "quark_schemes.emulation:reshape_to_blocks",
    "quark.torch.utils.pack:create_pack_method": "quark_schemes.emulation:create_pack_method",
}
"""Functions that runtimes import to emulate MX formats, by their public module and name in AMD Quark."""


def _specs(*names: str) -> dict[str, str]:
    return {name: _SPECS + name for name in names}


FORMATS: tuple[FormatRecord, ...] = (
    FormatRecord(
        name="int2",
        summary="integers of 2 bits",
        bits=2,
        format="quark_schemes.formats.integer:INT2",
        capabilities={"zero_point"},
        exports=_specs("Int2PerGroupSpec"),
    ),
    FormatRecord(
        name="uint2",
        summary="unsigned integers of 2 bits",
        bits=2,
        format="quark_schemes.formats.integer:UINT2",
        capabilities={"zero_point"},
    ),
    FormatRecord(
        name="int3",
        summary="integers of 3 bits",
        bits=3,
        format="quark_schemes.formats.integer:INT3",
        capabilities={"zero_point"},
        exports=_specs("Int3PerChannelSpec", "Int3PerGroupSpec"),
    ),
    FormatRecord(
        name="int4",
        summary="integers of 4 bits",
        bits=4,
        format="quark_schemes.formats.integer:INT4",
        capabilities={"zero_point"},
        exports=_specs("Int4PerTensorSpec", "Int4PerChannelSpec", "Int4PerGroupSpec"),
    ),
    FormatRecord(
        name="uint4",
        summary="unsigned integers of 4 bits",
        bits=4,
        format="quark_schemes.formats.integer:UINT4",
        capabilities={"zero_point"},
        exports=_specs("Uint4PerTensorSpec", "Uint4PerChannelSpec", "Uint4PerGroupSpec"),
    ),
    FormatRecord(
        name="int8",
        summary="integers of 8 bits",
        bits=8,
        format="quark_schemes.formats.integer:INT8",
        capabilities={"zero_point"},
        exports=_specs("Int8PerTensorSpec", "Int8PerChannelSpec", "Int8PerGroupSpec"),
    ),
    FormatRecord(
        name="uint8",
        summary="unsigned integers of 8 bits",
        bits=8,
        format="quark_schemes.formats.integer:UINT8",
        capabilities={"zero_point"},
        exports=_specs("Uint8PerTensorSpec", "Uint8PerChannelSpec", "Uint8PerGroupSpec"),
    ),
    FormatRecord(
        name="int16",
        summary="integers of 16 bits",
        bits=16,
        format="quark_schemes.formats.integer:INT16",
        capabilities={"zero_point"},
    ),
    FormatRecord(
        name="fp8_e4m3",
        summary="FP8 E4M3 (OCP, finite only): ±448",
        bits=8,
        format="quark_schemes.formats.floats:FP8_E4M3",
        exports=_specs("FP8E4M3PerTensorSpec", "FP8E4M3PerChannelSpec", "FP8E4M3PerGroupSpec", "OCP_MXFP8E4M3Spec"),
    ),
    FormatRecord(
        name="fp8_e5m2",
        summary="FP8 E5M2 (OCP): ±57344",
        bits=8,
        format="quark_schemes.formats.floats:FP8_E5M2",
        exports=_specs("FP8E5M2PerTensorSpec", "FP8E5M2PerChannelSpec", "FP8E5M2PerGroupSpec", "OCP_MXFP8E5M2Spec"),
    ),
    FormatRecord(
        name="fp8_e5m3",
        summary="unsigned FP8 E5M3, for scales: up to 114688",
        bits=8,
        format="quark_schemes.formats.floats:FP8_E5M3",
        exports=_specs("FP8E5M3PerTensorSpec"),
    ),
    FormatRecord(
        name="fp8_e8m0",
        summary="powers of two, for scales",
        bits=8,
        format="quark_schemes.formats.floats:FP8_E8M0",
        error_bound=0.5,
        aliases=("e8m0",),
    ),
    FormatRecord(
        name="fp6_e3m2",
        summary="FP6 E3M2: ±28",
        bits=6,
        format="quark_schemes.formats.floats:FP6_E3M2",
        exports=_specs("FP6E3M2PerGroupSpec", "OCP_MXFP6E3M2Spec"),
    ),
    FormatRecord(
        name="fp6_e2m3",
        summary="FP6 E2M3: ±7.5",
        bits=6,
        format="quark_schemes.formats.floats:FP6_E2M3",
        exports=_specs("FP6E2M3PerGroupSpec", "OCP_MXFP6E2M3Spec"),
    ),
    FormatRecord(
        name="fp4",
        summary="FP4 E2M1: 0, ½, 1, 1½, 2, 3, 4, 6",
        bits=4,
        format="quark_schemes.formats.floats:FP4",
        exports=_specs(
            "FP4PerGroupSpec", "OCP_MXSpec", "OCP_MXFP4Spec", "OCP_MXFP4DiffsSpec", "AmdFP4Spec", "ProgressiveSpec", "ScaleQuantSpec"
        )
        | _EMULATION,
    ),
    FormatRecord(
        name="float16",
        summary="a cast to float16",
        bits=16,
        format="quark_schemes.formats.floats:FLOAT16",
        exports=_specs("Float16Spec"),
    ),
    FormatRecord(
        name="bfloat16",
        summary="a cast to bfloat16",
        bits=16,
        format="quark_schemes.formats.floats:BFLOAT16",
        exports=_specs("Bfloat16Spec"),
    ),
    FormatRecord(
        name="mx",
        summary="OCP MX, elements of mx_element_dtype: its own are INT8 in blocks of 32",
        bits=8,
        format="quark_schemes.formats.block_float:MX",
        exports=_specs("OCP_MXINT8Spec"),
    ),
    FormatRecord(
        name="bfp16",
        summary="block floating point: 8-bit mantissas, an exponent for 8",
        bits=8,
        format="quark_schemes.formats.block_float:BFP16",
        exports=_specs("BFP16Spec"),
    ),
    FormatRecord(
        name="mx6",
        summary="shared microexponents: an exponent for 16, a bit for 2; 6 bits in all",
        bits=5.5,
        format="quark_schemes.formats.block_float:MX6",
        error_bound=0.5,
        exports=_specs("MX6Spec"),
    ),
    FormatRecord(
        name="mx9",
        summary="shared microexponents: an exponent for 16, a bit for 2; 9 bits in all",
        bits=8.5,
        format="quark_schemes.formats.block_float:MX9",
        error_bound=0.5,
        exports=_specs("MX9Spec"),
    ),
)
"""Every number format, integers first."""
