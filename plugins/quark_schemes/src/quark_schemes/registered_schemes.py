"""Records of the schemes in this distribution. This module does not import torch."""

from __future__ import annotations

from typing import Any

from quark.plugins import SchemeRecord

__all__ = ["SCHEMES"]

_MODULE = "quark_schemes.schemes:"
_ANYWHERE = ("transformers", "onnxruntime")
_GGUF = "llama.cpp"
_GGUF_WEIGHTS = "llama.cpp (weights alone)"
_EVERYWHERE = (*_ANYWHERE, "vLLM (CPU, CUDA, ROCm)")
_ON_GPU = (*_ANYWHERE, "vLLM (CUDA, ROCm)")
_EMULATED = (*_ANYWHERE, "vLLM (emulated)")


def _scheme(name: str, class_name: str, summary: str, clients: tuple[str, ...], *aliases: str, **fields: Any) -> SchemeRecord:
    """Return the record of a scheme.

    The callable that builds the configuration of the scheme has the name ``name``. ``class_name`` is the name
    of the scheme's class in AMD Quark.
    """
    config, exports = _MODULE + name, {class_name: _MODULE + class_name}
    return SchemeRecord(name=name, summary=summary, config=config, clients=clients, exports=exports, aliases=aliases, **fields)


SCHEMES: tuple[SchemeRecord, ...] = (
    _scheme("int4_wo_32", "Int4WeightOnlyScheme", "symmetric INT4 weights, groups of 32", (*_EVERYWHERE, _GGUF)),
    _scheme("uint4_wo_32", "Uint4WeightOnlyScheme", "asymmetric UINT4 weights, groups of 32", (*_EVERYWHERE, _GGUF)),
    _scheme("int4_wo_64", "Int4WeightOnlyScheme", "symmetric INT4 weights, groups of 64", (*_EVERYWHERE, _GGUF)),
    _scheme("uint4_wo_64", "Uint4WeightOnlyScheme", "asymmetric UINT4 weights, groups of 64", (*_EVERYWHERE, _GGUF)),
    _scheme("int4_wo_128", "Int4WeightOnlyScheme", "symmetric INT4 weights, groups of 128", (*_EVERYWHERE, _GGUF), "w_int4_per_group_sym"),
    _scheme(
        "uint4_wo_128", "Uint4WeightOnlyScheme", "asymmetric UINT4 weights, groups of 128", (*_EVERYWHERE, _GGUF), "w_uint4_per_group_asym"
    ),
    _scheme("int4_wo_per_channel", "Int4WeightOnlyPerChannelScheme", "symmetric INT4 weights, a scale per channel", (*_ANYWHERE, _GGUF)),
    _scheme(
        "uint4_wo_per_channel", "Uint4WeightOnlyPerChannelScheme", "asymmetric UINT4 weights, a scale per channel", (*_ANYWHERE, _GGUF)
    ),
    _scheme("int3_wo_64", "Int3WeightOnlyScheme", "symmetric INT3 weights, groups of 64", _ANYWHERE),
    _scheme("int3_wo_128", "Int3WeightOnlyScheme", "symmetric INT3 weights, groups of 128", _ANYWHERE),
    _scheme("int2_wo_32", "Int2WeightOnlyScheme", "symmetric INT2 weights, groups of 32", _ANYWHERE),
    _scheme("int2_wo_64", "Int2WeightOnlyScheme", "symmetric INT2 weights, groups of 64", _ANYWHERE),
    _scheme("int8_wo_32", "Int8WeightOnlyScheme", "symmetric INT8 weights, groups of 32", (*_ANYWHERE, _GGUF)),
    _scheme("int8_wo_per_channel", "Int8WeightOnlyPerChannelScheme", "symmetric INT8 weights, a scale per channel", (*_ANYWHERE, _GGUF)),
    _scheme(
        "int4_wa_64", "Int4WeightAndActivationScheme", "INT4 weights, dynamic INT4 activations, groups of 64", (*_ANYWHERE, _GGUF_WEIGHTS)
    ),
    _scheme(
        "int8",
        "Int8Scheme",
        "INT8 weights and static activations, one scale each",
        (*_EVERYWHERE, _GGUF_WEIGHTS),
        "w_int8_a_int8_per_tensor_sym",
        kv_cache=_MODULE + "int8_per_token_head_cache",
    ),
    _scheme(
        "fp8",
        "FP8Scheme",
        "E4M3 weights and static activations, one scale each",
        (*_ON_GPU, "SGLang"),
        "w_fp8_a_fp8",
        kv_cache=_MODULE + "fp8_outputs",
        attention=_MODULE + "fp8_outputs",
    ),
    _scheme(
        "fp8_per_head",
        "FP8Scheme",
        "as fp8; its KV cache has a scale for each head",
        (*_ON_GPU, "SGLang"),
        kv_cache=_MODULE + "fp8_per_head_cache",
    ),
    _scheme("ptpc_fp8", "PTPCFP8Scheme", "E4M3 weights per channel, dynamic E4M3 activations per token", (*_EVERYWHERE, "SGLang")),
    _scheme("mxfp4", "MXFP4Scheme", "MXFP4 weights and dynamic activations", (*_ON_GPU, "SGLang (ROCm)", _GGUF_WEIGHTS), "w_mxfp4_a_mxfp4"),
    _scheme("mxfp4_weight_only", "MXFP4WeightOnlyScheme", "MXFP4 weights", (*_ON_GPU, _GGUF)),
    _scheme(
        "mxfp6_e3m2",
        "MXFP6E3M2Scheme",
        "MXFP6 weights and dynamic activations of E3M2 elements",
        _EMULATED,
        "mxfp6",
        "w_mxfp6_e3m2_a_mxfp6_e3m2",
    ),
    _scheme(
        "mxfp6_e2m3", "MXFP6E2M3Scheme", "MXFP6 weights and dynamic activations of E2M3 elements", _EMULATED, "w_mxfp6_e2m3_a_mxfp6_e2m3"
    ),
    _scheme(
        "mxfp4_mxfp6_e2m3",
        "MXFP4_MXFP6E2M3Scheme",
        "MXFP4 weights, dynamic MXFP6 activations of E2M3 elements",
        (*_EMULATED, _GGUF_WEIGHTS),
    ),
    _scheme("mxfp4_fp8", "MXFP4_FP8Scheme", "MXFP4 weights, static E4M3 activations", (*_EMULATED, _GGUF_WEIGHTS)),
    _scheme("amdfp4", "AmdFP4Scheme", "FP4 weights and dynamic activations, groups of 16, E5M3 scales", _ANYWHERE),
    _scheme("amdfp4_g32", "AmdFP4Scheme", "FP4 weights and dynamic activations, groups of 32, E5M3 scales", _ANYWHERE),
    _scheme(
        "nvfp4",
        "FP4Block16ScaleE4M3Scheme",
        "FP4 weights and activations, groups of 16, E4M3 scales under one more scale",
        _ON_GPU,
        "fp4_block16_scale_e4m3",
        shares_global_scale=True,
        kv_cache=_MODULE + "nvfp4_cache",
    ),
    _scheme(
        "amdfp4_global16",
        "AmdFP4GlobalScaleScheme",
        "FP4 weights and activations, groups of 16, E5M3 scales under one more scale",
        _ANYWHERE,
    ),
    _scheme(
        "amdfp4_global32",
        "AmdFP4GlobalScaleScheme",
        "FP4 weights and activations, groups of 32, E5M3 scales under one more scale",
        _ANYWHERE,
    ),
    _scheme("int4_fp8", "INT4_FP8Scheme", "weights rounded to E4M3, then to INT4 per channel; dynamic E4M3 activations", _ANYWHERE),
    _scheme("bfp16", "BFP16Scheme", "BFP16 weights and activations, blocks of 8", _ANYWHERE, "w_bfp16_a_bfp16"),
    _scheme("mx6", "MX6Scheme", "MX6 weights and activations; option block_size (16)", _ANYWHERE, "w_mx6_a_mx6"),
    _scheme("mx9", "MX9Scheme", "MX9 weights and activations; option block_size (16)", _ANYWHERE),
)
"""Every scheme. ``shares_global_scale``: runtimes fuse query, key and value projections, and gate and up
projections, into one matrix.
"""
