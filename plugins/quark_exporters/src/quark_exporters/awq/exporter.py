"""AwqExporter: a checkpoint that readers of AutoAWQ's layout load: vLLM, SGLang, transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import ExportOptions
from quark_exporters.awq.storage import AwqStorage, group_size_of
from quark_exporters.linear_layers import LinearExporter, coded_rows, float_names

__all__ = ["AwqExporter"]


class AwqExporter(LinearExporter):
    """Writes the layout of AutoAWQ, for its kernel ``gemm``; `quark_exporters.awq.reader` reads it.

    Args:
        scale_type: The dtype of scales: float16, which AutoAWQ has and some of its readers insist on;
            bfloat16; or float32, in which they were found, so that nothing is rounded.
    """

    layout = "awq"

    def __init__(self, scale_type: str = "float16") -> None:
        self.storage = AwqStorage(scale_type)

    def reasons(self, content: CheckpointContent, options: ExportOptions) -> Iterator[tuple[str, str]]:
        """As `CheckpointExporter.reasons`."""
        reasons = list(super().reasons(content, options))
        yield from reasons
        sizes = {group_size_of(config) for config in coded_rows(content.plan).values() if config.weight is not None}
        if not reasons and len(sizes) != 1:
            said = ", ".join("whole rows" if size == -1 else str(size) for size in sorted(map(int, filter(None, sizes))))
            yield "", f"all its layers have groups of one size, and here are groups of {said or 'no size, since nothing is quantized'}"
        if any(row.states for row in content.plan.attentions):
            yield "", "it has no place for scales of the cache"

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """As `CheckpointExporter.quantization_config`.

        Readers take the zero points for given: symmetric weights have them too.
        """
        config = next(iter(coded_rows(content.plan).values()))
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": group_size_of(config),
            "zero_point": True,
            "modules_to_not_convert": float_names(content),
        }
