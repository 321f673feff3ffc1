"""QuantizedCheckpoint, which reads the tensors of a quantized checkpoint one block at a time.

This makes it possible to evaluate models that are larger than memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from quark.base.names import folded
from quark.checkpoint.announced_tensors import refuse_misfits
from quark.checkpoint.layout_reader import ReadsOwnFiles
from quark.checkpoint.reader import OpenedCheckpoint, fill_zero_points, place, placed_by, tie
from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.loading import unpack_all
from quark.models.hf.skeleton import empty_model
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.plugins.attribution import attributed

__all__ = ["QuantizedCheckpoint"]


class QuantizedCheckpoint:
    """A `quark.runs.source.BlockSource` that loads the blocks of a quantized checkpoint.

    Each block can be loaded only once.

    Args:
        directory: Directory of the checkpoint.
        device: The device on which loaded tensors are placed.
        trust_remote_code: Whether code that comes with the checkpoint may run.
        packed: Whether layers keep their packed codes and compute from them.

    Attributes:
        model: The model. Before a block is loaded, the values of its tensors are undefined.
        blocks: The decoder blocks of the model.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, or no installed layout reads it.
        UnsupportedError: The layout stores tensors in its own files, which can only be read as a whole.
    """

    @attributed("reading a checkpoint")
    def __init__(self, directory: Path, device: torch.device, *, trust_remote_code: bool = False, packed: bool = False) -> None:
        self._directory, self._device, self._keeps_codes = directory, device, packed
        opened = OpenedCheckpoint.of(directory, empty_model(directory, None, trust_remote_code=trust_remote_code))
        if isinstance(opened.reader, ReadsOwnFiles):
            raise UnsupportedError(
                f"the layout '{opened.layout}' of '{directory}' cannot be read block by block: evaluate without --by-block"
            )
        self.model = opened.model
        self.blocks = decoder_blocks(self.model, opened.plan.architecture)
        place_of = placed_by(opened.reader, self.model, opened.config)
        refuse_misfits(self.model, opened.reader, opened.config, directory)
        self._files = FileTensors(opened.shards)
        self._places: dict[str | None, list[tuple[Path, str, str]]] = {}
        for shard in opened.shards:
            for name, (_, shape) in shard.tensors.items():
                target = place_of(name, torch.empty(shape, device="meta"))
                owner = next((b.name for b in self.blocks if b.owns(target)), None)
                self._places.setdefault(owner, []).append((shard.path, name, target))
        self._stored = {target for entries in self._places.values() for _, _, target in entries}
        self._stored |= fill_zero_points(self.model, self._stored)

    def load(self, block: Block | None) -> None:
        """Read the tensors of a block and build its layers.

        If ``block`` is None, do the same for the tensors and layers outside all blocks.
        """
        entries = self._places.get(None if block is None else block.name, ())
        with self._files.reading(torch.device("cpu")) as read:
            for path, name, target in entries:
                place(self.model, target, name, read(name, torch.float32), path)
        if block is None:
            tie(self.model, {target for _, _, target in entries})
            self._refuse_incomplete()
            unpack_all(self.model, self._directory, self._is_outside, keeps_codes=self._keeps_codes)
            for name, module in self.model.named_modules():
                if self._is_outside(name):
                    module._apply(lambda tensor: tensor.to(self._device), recurse=False)
        else:
            unpack_all(block.module, self._directory, keeps_codes=self._keeps_codes)
            block.module.to(self._device)

    def release(self, block: Block) -> None:
        """Release the tensors of a block. The block cannot be loaded again."""
        block.module.to("meta")

    def _refuse_incomplete(self) -> None:
        """Raise CheckpointError if the checkpoint lacks a tensor of the model."""
        stored, tensors = self._stored, self.model.state_dict(keep_vars=True)
        # Only one of tied tensors is stored. On the meta device, layers of one shape share scales, although
        # they are not tied.
        known = [tensors[target] for target in stored if target in tensors]
        shared = {id(tensor) for tensor in known if isinstance(tensor, nn.Parameter) or not tensor.is_meta}
        if missing := [name for name, tensor in tensors.items() if name not in stored and id(tensor) not in shared]:
            raise CheckpointError(f"the export '{self._directory}' lacks {len(missing)} tensor(s): {folded(missing)}. Export it again")

    def _is_outside(self, module: str) -> bool:
        return not any(block.owns(f"{module}.") for block in self.blocks)
