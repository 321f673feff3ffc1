"""What reads a checkpoint layout. Third parties implement `LayoutReader` and name the class as ``reader`` of an `ExporterRecord`.

A reader says three things: what the checkpoint's ``config.json`` asks for (`LayoutReader.configuration`), how a float model becomes one
that the stored tensors fit (`LayoutReader.prepare`), and where each tensor goes in it (`LayoutReader.place_of`). Everything else is done
for it: the float model is built of the same ``config.json``, files are checked and read, every tensor is placed once and none is missing,
and what stands for a quantized module (`quark.modules.packed.Packed`) is replaced by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import attrs
from torch import Tensor, nn

from quark.config.model import QConfig
from quark.planning.plan import QuantPlan

__all__ = ["LayoutReader", "ReadsOwnFiles", "RenamesTensors", "StoredConfig"]


@attrs.frozen(kw_only=True)
class StoredConfig:
    """What the ``quantization_config`` of a checkpoint says.

    Attributes:
        config: How the model was quantized.
        pack_method: Order of 4-bit codes in a word, for formats that are packed so.
    """

    config: QConfig
    pack_method: str = "reorder"


class LayoutReader(Protocol):
    """Reads one checkpoint layout. Implementations are classes that are called without arguments, once for each checkpoint."""

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        """Return what a checkpoint says about its quantization.

        Args:
            block: The ``quantization_config`` of its ``config.json``; whoever wrote it, any value may be of any type.
            directory: The checkpoint. Where transformers loads it, what ``from_pretrained`` was given, which may be the name of a model.

        Raises:
            ConfigError, CheckpointError: The block cannot be used.
        """

    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        """Change a float model in place so that the stored tensors fit it, and return the plan by which its layers are quantized.

        `quark.checkpoint.packed_model.pack_model` does this with modules of the core, whatever the format of the weights.

        Args:
            model: Its weights are on any device, the meta device too, and are not used.
            stored: What `configuration` returned.

        Raises:
            ConfigError, UnsupportedError: The configuration does not fit the model.
        """

    def place_of(self, model: nn.Module, name: str) -> str:
        """Return the path of a stored tensor in the prepared model, such as ``"lm_head.weight_quantizer.scale"``.

        Args:
            model: As `prepare` has left it.
            name: Of the tensor in the checkpoint.
        """


@runtime_checkable
class ReadsOwnFiles(Protocol):
    """What a `LayoutReader` has besides where the tensors do not lie in ``model*.safetensors``."""

    def tensors(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the checkpoint with its name.

        Raises:
            CheckpointError: A file is missing or damaged.
        """


@runtime_checkable
class RenamesTensors(Protocol):
    """What a `LayoutReader` has besides where ``from_pretrained`` of transformers is to read the layout and names differ.

    Attributes:
        renamings: Regular expression of a part of a stored name, and what it becomes in the prepared model, in order. Source: the
            ``WeightRenaming`` of transformers 5.
    """

    renamings: Sequence[tuple[str, str]]
