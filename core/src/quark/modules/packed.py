"""Packed: a module that holds what a checkpoint holds, and makes of it the module that runs."""

from __future__ import annotations

from torch import nn

__all__ = ["Packed"]


class Packed(nn.Module):
    """Base of modules that stand for another while a checkpoint is loaded: loaders fill their tensors, then `unpack` is called once."""

    def unpack(self) -> nn.Module:
        """The module that takes this one's place, on the device of its tensors.

        Raises:
            CheckpointError: The tensors cannot be used.
        """
        raise NotImplementedError
