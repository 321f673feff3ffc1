"""The exporter and the reader for the Quark layout.

A checkpoint is a directory in the form that Hugging Face libraries use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from quark.base.log import get_logger
from quark.checkpoint import CheckpointContent, CheckpointExporter, ExportOptions, LayoutReader, StoredConfig
from quark.checkpoint.model_tensors import STORED_PROBABILITIES
from quark.config.layer import Slot
from quark.models.hf.shards import check_shards
from quark.models.hf.tied_tensors import module_at
from quark.models.layers.attention import PROBABILITIES
from quark.models.layers.packed_layers import PackedLayer
from quark.models.plan.quant_plan import has_static_scale
from quark_exporters.quark_layout.quantization_config import quantization_config, read_quantization_config

__all__ = ["QuarkReader", "SafetensorsExporter"]


class SafetensorsExporter(CheckpointExporter):
    """Writes the Quark layout. `QuarkReader` reads this layout.

    The number format of a weight defines how the codes are packed, and which names the stored tensors have.

    Source: checkpoints of AMD Quark 0.13.
    """

    layout = "safetensors"
    holds_branches = True

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        """Return the ``quantization_config`` to write (see `CheckpointExporter.quantization_config`)."""
        return quantization_config(content, options)

    def warn(self, content: CheckpointContent, options: ExportOptions) -> None:
        """Warn if some runtimes would compute wrong results with the exported checkpoint.

        Such runtimes ignore algorithms that run with the model, or interpret rounded values as codes.
        """
        if names := content.config.run_time_algorithms:
            get_logger(__name__).warning(
                f"The algorithm {', '.join(names)} runs with this model, and vLLM without quark-vllm would silently compute wrong "
                f"results. Load the export with quark, transformers with quark, or vLLM with quark-vllm."
            )
        if options.weight_format != "real_quantized":
            get_logger(__name__).warning(
                f"weight_format='{options.weight_format}' stores rounded values, but vLLM would interpret them as codes. For "
                f"vLLM, use 'real_quantized'; quark and transformers with quark load both."
            )


_OF_PROBABILITIES = f"{STORED_PROBABILITIES}_"
_ATTRIBUTES = {slot.checkpoint_prefix: slot.quantizer_attribute for slot in Slot}


class QuarkReader(LayoutReader):
    """Reads checkpoints in the Quark layout."""

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        """Return the configuration of a checkpoint (see `quark.checkpoint.LayoutReader.configuration`)."""
        stored = read_quantization_config(block)
        config = stored.config
        if has_static_scale(config.softmax_quant_spec) and not any(
            name.rpartition(".")[2].startswith(_OF_PROBABILITIES) for shard in check_shards(directory) for name in shard.tensors
        ):
            # Only the missing scales show that such an export has float attention probabilities.
            get_logger(__name__).warning(f"'{directory}' has no scales for attention probabilities, so attention probabilities stay float")
            return attrs.evolve(stored, config=attrs.evolve(config, softmax_quant_spec=None))
        return stored

    def place_of(self, model: nn.Module, name: str) -> str:
        """Return where the model stores a tensor (see `quark.checkpoint.LayoutReader.place_of`)."""
        owner, _, leaf = name.rpartition(".")
        try:
            module = module_at(model, owner)
        except KeyError:
            return name
        attribute = _packed_attribute(leaf) if isinstance(module, PackedLayer) else _attention_attribute(leaf)
        return f"{owner}.{attribute}" if owner else attribute


def _packed_attribute(name: str) -> str:
    """Return where a packed layer stores the tensor ``name`` of the checkpoint, as an attribute path.

    For example, ``weight_scale`` becomes ``weight_quantizer.scale``. A name that belongs to no quantizer does
    not change.
    """
    prefix, _, suffix = name.partition("_")
    return f"{_ATTRIBUTES[prefix]}.{suffix}" if suffix and prefix in _ATTRIBUTES else name


def _attention_attribute(name: str) -> str:
    """Return where an attention module stores the tensor ``name`` of the checkpoint, as an attribute path.

    For example, ``prob_output_scale`` becomes ``prob_output_quantizer.scale``. Other names do not change.
    """
    return f"{PROBABILITIES}.{name.removeprefix(_OF_PROBABILITIES)}" if name.startswith(_OF_PROBABILITIES) else name
