"""SafetensorsExporter: the Quark layout, in a directory in Hugging Face form."""

from __future__ import annotations

from typing import Any

from quark.base.log import get_logger
from quark.checkpoint import CheckpointContent, CheckpointExporter, ExportOptions
from quark_exporters.quark_layout.quantization_config import quantization_config

__all__ = ["SafetensorsExporter"]


class SafetensorsExporter(CheckpointExporter):
    """Writes the Quark layout; `quark_exporters.quark_layout.reader` reads it.

    Tensors have the names and the packing of number formats.

    Source: checkpoints of AMD Quark 0.13.
    """

    layout = "safetensors"

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """As `CheckpointExporter.quantization_config`."""
        return quantization_config(content, options)

    def warn(self, content: CheckpointContent, options: ExportOptions) -> None:
        """Warn of runtimes that ignore algorithms that run with the model, or take rounded values for codes."""
        names = [a.name for a in content.config.algo_config or () if a.runs_with_model()]
        if names:
            get_logger(__name__).warning(
                f"The algorithm {', '.join(names)} runs with this model: this project and transformers with it load the export; vLLM does "
                "not know such algorithms and would compute something else without a word."
            )
        if options.weight_format != "real_quantized":
            get_logger(__name__).warning(
                f"weight_format='{options.weight_format}' stores rounded values where codes are expected: this project and transformers "
                "with it load the export; vLLM passes that setting over and would take the values for codes. For vLLM, take "
                "'real_quantized'."
            )
