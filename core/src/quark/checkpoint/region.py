"""Region: a part of a model, whose tensors are written together."""

from __future__ import annotations

import attrs
from torch import Tensor, nn

__all__ = ["WHOLE", "Region"]


@attrs.frozen
class Region:
    """A part of a model: the modules and tensors under one module, except those under some of its descendants.

    Attributes:
        root: Full name of the module; empty for the model itself.
        without: Full names of the modules that do not belong to it.
    """

    root: str = ""
    without: tuple[str, ...] = ()

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return its modules by full name, in the model's order."""
        modules = model.get_submodule(self.root).named_modules(prefix=self.root)
        return {name: module for name, module in modules if not self._excludes(name)}

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return its parameters and persistent buffers by full name, in the model's order; tied ones are one object."""
        prefix = f"{self.root}." if self.root else ""
        state = model.get_submodule(self.root).state_dict(keep_vars=True, prefix=prefix)
        return {name: tensor for name, tensor in state.items() if not self._excludes(name)}

    def _excludes(self, name: str) -> bool:
        return f"{name}.".startswith(tuple(f"{module}." for module in self.without))


WHOLE = Region()
