"""Which stored tensors make each tensor of a transformers model: its own renamings and conversions, laid out before anything is read.

Names and steps are those that transformers applies when it reads a checkpoint, such as the fusing of experts that lie there one by one, so
that what is read is what ``from_pretrained`` reads. Source: transformers 5, ``core_model_loading``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quark.errors import CheckpointError
from quark.hf.placing import without_source
from quark.hf.shards import Shard, refuse_codes
from quark.log import get_logger
from quark.names import folded


@attrs.frozen(eq=False)
class Recipe:
    """Tensors of a model that come from the same stored ones.

    Attributes:
        sources: Pattern of the conversion and full name of each stored tensor, in the order in which they are joined.
        targets: Full names in the model.
        conversion: Makes the targets of the sources; None where there is one of each, and nothing to do.
    """

    sources: tuple[tuple[str, str], ...]
    targets: tuple[str, ...]
    conversion: Any = None

    def make(self, stored: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """The targets.

        Args:
            stored: The sources by full name; meta tensors give meta tensors.
            model: Whose configuration some conversions ask.
        """
        if self.conversion is None:
            return {self.targets[0]: stored[self.sources[0][1]]}
        return _converted(self.conversion, self.targets[0], self.sources, stored, model)


class StoredTensors:
    """A checkpoint's tensors, as those of one model.

    Args:
        model: A transformers model on the meta device, as it is built: nothing in it has been replaced yet.
        shards: From `quark.hf.shards.check_shards`.
        directory: Of the checkpoint, for messages.

    Attributes:
        recipes: One for each tensor of the model, or for several that are made together; of tied names, those that are stored.

    Raises:
        CheckpointError: The checkpoint lacks tensors of the model, or has some of other shapes or as codes, or a conversion does not fit
            them.
    """

    def __init__(self, model: Any, shards: Sequence[Shard], directory: Path) -> None:
        self._model = model
        self._directory = directory
        self._file_of = {name: shard.path for shard in shards for name in shard.tensors}
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        shapes = {name: shape for shard in shards for name, (_, shape) in shard.tensors.items()}
        found, unused = _recipes(model, shapes, state)
        self.recipes = [self._checked(recipe, shapes, state) for recipe in found]
        self._refuse_missing(state)
        refuse_codes(shards, directory)
        self._refuse_integers({name: dtype for shard in shards for name, (dtype, _) in shard.tensors.items()}, state)
        _tell_unused(unused, model, directory)

    def _checked(self, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> Recipe:
        stored = {name: torch.empty(shapes[name], device="meta") for _, name in recipe.sources}
        names = ", ".join(f"'{name}' {list(t.shape)}" for name, t in list(stored.items())[:4]) + (", …" if len(stored) > 4 else "")
        try:
            made = recipe.make(stored, self._model)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(
                f"'{self._directory}': {names} cannot be turned into '{recipe.targets[0]}' of this {type(self._model).__name__} ({error}): "
                "the checkpoint is of another model, or incomplete"
            ) from error
        for name, tensor in made.items():
            if name not in state or tensor.shape != state[name].shape:
                wanted = list(state[name].shape) if name in state else "no such tensor"
                raise CheckpointError(
                    f"'{self._directory}': {names} gives '{name}' the shape {list(tensor.shape)}, the model of its config.json wants "
                    f"{wanted}: config.json and weights do not belong together"
                )
        return attrs.evolve(recipe, targets=tuple(made))

    def _refuse_missing(self, state: Mapping[str, Tensor]) -> None:
        missing = list(without_source(state, (name for recipe in self.recipes for name in recipe.targets)))
        if missing:
            raise CheckpointError(
                f"'{self._directory}' lacks {len(missing)} tensor(s) of a {type(self._model).__name__}: {folded(missing)}. It is "
                "incomplete, or its config.json is of another model"
            )

    def _refuse_integers(self, dtypes: Mapping[str, str], state: Mapping[str, Tensor]) -> None:
        for recipe in self.recipes:
            for _, name in recipe.sources:
                if dtypes[name].startswith(("I", "U")) and all(state[target].is_floating_point() for target in recipe.targets):
                    raise CheckpointError(
                        f"'{self._directory}' holds '{name}' as {dtypes[name]} where the model has floating-point numbers: it is quantized "
                        "already, or of another model. Give the float checkpoint"
                    )

    def read(self, recipes: Iterable[Recipe], dtype_of: Mapping[str, torch.dtype], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Read tensors, and nothing else; each file is open only while this runs, so that what is mapped of it can be let go.

        Args:
            recipes: Some of this checkpoint's.
            dtype_of: What the target of each name is to be.
            device: Where it is to be.

        Yields:
            Full name in the model, and the tensor.

        Raises:
            CheckpointError: A file has changed or cannot be read.
        """
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for recipe in recipes:
                dtype = dtype_of[recipe.targets[0]]
                stored = {name: self._get(name, files, stack).to(device, dtype) for _, name in recipe.sources}
                yield from recipe.make(stored, self._model).items()

    def _get(self, name: str, files: dict[Path, Any], stack: ExitStack) -> Tensor:
        path = self._file_of[name]
        try:
            if path not in files:
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
            found: Tensor = files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"'{name}' cannot be read from '{path}' ({error}): fetch the checkpoint again") from error
        return found


def _recipes(model: Any, shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> tuple[list[Recipe], list[str]]:
    """Recipes, and the stored tensors that none uses."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    converter_of = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    sources: dict[str, list[tuple[str, str]]] = {}
    conversions: dict[str, Any] = {}
    unused = []
    # Parts are joined in the order of the numbers in their names.
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state or (pattern is None and target in sources):
            unused.append(name)
            continue
        sources.setdefault(target, []).append((pattern or "", name))
        if pattern is not None:
            conversions[target] = converter_of[pattern]
    return [Recipe(tuple(members), (target,), conversions.get(target)) for target, members in sources.items()], unused


def _converted(
    conversion: Any, target: str, sources: Sequence[tuple[str, str]], stored: Mapping[str, Tensor], model: Any
) -> dict[str, Tensor]:
    own = copy.deepcopy(conversion)  # it collects tensors
    for pattern, name in sources:
        own.add_tensor(target, name, pattern, stored[name])
    made: dict[str, Any] = own.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _tell_unused(names: Sequence[str], model: Any, directory: Path) -> None:
    """Warn of stored tensors that the model has no place for, but for those of which it says so itself."""
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    left_out = [name for name in names if not any(p.search(name) for p in ignored)]
    if left_out:
        get_logger(__name__).warning(
            f"'{directory}' holds {len(left_out)} tensor(s) that a {type(model).__name__} has no place for: {folded(left_out)}. "
            "They are left out of the result. Its config.json may say that it has fewer layers, or other parts, than it has"
        )
