"""Sources: classes that provide the float tensors of a run. The tensors are in memory, or they are read from
a checkpoint block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from quark.base.finite import buffers_of, is_finite, refuse_non_finite
from quark.base.log import get_logger, silenced
from quark.calibration.transform_validation import BlockSource
from quark.errors import QuarkError, UnsupportedError
from quark.models.hf.internals import compute_absent, directory_of
from quark.models.hf.missing_tensors import refuse_missing
from quark.models.hf.quantized_source import float_tensors_of
from quark.models.hf.shards import INDEX, SINGLE, check_shards
from quark.models.hf.skeleton import meta_model
from quark.models.hf.stored_tensors import Recipe, StoredTensors
from quark.models.hf.tied_tensors import owners_of, put_tensor
from quark.models.layers.coded_layer import CodedLayer
from quark.models.layers.experts import SeparateExperts, separated
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.models.plan.family import weight_converters_of
from quark.models.plan.mixtures import FusedMixture, fused_mixtures
from quark.models.plan.quant_plan import QuantPlan
from quark.runs.memory import free_bytes

LEAST_ROOM = 4
"""The next block is read ahead if the free memory is at least this many times the size of that block.

The quantization of the current block needs memory, too.
"""


K = TypeVar("K")
V = TypeVar("V")


class ReadAhead(Generic[K, V]):
    """Reads at most one value ahead, in a thread.

    The thread ends when it has read the value. If ``read`` raises an exception in the thread, `take` raises
    it.

    Args:
        read: A function that reads the value for a key.
    """

    def __init__(self, read: Callable[[K], V]) -> None:
        self._read = read
        self._ahead: tuple[K, Future[V]] | None = None

    def start(self, key: K) -> None:
        """Start to read the value for a key in a thread. An earlier value that was not taken is discarded."""
        self.stop()
        executor = ThreadPoolExecutor(1, thread_name_prefix="quark-read-ahead")
        self._ahead = key, executor.submit(self._read, key)
        executor.shutdown(wait=False)  # the thread ends when it has read the value

    def take(self, key: K) -> V:
        """Return the value for a key. If no thread has read the value, it is read now."""
        if self._ahead is None or self._ahead[0] != key:
            self.stop()
            return self._read(key)
        (_, future), self._ahead = self._ahead, None
        return future.result()

    def stop(self) -> None:
        """Wait until the thread has ended. Discard the value that it has read, or the exception that it has
        raised.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead[1].cancel():
            ahead[1].exception()


class RunSource(BlockSource, Protocol):
    """A block source whose layers may already be quantized. Such layers may keep their quantization in the
    run.
    """

    def coded(self, names: Sequence[str]) -> Mapping[str, CodedLayer]:
        """Return the codes and scales of layers that keep their quantization, by name.

        A layer keeps its quantization if `quark.models.plan.plan_row.PlanRow.is_kept` is True for it. A run
        asks for each layer only once.
        """


class InMemorySource:
    """The source for a model that is in memory. It loads and releases nothing.

    Args:
        coded: Codes and scales of the layers that are quantized in the source, by full name.
    """

    def __init__(self, coded: Mapping[str, CodedLayer] = MappingProxyType({})) -> None:
        self._coded = dict(coded)

    def load(self, block: Block | None) -> None:
        """Do nothing, because all tensors are in memory."""

    def release(self, block: Block) -> None:
        """Do nothing, because all tensors stay in memory."""

    def coded(self, names: Sequence[str]) -> Mapping[str, CodedLayer]:
        """Return codes and scales, as `RunSource.coded` does."""
        return {name: self._coded.pop(name) for name in names}


