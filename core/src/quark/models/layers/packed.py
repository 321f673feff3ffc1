"""Packed: base of modules that hold a checkpoint's tensors and are converted to the modules that run."""

from __future__ import annotations

from torch import nn

__all__ = ["Packed"]


class Packed(nn.Module):
    """Base of modules that replace other modules while a checkpoint is loaded: loaders fill their tensors, then `unpack` is called once."""

    def unpack(self) -> nn.Module:
        """Return the module that replaces this one, on the device of its tensors.

        Raises:
            CheckpointError: The tensors cannot be used.
        """
        raise NotImplementedError
