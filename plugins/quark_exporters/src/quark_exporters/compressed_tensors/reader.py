"""CompressedTensorsReader: checkpoints of compressed-tensors, whoever wrote them, as quantized models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quark.config.json_values import value_of
from quark.config.layer import QLayerConfig
from quark.errors import UnsupportedError
from quark_exporters.compressed_tensors.arguments import format_of, spec_of
from quark_exporters.compressed_tensors.scheme import group_of, refuse_other_transforms
from quark_exporters.compressed_tensors.storage import CompressedTensorsStorage
from quark_exporters.storage_reader import StorageReader

__all__ = ["CompressedTensorsReader"]


class CompressedTensorsReader(StorageReader):
    """Reads the layout of compressed-tensors, as `quark.checkpoint.LayoutReader`."""

    storage = CompressedTensorsStorage()

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """As `quark_exporters.storage_reader.StorageReader.layers`."""
        refuse_other_transforms(block)
        return {name: _config(block, name, stored) for name in _names(stored)}


def _names(stored: Mapping[str, Any]) -> Iterator[str]:
    for name in stored:
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" or (leaf == "weight" and f"{layer}.weight_scale" in stored):
            yield layer


def _config(block: Mapping[str, Any], name: str, stored: Mapping[str, Any]) -> QLayerConfig:
    if f"{name}.weight_g_idx" in stored:
        raise UnsupportedError(f"the columns of '{name}' are grouped by their activations (weight_g_idx), which is read as a source only")
    group = group_of(block, name)
    inputs = value_of(group, "input_activations", Mapping)
    config = QLayerConfig(
        weight=spec_of(group["weights"], activation=False),
        input_tensors=None if inputs is None else spec_of(inputs, activation=True),
    )
    expected, said = format_of(config), group.get("format") or block.get("format")
    if said not in (expected, "naive-quantized"):
        raise UnsupportedError(f"'{name}' is stored in the format {said!r} of compressed-tensors, and {expected!r} is read for its scheme")
    return config