def carried_by(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the tensors that a model's checkpoint has but the class of the model does not use.

    The names have the form of `StoredTensors.carried`. The class is the one that the checkpoint's
    ``config.json`` names. That class uses the tensors of parts that were removed from ``model``, so these
    tensors are not in the result. The result is empty if the model was not loaded from safetensors files.
    """
    directory = directory_of(getattr(model, "config", None))
    if directory is None or not any((directory / name).is_file() for name in (INDEX, SINGLE)):
        return ()
    try:
        shards = check_shards(directory)
        if {name for shard in shards for name in shard.tensors} <= model.state_dict().keys():
            return ()
        with silenced():
            own = _class_of(directory) or model
            stored = StoredTensors(own, shards, directory, weight_converters_of(own), float_tensors_of(directory, shards))
    except QuarkError as error:  # the checkpoint has changed, or other code has loaded it
        get_logger(__name__).info(f"Cannot tell whether '{directory}' has tensors that the model does not use: {error}")
        return ()
    return stored.carried


def _class_of(directory: Path) -> nn.Module | None:
    """Return the model of a checkpoint, on the meta device. Return None if the model needs code from the
    checkpoint.
    """
    try:
        return meta_model(directory)
    except UnsupportedError:
        return None


class CheckpointSource:
    """Reads the tensors of a block from a checkpoint when the block is quantized, and releases them
    afterwards.

    All other blocks are on the meta device.

    If the whole model is one block, the model is read at the start, because forward passes start before the
    first block is loaded.

    Args:
        model: The model that `quark.models.hf.skeleton.skeleton` has returned. No module has been replaced
            yet.
        stored: The tensors of the checkpoint, assigned to the tensors of ``model``.
        device: The device to which tensors are read.

    Attributes:
        model, device: The arguments ``model`` and ``device``.
        codes_of, carried: As in `quark.models.hf.stored_tensors.StoredTensors`.
    """

    def __init__(self, model: nn.Module, stored: StoredTensors, device: torch.device) -> None:
        self.model = model
        self._stored = stored
        self.codes_of, self.carried = stored.codes_of, stored.carried
        self.device = device
        self._untie()
        self._computed = compute_absent(model, stored.absent, device)
        refuse_missing([name for name in stored.absent if name not in self._computed], model, stored.directory)
        self._state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._dtype_of = {name: tensor.dtype for name, tensor in self._state.items()}
        self._owners = owners_of(model)
        self._buffers = buffers_of(model)
        # Fused experts will be separated. Their fused parameters are read, and the weights of the separate
        # layers become views of these parameters.
        self._fused = fused_mixtures(model)
        self._recipes: dict[str | None, list[Recipe]] = {}
        self._outside: list[nn.Module] = []
        self._next: dict[str | None, str] = {}
        self._ahead: ReadAhead[str | None, list[tuple[str, Tensor]]] = ReadAhead(self._read)

    def load_all(self) -> None:
        """Read every tensor into the model, for a run that needs the whole model in memory.

        Call `prepare` before this method.

        Raises:
            CheckpointError: A file cannot be read.
            NonFiniteError: A tensor contains NaN or Inf.
        """
        for recipes in self._recipes.values():
            for target, tensor in self._checked(recipes):
                self._place(target, tensor)
        for mixture, fused in self._fused.items():
            _share(fused, self.model.get_submodule(mixture))

    def prepare(self, plan: QuantPlan) -> None:
        """Assign the stored tensors to the blocks of a plan.

        Call this method after the fused experts of the model have been separated.
        """
        names = [b.name for b in decoder_blocks(self.model, plan.architecture) if b.name]
        self._next = dict(zip((None, *names), names, strict=False))
        inside = tuple(f"{name}." for name in names)
        modules = self.model.named_modules(remove_duplicate=False)
        self._outside = [module for name, module in modules if not f"{name}.".startswith(inside or (".",))]
        separate = {name for name, m in self.model.named_modules() if isinstance(m, SeparateExperts)}
        self._fused = {name: m for name, m in self._fused.items() if name in separate}
        names_of: dict[int, list[str]] = {}
        for name, tensor in self._state.items():
            names_of.setdefault(id(tensor), []).append(name)
        for recipe in self._stored.recipes:
            users = [name for target in recipe.targets for name in names_of[id(self._state[target])]]
            self._recipes.setdefault(_common_block(users, names), []).append(recipe)

    def load(self, block: Block | None) -> None:
        """Load the tensors of a block. If ``block`` is None, load the tensors outside all blocks.

        Afterwards, start to read the next block in a thread.

        Raises:
            CheckpointError: A file cannot be read.
            NonFiniteError: A tensor contains NaN or Inf.
        """
        if block is not None and not block.name:
            return
        name = None if block is None else block.name
        for target, tensor in self._ahead.take(name):
            self._place(target, tensor)
        following = self._next.get(name)
        if following is not None and self._has_room_for(following):
            self._ahead.start(following)
        for mixture, fused in self._fused.items():
            if block.owns(mixture) if block is not None else not fused.is_meta:
                _share(fused, self.model.get_submodule(mixture))

    def release(self, block: Block) -> None:
        """Replace a block's tensors by meta tensors, except tensors that modules outside the block also
        use.
        """
        if not block.name:
            return
        for recipe in self._recipes.get(block.name, ()):
            for target in recipe.targets:
                self._place(target, self._state[target])
        # These tensors are looked up now, because transforms may have replaced tensors since the start.
        outside = (t for module in self._outside for t in (*module._parameters.values(), *module._buffers.values()))
        kept = {id(tensor) for tensor in (*outside, *self._computed.values())}
        for module in block.module.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta and id(parameter) not in kept:
                    module._parameters[leaf] = nn.Parameter(_meta(parameter.shape, parameter.dtype), requires_grad=False)
            for leaf, buffer in module._buffers.items():
                if buffer is not None and leaf not in module._non_persistent_buffers_set and id(buffer) not in kept:
                    module._buffers[leaf] = _meta(buffer.shape, buffer.dtype)

    def coded(self, names: Sequence[str]) -> Mapping[str, CodedLayer]:
        """Return codes and scales, like `RunSource.coded`. Raise CheckpointError if a file cannot be read."""
        return self._stored.read_codes(names, self.device)

    def close(self) -> None:
        """Stop reading ahead. Call it when the run has ended or failed."""
        self._ahead.stop()

    def _read(self, name: str | None) -> list[tuple[str, Tensor]]:
        """Read the tensors of a block, check them for NaN and Inf, and return pairs of name and tensor."""
        if name is None:  # norms and biases of all blocks are small, so they are checked now, before any work could be lost
            inside = (recipe for block, recipes in self._recipes.items() if block is not None for recipe in recipes)
            self._checked([recipe for recipe in inside if all(self._state[target].ndim < 2 for target in recipe.targets)])
        return self._checked(self._recipes.get(name, ()))

    def _checked(self, recipes: Sequence[Recipe]) -> list[tuple[str, Tensor]]:
        """Read the tensors that ``recipes`` describe, check them for NaN and Inf, and return pairs of name
        and tensor.
        """
        tensors = list(self._stored.read(recipes, self._dtype_of, self.device))
        refuse_non_finite(dict(tensors), self._buffers, lambda names: self._blame(names, recipes))
        return tensors

    def _blame(self, names: Sequence[str], recipes: Sequence[Recipe]) -> str:
        """Return a text for a message that says why tensors contain NaN or Inf.

        The cause is either the checkpoint or the conversion to the dtype of the run.
        """
        wanted = [recipe for recipe in recipes if not set(names).isdisjoint(recipe.targets)]
        stored = dict(self._stored.read(wanted, dict.fromkeys(self._dtype_of, torch.float64), torch.device("cpu")))
        dtypes = sorted({str(self._dtype_of[name]).removeprefix("torch.") for name in names})
        if not all(is_finite(stored[name]) for name in names):
            return "The checkpoint is damaged or comes from a diverged training. Download it again, or repair it"
        largest = max(float(stored[name].abs().max()) for name in names)
        return (
            f"The checkpoint is intact, but has values up to {largest:.6g} there, which {' and '.join(dtypes)} cannot represent. Choose "
            "another dtype for the run, such as dtype='bfloat16' (--dtype bfloat16)"
        )

    def _has_room_for(self, name: str) -> bool:
        """Return whether there is enough free memory to read the block ``name`` ahead."""
        targets = [self._state[target] for recipe in self._recipes.get(name, ()) for target in recipe.targets]
        free = free_bytes(self.device)
        return free is not None and free >= LEAST_ROOM * sum(tensor.numel() * tensor.itemsize for tensor in targets)

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """Set ``tensor`` in all modules that use the tensor ``name``, and return the tensor that was set.

        Several modules use it if, for example, their weights are tied.
        """
        return put_tensor(self._owners[id(self._state[name])], tensor)

    def _untie(self) -> None:
        """Untie weights that the config ties but whose tensors differ in the checkpoint. transformers does
        the same.
        """
        state: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        dtype_of = {name: tensor.dtype for name, tensor in state.items()}
        first_of: dict[int, Recipe] = {}
        for recipe in self._stored.recipes:
            first = first_of.setdefault(id(state[recipe.targets[0]]), recipe)
            if first is recipe:
                continue
            (_, one), (name, other) = self._stored.read([first, recipe], dtype_of, torch.device("cpu"))
            if not torch.equal(one, other):
                get_logger(__name__).warning(
                    f"The config says that '{first.targets[0]}' and '{name}' are one tensor, but they differ in the checkpoint. "
                    "quark uses both tensors."
                )
                owner, _, leaf = name.rpartition(".")
                self.model.get_submodule(owner)._parameters[leaf] = nn.Parameter(torch.empty_like(state[name]), requires_grad=False)


# The result is cached, because blocks have equal shapes, and meta tensors are slow to create.
@lru_cache(maxsize=256)
def _meta(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _common_block(names: Iterable[str], blocks: Iterable[str]) -> str | None:
    """Return the name of the block that contains all of these tensors, or None if there is no such block."""
    containing = {next((b for b in blocks if name.startswith(f"{b}.")), None) for name in names}
    return containing.pop() if len(containing) == 1 else None


def _share(fused: FusedMixture, apart: nn.Module) -> None:
    """Replace the weights of the separate experts in ``apart`` by views of the fused weights."""
    for (_, to), (_, read) in zip(_layers(apart), _layers(separated(fused.parts())), strict=True):
        to._parameters.update(read._parameters)


def _layers(experts: Any) -> Iterator[tuple[str, nn.Module]]:
    return ((name, m) for name, m in experts.named_modules() if m._parameters)
