"""Records of the number formats in this distribution, each with the ``*Spec`` classes of the format.

This module does not import torch.
"""

from __future__ import annotations

from typing import Any

from quark.plugins import FormatRecord

__all__ = ["FORMATS"]

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
"""Public name of a function that runtimes import from AMD Quark to emulate MX formats → the function here."""


def _specs(module: str, *names: str) -> dict[str, str]:
    return {name: f"quark_schemes.specs.{module}:{name}" for name in names}


_HELPERS = {
    "int2": _specs("integer", "Int2PerGroupSpec"),
    "int3": _specs("integer", "Int3PerChannelSpec", "Int3PerGroupSpec"),
    "int4": _specs("integer", "Int4PerTensorSpec", "Int4PerChannelSpec", "Int4PerGroupSpec"),
    "uint4": _specs("integer", "Uint4PerTensorSpec", "Uint4PerChannelSpec", "Uint4PerGroupSpec"),
    "int8": _specs("integer", "Int8PerTensorSpec", "Int8PerChannelSpec", "Int8PerGroupSpec"),
    "uint8": _specs("integer", "Uint8PerTensorSpec", "Uint8PerChannelSpec", "Uint8PerGroupSpec"),
    "fp8_e4m3": _specs("floats", "FP8E4M3PerTensorSpec", "FP8E4M3PerChannelSpec", "FP8E4M3PerGroupSpec")
    | _specs("microscaling", "OCP_MXFP8E4M3Spec"),
    "fp8_e5m2": _specs("floats", "FP8E5M2PerTensorSpec", "FP8E5M2PerChannelSpec", "FP8E5M2PerGroupSpec")
    | _specs("microscaling", "OCP_MXFP8E5M2Spec"),
    "fp8_e5m3": _specs("floats", "FP8E5M3PerTensorSpec"),
    "fp6_e3m2": _specs("microscaling", "FP6E3M2PerGroupSpec", "OCP_MXFP6E3M2Spec"),
    "fp6_e2m3": _specs("microscaling", "FP6E2M3PerGroupSpec", "OCP_MXFP6E2M3Spec"),
    "fp4": _specs("microscaling", "FP4PerGroupSpec", "OCP_MXSpec", "OCP_MXFP4Spec", "OCP_MXFP4DiffsSpec", "AmdFP4Spec")
    | _specs("options", "ProgressiveSpec", "ScaleQuantSpec")
    | _EMULATION,
    "float16": _specs("floats", "Float16Spec"),
    "bfloat16": _specs("floats", "Bfloat16Spec"),
    "mx": _specs("microscaling", "OCP_MXINT8Spec"),
    "bfp16": _specs("microscaling", "BFP16Spec"),
    "mx6": _specs("microscaling", "MX6Spec"),
    "mx9": _specs("microscaling", "MX9Spec"),
}
"""Format → its names in AMD Quark's public API."""


def _format(family: str, name: str, bits: float, summary: str, **fields: Any) -> FormatRecord:
    """Return the record of a format.

    The format object is a constant in the module ``family``. Its name is ``name`` in capitals.
    """
    reference = f"quark_schemes.formats.{family}:{name.upper()}"
    return FormatRecord(name=name, format=reference, bits=bits, summary=summary, exports=_HELPERS.get(name, {}), **fields)


def _integer(name: str, bits: int, summary: str) -> FormatRecord:
    return _format("integer", name, bits, summary, capabilities={"zero_point"})


FORMATS: tuple[FormatRecord, ...] = (
    _integer("int2", 2, "integers of 2 bits"),
    _integer("uint2", 2, "unsigned integers of 2 bits"),
    _integer("int3", 3, "integers of 3 bits"),
    _integer("int4", 4, "integers of 4 bits"),
    _integer("uint4", 4, "unsigned integers of 4 bits"),
    _integer("int8", 8, "integers of 8 bits"),
    _integer("uint8", 8, "unsigned integers of 8 bits"),
    _integer("int16", 16, "integers of 16 bits"),
    _integer("uint16", 16, "unsigned integers of 16 bits"),
    _format("integer", "int32", 32, "integers of 32 bits, for biases; scales are powers of two, zero points 0", error_bound=0.5),
    _format("floats", "fp8_e4m3", 8, "FP8 E4M3 (OCP, finite only): ±448"),
    _format("floats", "fp8_e5m2", 8, "FP8 E5M2 (OCP): ±57344"),
    _format("floats", "fp8_e5m3", 8, "unsigned FP8 E5M3, for scales: up to 114688"),
    _format("floats", "fp8_e8m0", 8, "powers of two, for scales", error_bound=0.5, aliases=("e8m0",)),
    _format("floats", "fp6_e3m2", 6, "FP6 E3M2: ±28"),
    _format("floats", "fp6_e2m3", 6, "FP6 E2M3: ±7.5"),
    _format("floats", "fp4", 4, "FP4 E2M1: 0, ½, 1, 1½, 2, 3, 4, 6"),
    _format("floats", "float16", 16, "a cast to float16"),
    _format("floats", "bfloat16", 16, "a cast to bfloat16"),
    _format("block_float", "mx", 8, "OCP MX, elements of mx_element_dtype: its own are INT8 in blocks of 32"),
    _format("block_float", "bfp16", 8, "block floating point: 8-bit mantissas, an exponent for 8"),
    _format("block_float", "mx6", 5.5, "shared microexponents: an exponent for 16, a bit for 2; 6 bits in all", error_bound=0.5),
    _format("block_float", "mx9", 8.5, "shared microexponents: an exponent for 16, a bit for 2; 9 bits in all", error_bound=0.5),
)
"""Every number format, integers first."""
