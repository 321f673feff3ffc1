"""Functions that find out from which stored tensors each tensor of a transformers model is computed. They
read only the headers of the files.

Weight converters of the user or of a template are applied first (`quark.models.hf.converted_tensors`). Then
the renamings and conversions of transformers are applied. For example, they fuse experts that are stored
separately. The result is the same as from ``from_pretrained``. Source: transformers 5,
``core_model_loading``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.base.log import get_logger
from quark.base.names import folded
from quark.errors import CheckpointError
from quark.models.hf.converted_tensors import ConvertedTensors
from quark.models.hf.dequantizer import DequantizedTensors, FloatTensor, LayerCodes
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.missing_tensors import (
    left_out_by,
    may_lack,
    recomputed_by,
    refuse_lost,
    refuse_missing,
    refuse_unannounced,
    without_source,
)
from quark.models.hf.shards import Shard, refuse_codes
from quark.models.layers.coded_layer import CodedLayer


@attrs.frozen(eq=False)
class Recipe:
    """A description of how one or more tensors of a model are computed from stored tensors.

    Attributes:
        sources: A pair for each stored tensor: the pattern of transformers' conversion, and the full name of
            the tensor. If the conversion joins tensors, it joins them in the order of this sequence.
        targets: Full names of the resulting tensors in the model.
        conversion: The ``WeightConverter`` of transformers that computes the targets from the sources. It is
            None if there is only one source, and the target equals this source.
    """

    sources: tuple[tuple[str, str], ...]
    targets: tuple[str, ...]
    conversion: Any = None

    def make(self, stored: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
        """Compute the targets. Return a dictionary from full name to tensor.

        Args:
            stored: A dictionary from full name to source. If the sources are meta tensors, the targets are
                meta tensors too.
            model: The transformers model, or the `ModelAsLoaded` of this model. Some conversions need it.
        """
        if self.conversion is None:
            return {self.targets[0]: stored[self.sources[0][1]]}
        converter = copy.deepcopy(self.conversion)  # a converter collects tensors, so each call needs its own copy
        for pattern, name in self.sources:
            converter.add_tensor(self.targets[0], name, pattern, stored[name])
        results: dict[str, Any] = converter.convert(self.targets[0], model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


@attrs.frozen(eq=False)
class ModelAsLoaded:
    """The parts of a model that transformers' conversions need. They are saved before fused experts are
    separated.

    Attributes:
        config: The transformers config of the model.
        state: A dictionary from full name to tensor. It was made before any module of the model was replaced.
    """

    config: Any
    state: Mapping[str, Tensor]

    def get_parameter(self, name: str) -> Tensor:
        """Return the tensor with the full name ``name``."""
        return self.state[name]


class StoredTensors:
    """The tensors of a checkpoint, converted to the tensors of one model.

    Args:
        model: A transformers model on the meta device. No module of the model may have been replaced yet.
        shards: The files of the checkpoint, from `quark.models.hf.shards.check_shards`.
        directory: The directory of the checkpoint, for messages.
        converters: ``WeightConverter`` objects of transformers, from the user or from the template of the
            model. They are applied (`quark.models.hf.converted_tensors`) before the conversions of
            transformers itself.
        float_tensors: The tensors that are computed from the codes of a quantized checkpoint. None means that
            the checkpoint is float.

    Attributes:
        directory: The argument ``directory``.
        recipes: A recipe for each tensor of the model, or for several tensors that are computed together. A
            tied tensor, which has several names in the model, appears only under its stored name.
        codes_of: A dictionary from full name in the model to `LayerCodes`, for each layer that is quantized
            in the source. The value is None if no `QLayerConfig` expresses the quantization exactly.
        absent: Full names of tensors that the checkpoint lacks, but that the model class can compute.
        carried: Names of stored tensors that the model class neither uses nor computes. An export copies
            them.

    Raises:
        CheckpointError: The checkpoint lacks tensors of the model, stores tensors in other shapes or as
            codes, or has tensors for which the model has no place. Or a conversion of transformers does not
            fit the stored tensors.
        ConfigError: A weight converter does not fit the stored tensors.
    """

    def __init__(
        self,
        model: Any,
        shards: Sequence[Shard],
        directory: Path,
        converters: Sequence[Any] = (),
        float_tensors: Sequence[FloatTensor] | None = None,
    ) -> None:
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._model = ModelAsLoaded(model.config, state)
        self._kind = type(model).__name__
        self.directory = directory
        if float_tensors is None:
            refuse_codes(shards, directory)
        files = FileTensors(shards)
        float_files = files if float_tensors is None else DequantizedTensors(files, float_tensors, directory)
        names = _ModelNames(model, state)
        self._files = files
        self._layers = dict(_layers(names, float_tensors or ()))
        self.codes_of = {name: codes for name, (_, codes) in self._layers.items()}
        self._tensors = ConvertedTensors(float_files, directory, converters, lambda name: names.find(name) is not None, self._model)
        recipes, unused = _recipes(names, self._tensors.meta)
        self.recipes = [self._checked(recipe, state) for recipe in recipes]
        self.absent = tuple(without_source(state, (name for recipe in self.recipes for name in recipe.targets)))
        may_be_absent = may_lack(model)
        refuse_missing([name for name in self.absent if not may_be_absent(name)], model, directory)
        self._refuse_integers(state)
        is_recomputed = recomputed_by(model)
        without_place = [name for name in unused if names.find(name) is None and name in float_files.meta]
        self.carried = tuple(name for name in without_place if not is_recomputed(name))
        refuse_lost([name for name in unused if name not in set(without_place)], model, directory)
        if float_tensors is not None:
            refuse_unannounced([n for n in self.carried if names.find(f"{n.rpartition('.')[0]}.weight") is not None], directory)
        _tell_carried(self.carried, model, directory)

    def _checked(self, recipe: Recipe, state: Mapping[str, Tensor]) -> Recipe:
        """Check the names and shapes of the targets, and return a copy of ``recipe`` with all targets."""
        stored = {name: self._tensors.meta[name] for _, name in recipe.sources}
        names = ", ".join(f"'{name}' {list(t.shape)}" for name, t in list(stored.items())[:4]) + (", …" if len(stored) > 4 else "")
        try:
            targets = recipe.make(stored, self._model)
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(
                f"{names} of '{self.directory}' cannot be converted to '{recipe.targets[0]}' of this {self._kind} ({error}). "
                "The checkpoint is incomplete, or of another model: fetch it again, or correct its config.json"
            ) from error
        for name, tensor in targets.items():
            if name not in state or tensor.shape != state[name].shape:
                expected = list(state[name].shape) if name in state else "no such tensor"
                raise CheckpointError(
                    f"'{name}' gets the shape {list(tensor.shape)} from {names} of '{self.directory}', but the model of its config.json "
                    f"has {expected}. So config.json and the weights do not belong together: fetch both again"
                )
        return attrs.evolve(recipe, targets=tuple(targets))

    def _refuse_integers(self, state: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError if a stored tensor has integers, but the model has floating-point numbers."""
        for recipe in self.recipes:
            for _, name in recipe.sources:
                dtype = self._tensors.meta[name].dtype
                is_integer = not dtype.is_floating_point and dtype is not torch.bool
                if is_integer and all(state[target].is_floating_point() for target in recipe.targets):
                    stored = self._tensors.sources(name)[0]
                    raise CheckpointError(
                        f"'{self.directory}' holds '{stored}' as {str(dtype).removeprefix('torch.')}, but the model has floating-point "
                        "numbers. The checkpoint is quantized already, or of another model. Give the float checkpoint"
                    )

    def read(self, recipes: Iterable[Recipe], dtype_of: Mapping[str, torch.dtype], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Read and compute the targets of some recipes.

        Files are open only while this generator runs.

        Args:
            recipes: Recipes from the attribute ``recipes``.
            dtype_of: A dictionary from full name of each target to its dtype.
            device: The device of all targets.

        Yields:
            The full name in the model and the tensor, for each target.

        Raises:
            CheckpointError: A file has changed or cannot be read.
        """
        with self._tensors.reading(device) as tensor_of:
            for recipe in recipes:
                dtype = dtype_of[recipe.targets[0]]
                stored = {name: tensor_of(name, dtype).to(dtype) for _, name in recipe.sources}
                yield from recipe.make(stored, self._model).items()

    def read_codes(self, names: Iterable[str], device: torch.device) -> dict[str, CodedLayer]:
        """Read the stored codes and scales of layers, and return a dictionary from full name in the model to
        `CodedLayer`.

        Args:
            names: Full names of layers whose value in ``codes_of`` is not None.
            device: Device of the result.

        Raises:
            CheckpointError: A file has changed or cannot be read, or codes and scales do not fit each other.
        """
        layers_of: dict[FloatTensor, dict[str, LayerCodes]] = {}
        for name in names:
            one, codes = self._layers[name]
            assert codes is not None
            layers_of.setdefault(one, {})[name] = codes
        coded: dict[str, CodedLayer] = {}
        with self._files.reading(device) as read:
            for one, layers in layers_of.items():
                stored = {n: read(n, torch.float32) for n in (*one.sources, *one.left_out)}
                coded |= {layer: codes.read(stored) for layer, codes in layers.items()}
        return coded


def _layers(names: _ModelNames, float_tensors: Sequence[FloatTensor]) -> Iterator[tuple[str, tuple[FloatTensor, LayerCodes | None]]]:
    """Yield the full name in the model, the `FloatTensor` and the `LayerCodes` of each layer that is
    quantized in the source.

    The last two are a pair. `LayerCodes` is None if no `QLayerConfig` expresses the quantization exactly.
    """
    for one in float_tensors:
        found = names.find(one.name)
        owner = one.name.removesuffix(".weight") if found is None else found[0].rpartition(".")[0]
        for codes in one.layers:
            yield _name_in_model(codes.name, owner), (one, codes)
        if not one.layers:
            yield _name_in_model(one.name.removesuffix(".weight"), owner), (one, None)


def _name_in_model(layer: str, owner: str) -> str:
    """Return the full name that the stored layer ``layer`` has in the model.

    ``owner`` is the full name in the model of the module that has the weight of the layer. This is the layer
    itself or the module with the fused experts.
    """
    parts, last = layer.split("."), owner.rpartition(".")[2]
    if last not in parts:
        return layer
    behind = parts[len(parts) - parts[::-1].index(last) :]
    return ".".join((owner, *behind))


class _ModelNames:
    """A mapping from stored names to names in a transformers model. The renamings and conversions of
    transformers define it.

    Attributes:
        converter_of: A dictionary from source pattern to the ``WeightConverter`` of transformers.
    """

    def __init__(self, model: Any, state: Mapping[str, Tensor]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self.converter_of = {pattern: c for c in self._converters for pattern in c.source_patterns}
        self._prefix = model.base_model_prefix
        self._state = state

    def find(self, name: str) -> tuple[str, str | None] | None:
        """Return the name that a stored tensor has in the model, and the pattern of the conversion that
        applies to it.

        The pattern is None if no conversion applies. The result is None if the model has no place for the
        tensor.
        """
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        if target not in self._state and name in self._state:
            target, pattern = rename_source_key(name, [], [], self._prefix, self._state)
        return (target, pattern) if target in self._state else None


def _recipes(names: _ModelNames, stored: Iterable[str]) -> tuple[list[Recipe], list[str]]:
    """Return the recipes for the tensors ``stored``, and the names of the tensors that no recipe uses."""
    from transformers.core_model_loading import dot_natural_key

    sources: dict[str, list[tuple[str, str]]] = {}
    conversions: dict[str, Any] = {}
    unused = []
    # Parts are joined in the order of the numbers in their names.
    for name in sorted(stored, key=dot_natural_key):
        match = names.find(name)
        if match is None or (match[1] is None and match[0] in sources):
            unused.append(name)
            continue
        target, pattern = match
        sources.setdefault(target, []).append((pattern or "", name))
        if pattern is not None:
            conversions[target] = names.converter_of[pattern]
    return [Recipe(tuple(members), (target,), conversions.get(target)) for target, members in sources.items()], unused


def _tell_carried(carried: Sequence[str], model: Any, directory: Path) -> None:
    """Log the names of tensors that are copied unchanged. Log a warning if the model class does not ignore
    all of them."""
    log, is_expected = get_logger(__name__), left_out_by(model)
    if carried:
        log.log(
            logging.INFO if all(map(is_expected, carried)) else logging.WARNING,
            f"'{directory}' holds {len(carried)} tensor(s) that a {type(model).__name__} has no place for: {folded(carried)}. They are "
            "copied unchanged and excluded from quantization. If no runtime uses them, correct config.json, which may name too few "
            "layers or the wrong parts",
        )
