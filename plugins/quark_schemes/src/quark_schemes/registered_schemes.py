"""The schemes that this distribution registers. Imports no torch."""

from __future__ import annotations

from quark.plugins import SchemeRecord

__all__ = ["SCHEMES"]

_CLASSES = "quark_schemes.schemes:"
_ANYWHERE = ("transformers", "onnxruntime")
_GGUF = "llama.cpp"
_GGUF_WEIGHTS = "llama.cpp (weights alone)"
_EVERYWHERE = (*_ANYWHERE, "vLLM (CPU, CUDA, ROCm)")
_ON_GPU = (*_ANYWHERE, "vLLM (CUDA, ROCm)")
_EMULATED = (*_ANYWHERE, "vLLM (emulated)")


def _classes(*names: str) -> dict[str, str]:
    return {name: _CLASSES + name for name in names}


SCHEMES: tuple[SchemeRecord, ...] = (
    SchemeRecord(
        name="int4_wo_32",
        summary="symmetric INT4 weights, groups of 32",
        config="quark_schemes.schemes:int4_wo_32",
        clients=(*_EVERYWHERE, _GGUF),
        exports=_classes("Int4WeightOnlyScheme"),
    ),
    SchemeRecord(
        name="uint4_wo_32",
        summary="asymmetric UINT4 weights, groups of 32",
        config="quark_schemes.schemes:uint4_wo_32",
        clients=(*_EVERYWHERE, _GGUF),
        exports=_classes("Uint4WeightOnlyScheme"),
    ),
    SchemeRecord(
        name="int4_wo_64",
        summary="symmetric INT4 weights, groups of 64",
        config="quark_schemes.schemes:int4_wo_64",
        clients=(*_EVERYWHERE, _GGUF),
        exports=_classes("Int4WeightOnlyScheme"),
    ),
    SchemeRecord(
        name="uint4_wo_64",
        summary="asymmetric UINT4 weights, groups of 64",
        config="quark_schemes.schemes:uint4_wo_64",
        clients=(*_EVERYWHERE, _GGUF),
        exports=_classes("Uint4WeightOnlyScheme"),
    ),
    SchemeRecord(
        name="int4_wo_128",
        aliases=("w_int4_per_group_sym",),
        summary="symmetric INT4 weights, groups of 128",
        config="quark_schemes.schemes:int4_wo_128",
        clients=(*_EVERYWHERE, _GGUF),
        exports=_classes("Int4WeightOnlyScheme"),
    ),
    SchemeRecord(
        name="uint4_wo_128",
        aliases=("w_uint4_per_group_asym",),
        summary="asymmetric UINT4 weights, groups of 128",
        config="quark_schemes.schemes:uint4_wo_128",
        clients=(*_EVERYWHERE, _GGUF),
        exports=_classes("Uint4WeightOnlyScheme"),
    ),
    SchemeRecord(
        name="int4_wo_per_channel",
        summary="symmetric INT4 weights, a scale per channel",
        config="quark_schemes.schemes:int4_wo_per_channel",
        clients=(*_ANYWHERE, _GGUF),
        exports=_classes("Int4WeightOnlyPerChannelScheme"),
    ),
    SchemeRecord(
        name="uint4_wo_per_channel",
        summary="asymmetric UINT4 weights, a scale per channel",
        config="quark_schemes.schemes:uint4_wo_per_channel",
        clients=(*_ANYWHERE, _GGUF),
        exports=_classes("Uint4WeightOnlyPerChannelScheme"),
    ),
    SchemeRecord(
        name="int4_wa_64",
        summary="INT4 weights, dynamic INT4 activations, groups of 64",
        config="quark_schemes.schemes:int4_wa_64",
        clients=(*_ANYWHERE, _GGUF_WEIGHTS),
        exports=_classes("Int4WeightAndActivationScheme"),
    ),
    SchemeRecord(
        name="int8",
        aliases=("w_int8_a_int8_per_tensor_sym",),
        summary="INT8 weights and static activations, one scale each",
        config="quark_schemes.schemes:int8",
        clients=(*_EVERYWHERE, _GGUF_WEIGHTS),
        exports=_classes("Int8Scheme"),
    ),
    SchemeRecord(
        name="fp8",
        aliases=("w_fp8_a_fp8",),
        summary="E4M3 weights and static activations, one scale each",
        config="quark_schemes.schemes:fp8",
        kv_cache="quark_schemes.schemes:fp8_outputs",
        attention="quark_schemes.schemes:fp8_outputs",
        clients=(*_ON_GPU, "SGLang"),
        exports=_classes("FP8Scheme"),
    ),
    SchemeRecord(
        name="ptpc_fp8",
        summary="E4M3 weights per channel, dynamic E4M3 activations per token",
        config="quark_schemes.schemes:ptpc_fp8",
        clients=(*_EVERYWHERE, "SGLang"),
        exports=_classes("PTPCFP8Scheme"),
    ),
    SchemeRecord(
        name="mxfp4",
        aliases=("w_mxfp4_a_mxfp4",),
        summary="MXFP4 weights and dynamic activations",
        config="quark_schemes.schemes:mxfp4",
        clients=(*_ON_GPU, "SGLang (ROCm)", _GGUF_WEIGHTS),
        exports=_classes("MXFP4Scheme"),
    ),
    SchemeRecord(
        name="mxfp4_weight_only",
        summary="MXFP4 weights",
        config="quark_schemes.schemes:mxfp4_weight_only",
        clients=(*_ON_GPU, _GGUF),
        exports=_classes("MXFP4WeightOnlyScheme"),
    ),
    SchemeRecord(
        name="mxfp6_e3m2",
        aliases=("mxfp6", "w_mxfp6_e3m2_a_mxfp6_e3m2"),
        summary="MXFP6 weights and dynamic activations of E3M2 elements",
        config="quark_schemes.schemes:mxfp6_e3m2",
        clients=_EMULATED,
        exports=_classes("MXFP6E3M2Scheme"),
    ),
    SchemeRecord(
        name="mxfp6_e2m3",
        aliases=("w_mxfp6_e2m3_a_mxfp6_e2m3",),
        summary="MXFP6 weights and dynamic activations of E2M3 elements",
        config="quark_schemes.schemes:mxfp6_e2m3",
        clients=_EMULATED,
        exports=_classes("MXFP6E2M3Scheme"),
    ),
    SchemeRecord(
        name="mxfp4_mxfp6_e2m3",
        summary="MXFP4 weights, dynamic MXFP6 activations of E2M3 elements",
        config="quark_schemes.schemes:mxfp4_mxfp6_e2m3",
        clients=(*_EMULATED, _GGUF_WEIGHTS),
        exports=_classes("MXFP4_MXFP6E2M3Scheme"),
    ),
    SchemeRecord(
        name="mxfp4_fp8",
        summary="MXFP4 weights, static E4M3 activations",
        config="quark_schemes.schemes:mxfp4_fp8",
        clients=(*_EMULATED, _GGUF_WEIGHTS),
        exports=_classes("MXFP4_FP8Scheme"),
    ),
    SchemeRecord(
        name="amdfp4",
        summary="FP4 weights and dynamic activations, groups of 16, E5M3 scales",
        config="quark_schemes.schemes:amdfp4",
        clients=_ANYWHERE,
        exports=_classes("AmdFP4Scheme"),
    ),
    SchemeRecord(
        name="amdfp4_g32",
        summary="FP4 weights and dynamic activations, groups of 32, E5M3 scales",
        config="quark_schemes.schemes:amdfp4_g32",
        clients=_ANYWHERE,
        exports=_classes("AmdFP4Scheme"),
    ),
    SchemeRecord(
        name="nvfp4",
        aliases=("fp4_block16_scale_e4m3",),
        summary="FP4 weights and activations, groups of 16, E4M3 scales under one more scale",
        config="quark_schemes.schemes:nvfp4",
        shares_global_scale=True,
        clients=_ON_GPU,
        exports=_classes("FP4Block16ScaleE4M3Scheme"),
    ),
    SchemeRecord(
        name="amdfp4_global16",
        summary="FP4 weights and activations, groups of 16, E5M3 scales under one more scale",
        config="quark_schemes.schemes:amdfp4_global16",
        clients=_ANYWHERE,
        exports=_classes("AmdFP4GlobalScaleScheme"),
    ),
    SchemeRecord(
        name="amdfp4_global32",
        summary="FP4 weights and activations, groups of 32, E5M3 scales under one more scale",
        config="quark_schemes.schemes:amdfp4_global32",
        clients=_ANYWHERE,
        exports=_classes("AmdFP4GlobalScaleScheme"),
    ),
    SchemeRecord(
        name="int4_fp8",
        summary="weights first in E4M3, from there in INT4 per channel; dynamic E4M3 activations",
        config="quark_schemes.schemes:int4_fp8",
        clients=_ANYWHERE,
        exports=_classes("INT4_FP8Scheme"),
    ),
    SchemeRecord(
        name="bfp16",
        aliases=("w_bfp16_a_bfp16",),
        summary="BFP16 weights and activations, blocks of 8",
        config="quark_schemes.schemes:bfp16",
        clients=_ANYWHERE,
        exports=_classes("BFP16Scheme"),
    ),
    SchemeRecord(
        name="mx6",
        aliases=("w_mx6_a_mx6",),
        summary="MX6 weights and activations; option block_size (16)",
        config="quark_schemes.schemes:mx6",
        clients=_ANYWHERE,
        exports=_classes("MX6Scheme"),
    ),
    SchemeRecord(
        name="mx9",
        summary="MX9 weights and activations; option block_size (16)",
        config="quark_schemes.schemes:mx9",
        clients=_ANYWHERE,
        exports=_classes("MX9Scheme"),
    ),
)
"""Every scheme. ``shares_global_scale``: runtimes fuse query, key and value projections, and gate and up
projections, into one matrix.
"""
