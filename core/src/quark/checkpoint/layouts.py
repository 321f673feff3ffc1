"""Choice of the layout that reads a checkpoint, by the ``quantization_config`` in the checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark.checkpoint.layout_reader import LayoutReader
from quark.errors import CheckpointError
from quark.models.hf.json_files import read_json
from quark.plugins import exporters
from quark.plugins.attribution import attributed, origin
from quark.plugins.catalog import catalog

__all__ = ["layout_for", "quantization_block", "reader_of"]


def quantization_block(directory: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` in the ``config.json`` of a checkpoint.

    Raises:
        CheckpointError: The file or the block is missing.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"'{directory}' is no export: it has no config.json")
    block = read_json(path).get("quantization_config")
    if not isinstance(block, dict):
        raise CheckpointError(f"'{path}' has no quantization_config, by which a layout is chosen: load it with transformers instead")
    return block


def layout_for(block: Mapping[str, Any], path: Path) -> str:
    """Return the name of the layout that reads a checkpoint.

    Args:
        block: The checkpoint's ``quantization_config``.
        path: The file with the block, for messages.

    Raises:
        CheckpointError: No registered layout fits, or the one that fits has no reader.
        AmbiguousNameError: (a ValueError) Several layouts fit equally well.
    """
    name = exporters().fitting_one(block, "reader", path)
    if name is not None:
        return name
    names = exporters().fitting(block)
    if names:
        source = exporters().source(names[0])
        can = "writes it and" if exporters().get(names[0]).exporter is not None else "makes float checkpoints of it and"
        raise CheckpointError(f"'{path}' is of the layout '{names[0]}' of {source}, which {can} cannot read it")
    raise CheckpointError(
        f"'{path}' has a quantization_config of quant_method {block.get('quant_method')!r}, which no installed layout reads. Installed "
        f"ones read {exporters().methods_with('reader')}: install the distribution that brings it, or load it with transformers. "
        f"{catalog().missing((exporters().kind.distribution,))}".rstrip()
    )


def reader_of(name: str) -> LayoutReader:
    """Return a reader of the layout of that name. Raises PluginError where its class cannot be called."""
    kind = exporters().load_reader(name)
    with attributed("being made", origin("exporters", name)):
        reader: LayoutReader = kind()
    return reader
