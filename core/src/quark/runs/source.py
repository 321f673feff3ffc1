"""Sources of a model's float tensors: one that is in memory already, and a checkpoint whose tensors are read block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quark.calibration.finite import refuse_non_finite
from quark.hf.placing import owners_of, put_tensor
from quark.hf.stored_tensors import Recipe, StoredTensors
from quark.log import get_logger
from quark.modules.experts import SeparateExperts, separated
from quark.planning.decoder_blocks import Block, decoder_blocks
from quark.planning.mixtures import FusedMixture, fused_mixtures
from quark.planning.plan import PlanRow, QuantPlan

__all__ = ["BlockSource", "CheckpointSource", "InMemorySource"]


class BlockSource(Protocol):
    """Loads the tensors of a block into the modules of a model, and releases them again."""

    def load(self, block: Block | None) -> None:
        """Load the parameters and buffers of a block; None for those that belong to no block."""

    def release(self, block: Block) -> None:
        """Release a block, which every forward has left and the sink has accepted."""


class InMemorySource:
    """Of a model that is loaded."""

    def load(self, block: Block | None) -> None:
        """Everything is there."""

    def release(self, block: Block) -> None:
        """Everything stays."""


class CheckpointSource:
    """Reads the tensors of a block when its turn comes, and lets them go after it; the model is on the meta device otherwise.

    Of a model that is one block, everything is read at once, since its forwards begin before it is their turn.

    Args:
        model: From `quark.hf.skeleton.skeleton`, nothing in it replaced yet.
        stored: The checkpoint, as tensors of that model.
        device: Where tensors are read to.

    Attributes:
        model, device: As given.
    """

    def __init__(self, model: nn.Module, stored: StoredTensors, device: torch.device) -> None:
        self.model = self._model = model
        self._stored = stored
        self.device = self._device = device
        self._untie()
        self._state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._dtype_of = {name: tensor.dtype for name, tensor in self._state.items()}
        self._owners = owners_of(model)
        # Mixtures are about to be taken apart; their parameters are read as the model was built, and the parts made views of them.
        self._fused = fused_mixtures(model)
        self._recipes: dict[str | None, list[Recipe]] = {}
        self._rows: list[PlanRow] = []
        self._kept: set[int] = set()

    def load_all(self) -> None:
        """Read every tensor into the model, for a run that needs the whole of it in memory; `prepare` comes before.

        Raises:
            CheckpointError: A file cannot be read.
        """
        for target, tensor in self._stored.read(self._stored.recipes, self._dtype_of, self._device):
            self._place(target, tensor)
        for mixture, fused in self._fused.items():
            _share(fused, self._model.get_submodule(mixture))

    def prepare(self, plan: QuantPlan) -> None:
        """Sort tensors by the blocks of a plan, whose fused experts have been taken apart."""
        names = [b.name for b in decoder_blocks(self._model, plan.architecture) if b.name]
        self._rows = list(plan.quantized)
        apart = {name for name, m in self._model.named_modules() if isinstance(m, SeparateExperts)}
        self._fused = {name: m for name, m in self._fused.items() if name in apart}
        names_of: dict[int, list[str]] = {}
        for name, tensor in self._state.items():
            names_of.setdefault(id(tensor), []).append(name)
        for recipe in self._stored.recipes:
            users = [name for target in recipe.targets for name in names_of[id(self._state[target])]]
            self._recipes.setdefault(_common_block(users, names), []).append(recipe)

    def load(self, block: Block | None) -> None:
        """As `BlockSource.load`.

        Raises:
            CheckpointError: A file cannot be read.
            NonFiniteError: A weight that is to be quantized holds NaN or Inf.
        """
        if block is not None and not block.name:
            return
        name = None if block is None else block.name
        for target, tensor in self._stored.read(self._recipes.get(name, ()), self._dtype_of, self._device):
            placed = self._place(target, tensor)
            if block is None:
                self._kept.add(id(placed))
        for mixture, fused in self._fused.items():
            if block.owns(mixture) if block is not None else not fused.is_meta:
                _share(fused, self._model.get_submodule(mixture))
        refuse_non_finite(self._model, self._rows if block is None else (r for r in self._rows if block.owns(r.name)))

    def release(self, block: Block) -> None:
        """As `BlockSource.release`."""
        if not block.name:
            return
        for recipe in self._recipes.get(block.name, ()):
            for target in recipe.targets:
                self._place(target, self._state[target])
        for module in block.module.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta and id(parameter) not in self._kept:
                    module._parameters[leaf] = nn.Parameter(_meta(parameter.shape, parameter.dtype), requires_grad=False)
            for leaf, buffer in module._buffers.items():
                if buffer is not None and leaf not in module._non_persistent_buffers_set and id(buffer) not in self._kept:
                    module._buffers[leaf] = _meta(buffer.shape, buffer.dtype)

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """Put a tensor wherever the model has the one of that name; tied modules share it."""
        return put_tensor(self._owners[id(self._state[name])], tensor)

    def _untie(self) -> None:
        """Give tied modules tensors of their own where the checkpoint has different ones for them, as transformers does."""
        state: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        dtype_of = {name: tensor.dtype for name, tensor in state.items()}
        first_of: dict[int, Recipe] = {}
        for recipe in self._stored.recipes:
            first = first_of.setdefault(id(state[recipe.targets[0]]), recipe)
            if first is recipe:
                continue
            (_, one), (name, other) = self._stored.read([first, recipe], dtype_of, torch.device("cpu"))
            if not torch.equal(one, other):
                get_logger(__name__).warning(
                    f"the config says that '{first.targets[0]}' and '{name}' are one tensor, the checkpoint has two different ones: both "
                    "are kept"
                )
                owner, _, leaf = name.rpartition(".")
                self._model.get_submodule(owner)._parameters[leaf] = nn.Parameter(torch.empty_like(state[name]), requires_grad=False)


# Blocks are alike, and meta tensors are slow to make.
@lru_cache(maxsize=256)
def _meta(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _common_block(names: Iterable[str], blocks: Iterable[str]) -> str | None:
    """The block that all of these tensors lie in, or None."""
    found = {next((b for b in blocks if name.startswith(f"{b}.")), None) for name in names}
    return found.pop() if len(found) == 1 else None


def _share(fused: FusedMixture, apart: nn.Module) -> None:
    """Make the weights of separate experts views of the fused ones that have been read."""
    for (_, to), (_, read) in zip(_layers(apart), _layers(separated(fused.parts())), strict=True):
        to._parameters.update(read._parameters)


def _layers(experts: Any) -> Iterator[tuple[str, nn.Module]]:
    return ((name, m) for name, m in experts.named_modules() if m._parameters)
