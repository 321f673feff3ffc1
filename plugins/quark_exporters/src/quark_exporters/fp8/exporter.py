"""Fp8Exporter: a checkpoint with FP8 weights in the layout of DeepSeek-V3, which vLLM, SGLang and transformers read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark.base.log import get_logger
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import ExportOptions
from quark_exporters.fp8.storage import Fp8Storage, activation_scheme_of, block_size_of
from quark_exporters.linear_layers import LinearExporter, coded_rows, float_names

__all__ = ["Fp8Exporter"]


class Fp8Exporter(LinearExporter):
    """Writes FP8 weights with one scale, or in blocks; `quark_exporters.fp8.reader` reads them."""

    layout = "fp8"
    storage = Fp8Storage()

    def reasons(self, content: CheckpointContent, options: ExportOptions) -> Iterator[tuple[str, str]]:
        """As `CheckpointExporter.reasons`."""
        reasons = list(super().reasons(content, options))
        yield from reasons
        if not reasons and len(kinds := {(activation_scheme_of(c), block_size_of(c)) for c in coded_rows(content.plan).values()}) != 1:
            said = "; ".join(
                f"{scheme} inputs, {'one scale' if block is None else f'blocks of {block}'}" for scheme, block in sorted(kinds, key=str)
            )
            yield "", f"all its layers are quantized alike, and here are: {said or 'none'}"

    def warn(self, content: CheckpointContent, options: ExportOptions) -> None:
        """Warn that transformers takes weights with one scale for unscaled ones: it looks for the scales of blocks alone."""
        if any(block_size_of(config) is None for config in coded_rows(content.plan).values()):
            get_logger(__name__).warning(
                "FP8 weights with one scale have it as vLLM and SGLang name it, weight_scale. transformers' reader of quant_method 'fp8' "
                "knows weight_scale_inv, of blocks, and would compute with unscaled codes: for transformers, export as compressed_tensors"
            )

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """As `CheckpointExporter.quantization_config`."""
        config, names = next(iter(coded_rows(content.plan).values())), float_names(content)
        block = block_size_of(config)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": activation_scheme_of(config),
            "weight_block_size": None if block is None else list(block),
            # One list under the names of both readers: vLLM and SGLang look for the first, transformers for
            # the second.
            "ignored_layers": names,
            "modules_to_not_convert": names,
            "kv_cache_scheme": "static" if any(row.states for row in content.plan.attentions) else None,
        }
