"""The records with which quark-exporters registers its checkpoint layouts.

This module does not import torch or transformers.
"""

from __future__ import annotations

from collections.abc import Iterable

from quark.plugins import ExporterRecord, hookimpl

__all__ = ["QUARK_API", "quark_register_exporters"]

QUARK_API = (2, 2)

_INSPECTOR = "quark_exporters.runtimes.inspector:RuntimeInspector"


_LAYOUTS = (
    ExporterRecord(
        name="safetensors",
        aliases=("quark",),
        summary="the Quark checkpoint layout, read by transformers and vLLM",
        exporter="quark_exporters.quark_layout.layout:SafetensorsExporter",
        reader="quark_exporters.quark_layout.layout:QuarkReader",
        dequantizer="quark_exporters.quark_layout.dequantizer:QuarkDequantizer",
        inspector=_INSPECTOR,
        quant_methods=("quark",),
        capabilities={"streaming", "resumable"},
    ),
    ExporterRecord(
        name="gguf",
        summary="a GGUF file, run by llama.cpp and read by transformers",
        exporter="quark_exporters.gguf_layout.exporter:GgufExporter",
        files=("*.gguf",),
        capabilities={"streaming", "tokenizer_inside"},
    ),
    ExporterRecord(
        name="onnx",
        summary="an ONNX file, run by onnxruntime",
        exporter="quark_exporters.onnx_layout.exporter:OnnxExporter",
        files=("*.onnx", "*.onnx.data"),
        capabilities={"graphs"},
    ),
    ExporterRecord(
        name="awq",
        summary="INT4 weights in the layout of AutoAWQ (gemm), read by vLLM, SGLang and transformers",
        exporter="quark_exporters.awq:AwqExporter",
        reader="quark_exporters.awq:AwqReader",
        dequantizer="quark_exporters.awq:AwqDequantizer",
        inspector=_INSPECTOR,
        quant_methods=("awq",),
        capabilities={"rounds_scales", "streaming"},
    ),
    ExporterRecord(
        name="fp8",
        summary="FP8 with one scale or block scales, as in DeepSeek-V3, read by vLLM, SGLang and transformers",
        exporter="quark_exporters.fp8:Fp8Exporter",
        reader="quark_exporters.fp8:Fp8Reader",
        dequantizer="quark_exporters.fp8:Fp8Dequantizer",
        inspector=_INSPECTOR,
        quant_methods=("fp8", "fbgemm_fp8"),
        capabilities={"streaming"},
    ),
    ExporterRecord(
        name="gptq",
        summary="integers of 2 to 8 bits of GPTQ, GPTQModel and AutoRound; read as a source",
        dequantizer="quark_exporters.gptq:GptqDequantizer",
        quant_methods=("gptq", "auto-round", "intel/auto-round"),
    ),
    ExporterRecord(
        name="modelopt",
        summary="FP8 and NVFP4 of NVIDIA ModelOpt; read as a source",
        dequantizer="quark_exporters.modelopt:ModelOptDequantizer",
        quant_methods=("modelopt", "modelopt_fp4"),
    ),
    ExporterRecord(
        name="bitsandbytes",
        summary="INT8 of bitsandbytes; read as a source",
        dequantizer="quark_exporters.bitsandbytes:BitsAndBytesDequantizer",
        quant_methods=("bitsandbytes",),
    ),
    ExporterRecord(
        name="mxfp4",
        summary="MXFP4 experts, as in gpt-oss; read as a source",
        dequantizer="quark_exporters.mxfp4:Mxfp4Dequantizer",
        quant_methods=("mxfp4",),
    ),
    ExporterRecord(
        name="compressed_tensors",
        aliases=("compressed-tensors",),
        summary="the layout of compressed-tensors, read by vLLM: INT4, INT8, FP8, NVFP4 and MXFP4",
        exporter="quark_exporters.compressed_tensors.layout:CompressedTensorsExporter",
        reader="quark_exporters.compressed_tensors.layout:CompressedTensorsReader",
        dequantizer="quark_exporters.compressed_tensors.dequantizer:CompressedTensorsDequantizer",
        inspector=_INSPECTOR,
        quant_methods=("compressed-tensors",),
        capabilities={"rounds_scales", "streaming"},
    ),
)


@hookimpl
def quark_register_exporters() -> Iterable[ExporterRecord]:
    """Return the records of the checkpoint layouts."""
    return _LAYOUTS
