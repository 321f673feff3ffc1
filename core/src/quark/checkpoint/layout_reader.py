"""LayoutReader: base of the classes that read a checkpoint layout; and the choice of a reader.

Third parties derive from `LayoutReader` and name the class as ``reader`` of an `ExporterRecord`. A reader
parses the ``quantization_config`` (`LayoutReader.configuration`), changes a float model so that the stored
tensors fit it (`LayoutReader.prepare`), and maps stored names to paths in that model
(`LayoutReader.place_of`). The core does the rest: it builds the float model from ``config.json``, checks and
reads the files, places every tensor once, checks that none is missing, and replaces each
`quark.models.layers.layers_from_codes.Packed` by the quantized module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor, nn

from quark.checkpoint.packed_model import pack_model
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import CheckpointError
from quark.models.hf.json_files import read_json
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins import exporters
from quark.plugins.attribution import attributed, origin
from quark.plugins.catalog import catalog


@attrs.frozen(kw_only=True)
class StoredConfig:
    """The parsed ``quantization_config`` of a checkpoint.

    Attributes:
        config: The configuration of the quantized model.
        pack_method: Order of 4-bit codes in a word, for formats that pack several codes into a word.
    """

    config: QConfig
    pack_method: str = "reorder"


class LayoutReader(ABC):
    """Reads one checkpoint layout.

    A class is called without arguments, once for each checkpoint.

    Attributes:
        renamings: Regular expressions for parts of stored names, with their replacements in the prepared
            model, in order. ``from_pretrained`` of transformers uses them instead of `place_of`. Source:
            ``WeightRenaming`` of transformers 5.
    """

    renamings: Sequence[tuple[str, str]] = ()

    @abstractmethod
    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        """Return the parsed ``quantization_config`` of a checkpoint.

        Args:
            block: The ``quantization_config`` of its ``config.json``, not validated: any value may have any
                type.
            directory: The checkpoint. With transformers, this is the argument of ``from_pretrained``, which
                may be the name of a model.

        Raises:
            ConfigError, CheckpointError: The block cannot be used.
        """

    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        """Change a float model in place so that the stored tensors fit it, and return its plan.

        By default `quark.checkpoint.pack_model` does this, whatever the format of the weights.

        Args:
            model: The float model, with weights on any device, including the meta device; they are not used.
            stored: The result of `configuration`.

        Raises:
            ConfigError, UnsupportedError: The configuration does not fit the model.
        """
        return pack_model(model, stored.config, stored.pack_method)

    def place_of(self, model: nn.Module, name: str) -> str:
        """Return the path of a stored tensor in the prepared model: ``"lm_head.weight_quantizer.scale"``.

        By default, tensors have the names of their places.

        Args:
            model: The model after `prepare`.
            name: Name of the tensor in the checkpoint.
        """
        return name

    def layer_config(self, block: Mapping[str, Any]) -> QLayerConfig | None:
        """Return the common quantization of all layers, if the ``quantization_config`` states it; or None.

        Raises:
            ConfigError, UnsupportedError: The block cannot be used.
        """
        return None


class ReadsOwnFiles(LayoutReader):
    """Reads a layout whose tensors are not stored in ``model*.safetensors``."""

    @abstractmethod
    def tensors(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the checkpoint with its name.

        Raises:
            CheckpointError: A file is missing or damaged.
        """


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
        raise CheckpointError(f"'{path}' has no quantization_config, which names the layout: load it with transformers instead")
    return block


def layout_for(block: Mapping[str, Any], path: Path) -> str:
    """Return the name of the layout that reads a checkpoint.

    Args:
        block: The checkpoint's ``quantization_config``.
        path: The file with the block, for messages.

    Raises:
        CheckpointError: No registered layout fits, or the fitting layout has no reader.
        AmbiguousNameError: (a ValueError) Several layouts fit equally well.
    """
    name = exporters().fitting_one(block, "reader", path)
    if name is not None:
        return name
    names = exporters().fitting(block)
    if names:
        source = exporters().source(names[0])
        can = "writes it but" if exporters().get(names[0]).exporter is not None else "dequantizes it but"
        raise CheckpointError(f"'{path}' has the layout '{names[0]}' of {source}, which {can} cannot read it")
    raise CheckpointError(
        f"'{path}' has a quantization_config of quant_method {block.get('quant_method')!r}, which no installed layout reads. Installed "
        f"ones read {exporters().methods_with('reader')}: install the distribution of that method, or load it with transformers. "
        f"{catalog().missing((exporters().kind.distribution,))}".rstrip()
    )


def reader_of(name: str) -> LayoutReader:
    """Return a reader of the layout of that name.

    Raises:
        PluginError: Its class cannot be called, or does not derive from `LayoutReader`.
    """
    kind, whose = exporters().load_reader(name), origin("exporters", name)
    with attributed("being made", whose):
        reader: object = kind()
    if not isinstance(reader, LayoutReader):
        raise whose.error("has a reader that does not derive from quark.checkpoint.LayoutReader")
    return reader
