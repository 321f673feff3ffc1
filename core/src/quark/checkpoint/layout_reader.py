"""`LayoutReader`, the base class of readers of checkpoint layouts, and functions that choose a reader.

A plugin derives a class from `LayoutReader` and names it as ``reader`` of an `ExporterRecord`. A reader
parses the ``quantization_config`` (`LayoutReader.configuration`), changes a float model so that the stored
tensors fit (`LayoutReader.prepare`), and maps stored names to paths in the changed model
(`LayoutReader.place_of`). The package ``quark`` does the rest. It builds the float model from
``config.json``, checks and reads the files, puts every tensor in its place, checks that no tensor is
missing, and replaces each `quark.models.layers.layers_from_codes.Packed` by the quantized module.
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
        pack_method: Packing order of 4-bit codes in a word, ``"reorder"`` or ``"order"``.
    """

    config: QConfig
    pack_method: str = "reorder"


class LayoutReader(ABC):
    """The base class of readers. A reader reads checkpoints of one layout.

    quark creates one object for each checkpoint, without arguments.

    Attributes:
        renamings: Pairs of a regular expression and a replacement. They are applied in order to a stored
            name, and the result is a name in the prepared model. ``from_pretrained`` of transformers uses
            these pairs instead of `place_of`. They have the form of ``WeightRenaming`` in transformers 5.
    """

    renamings: Sequence[tuple[str, str]] = ()

    @abstractmethod
    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        """Return the parsed ``quantization_config`` of a checkpoint.

        Args:
            block: The ``quantization_config`` in ``config.json``. It has not been validated, so values may
                have any type.
            directory: The checkpoint. If transformers loads the checkpoint, this is the argument of
                ``from_pretrained``, which may also be the name of a model on a hub.

        Raises:
            ConfigError, CheckpointError: ``block`` cannot be used.
        """

    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        """Change a float model in place so that the stored tensors fit, and return the plan of the model.

        The default implementation calls `quark.checkpoint.pack_model`.

        Args:
            model: The float model. Its weights are not used, and may be on any device, including the meta
                device.
            stored: The result of `configuration`.

        Raises:
            ConfigError, UnsupportedError: The configuration does not fit the model.
        """
        return pack_model(model, stored.config, stored.pack_method)

    def place_of(self, model: nn.Module, name: str) -> str:
        """Return the path of a stored tensor in the prepared model.

        An example of a path is ``"lm_head.weight_quantizer.scale"``. The default implementation returns
        ``name``.

        Args:
            model: The model after `prepare`.
            name: Name of the tensor in the checkpoint.
        """
        return name

    def layer_config(self, block: Mapping[str, Any]) -> QLayerConfig | None:
        """Return the quantization that all quantized layers have in common.

        Return None if the ``quantization_config`` does not contain such a quantization.

        Raises:
            ConfigError, UnsupportedError: ``block`` cannot be used.
        """
        return None


class ReadsOwnFiles(LayoutReader):
    """The base class of readers for layouts that do not store tensors in ``model*.safetensors``."""

    @abstractmethod
    def tensors(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor for every tensor of the checkpoint.

        Raises:
            CheckpointError: A file is missing or damaged.
        """


def quantization_block(directory: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` in the ``config.json`` of a checkpoint.

    Raises:
        CheckpointError: ``config.json`` or the ``quantization_config`` in it is missing.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"'{directory}' is no quantized checkpoint, because it has no config.json. Give the directory of an export")
    block = read_json(path).get("quantization_config")
    if not isinstance(block, dict):
        raise CheckpointError(f"'{path}' has no quantization_config, which would name the layout. Load the model with transformers instead")
    return block


def layout_for(block: Mapping[str, Any], path: Path) -> str:
    """Return the name of the layout that reads a checkpoint.

    Args:
        block: The checkpoint's ``quantization_config``.
        path: The file that contains ``block``, for messages.

    Raises:
        CheckpointError: No registered layout fits ``block``, or the layout that fits has no reader.
        AmbiguousNameError: (a ValueError) Several layouts fit equally well.
    """
    name = exporters().fitting_one(block, "reader", path)
    if name is not None:
        return name
    names = exporters().fitting(block)
    if names:
        source = exporters().source(names[0])
        can = "write" if exporters().get(names[0]).exporter is not None else "dequantize"
        raise CheckpointError(
            f"'{path}' has the layout '{names[0]}' of {source}. This plugin can {can} the layout but cannot read it. Load the model with "
            "transformers or the runtime that the layout is for"
        )
    raise CheckpointError(
        f"'{path}' has a quantization_config of quant_method {block.get('quant_method')!r}, which no installed layout reads. Installed "
        f"layouts read {exporters().methods_with('reader')}. Install the distribution of that method, or load the model with transformers. "
        f"{catalog().missing((exporters().kind.distribution,))}".rstrip()
    )


def reader_of(name: str) -> LayoutReader:
    """Return a new reader for the layout ``name``.

    Raises:
        PluginError: The class of the reader cannot be called, or does not derive from `LayoutReader`.
    """
    kind, whose = exporters().load_reader(name), origin("exporters", name)
    with attributed("being made", whose):
        reader: object = kind()
    if not isinstance(reader, LayoutReader):
        raise whose.error("has a reader that does not derive from quark.checkpoint.LayoutReader")
    return reader
