"""Classes that apply weight converters to the tensors of a checkpoint.

Names, shapes and dtypes are computed from the headers of the files. Values are computed when they are read. A
converter's pattern matches a tensor whose full name ends with the pattern, after a dot. For instance,
``gate_up_proj`` matches ``….experts.gate_up_proj``, but not ``….fused_gate_up_proj``. A star in a pattern
stands for the number of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.base.log import get_logger
from quark.base.names import folded
from quark.errors import CheckpointError, ConfigError
from quark.models.hf.file_tensors import ReadTensor, TensorFiles


@attrs.frozen(eq=False)
class Conversion:
    """One application of a weight converter. It computes new tensors from some tensors of one module.

    Attributes:
        converter: transformers' ``WeightConverter``.
        prefix: The part of the tensors' full names that comes before the match of the pattern.
        names: A dictionary from source pattern to a dictionary from the number of an expert to the full name
            of its tensor. The number is None if the pattern has no star.
    """

    converter: Any
    prefix: str
    names: Mapping[str, Mapping[int | None, str]]

    def __str__(self) -> str:
        return _named(self.converter)

    @property
    def sources(self) -> list[str]:
        """The full names of the tensors that are converted."""
        return [name for numbered in self.names.values() for name in numbered.values()]

    def fits_as_stored(self, has_place: Callable[[str], bool]) -> bool:
        """Return whether the model can use the sources without conversion.

        This is so if the model has tensors with the names of all sources, and no target pattern of the
        converter equals a source pattern.

        Args:
            has_place: A function that returns whether the model has a tensor with this full name.
        """
        keeps_a_name = not set(self.converter.source_patterns).isdisjoint(self.converter.target_patterns)
        return not keeps_a_name and all(map(has_place, self.sources))

    def make(self, tensors: Mapping[str, Tensor], model: Any = None) -> dict[str, Tensor]:
        """Apply the converter, and return a dictionary from full name to computed tensor.

        Args:
            tensors: A dictionary from full name to tensor, with all sources. If they are meta tensors, the
                results are meta tensors too.
            model: The transformers model, or an object with its configuration and tensors. Some operations
                use it.

        Raises:
            CheckpointError: Sources of the converter are missing.
            Exception: An operation does not fit the tensors.
        """
        sources, targets = self.converter.source_patterns, self.converter.target_patterns
        numbers = {frozenset(numbered) for numbered in self.names.values()}
        if set(sources) - self.names.keys() or len(numbers) > 1 or not all(n == {None} or n == set(range(len(n))) for n in numbers):
            raise CheckpointError(
                f"{self} needs all of its sources, but '{self.prefix}' has only {folded(sorted(self.sources))}: "
                "the checkpoint is incomplete, or the converter is for another checkpoint"
            )
        results: Any = {pattern: _in_order(tensors, self.names[pattern]) for pattern in sources}
        of_model = {"full_layer_name": self.prefix + targets[0], "model": model, "config": getattr(model, "config", None)}
        for operation in self.converter.operations:
            results = operation.convert(results, source_patterns=sources, target_patterns=targets, **of_model)
        return {self.prefix + name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def find_conversions(names: Iterable[str], converters: Sequence[Any]) -> list[Conversion]:
    """Return a `Conversion` for each place where a converter applies, sorted by the position of its first
    name.

    Args:
        names: Full names of tensors.
        converters: ``WeightConverter`` objects of transformers. If several match a name, the first of them
            converts the tensor.
    """
    expressions = [(i, pattern, _expression(pattern)) for i, one in enumerate(converters) for pattern in one.source_patterns]
    places: dict[tuple[int, str], dict[str, dict[int | None, str]]] = {}
    for name in names:
        for index, pattern, expression in expressions:
            if match := expression.match(name):
                number = match.groupdict().get("number")
                of_pattern = places.setdefault((index, match["prefix"]), {}).setdefault(pattern, {})
                of_pattern[None if number is None else int(number)] = name
                break
    return [Conversion(converters[index], prefix, members) for (index, prefix), members in places.items()]


def _expression(pattern: str) -> re.Pattern[str]:
    before, star, after = pattern.partition("*")
    number = r"(?P<number>\d+)" if star else ""
    return re.compile(rf"(?P<prefix>(?:.*\.)?){re.escape(before)}{number}{re.escape(after)}\Z")


def _in_order(tensors: Mapping[str, Tensor], names: Mapping[int | None, str]) -> Tensor | list[Tensor]:
    """Return the tensors of all experts, sorted by the number of the expert. Without numbers, return the one
    tensor."""
    return tensors[names[None]] if None in names else [tensors[names[i]] for i in range(len(names))]


class ConvertedTensors:
    """The tensors of a checkpoint, some of them converted.

    A converter is applied to stored tensors whose names do not occur in the model, and to tensors whose names
    the converter does not change. Other tensors are read as stored. For example, if both the model and the
    checkpoint have fused experts, no converter is applied to them, and a plan separates them later.

    Args:
        files: The tensors to convert.
        directory: The checkpoint directory. Messages name it.
        converters: ``WeightConverter`` objects of transformers, from the user or from the model's template.
        has_place: A function that returns whether the model has a tensor with this full name.
        model: The transformers model, or an object with its configuration and tensors. Some operations use
            it.

    Attributes:
        meta: A dictionary from full name to a meta tensor with the shape and dtype, for every tensor after
            conversion.

    Raises:
        CheckpointError: Sources of a converter are missing, or the model has no tensor with the name of a
            result.
        ConfigError: A converter does not fit the tensors, or two tensors would have the same name.
    """

    def __init__(
        self, files: TensorFiles, directory: Path, converters: Sequence[Any], has_place: Callable[[str], bool], model: Any = None
    ) -> None:
        self._files = files
        self._model = model
        conversions = find_conversions(files.meta, converters)
        applied = [conversion for conversion in conversions if not conversion.fits_as_stored(has_place)]
        converted = {name for conversion in applied for name in conversion.sources}
        self._conversion_of: dict[str, Conversion] = {}
        self.meta: dict[str, Tensor] = {name: tensor for name, tensor in files.meta.items() if name not in converted}
        for conversion in applied:
            for name, tensor in self._shapes(conversion, directory).items():
                if name in self.meta:
                    raise ConfigError(f"{conversion} makes '{name}', which '{directory}' has already: leave the converter out")
                if not has_place(name):
                    raise CheckpointError(
                        f"{conversion} makes '{name}' from {folded(conversion.sources)} of '{directory}', but the model in "
                        "config.json has no such tensor: correct the target patterns"
                    )
                self.meta[name] = tensor
                self._conversion_of[name] = conversion
        _log_applied(converters, conversions, applied)

    def _shapes(self, conversion: Conversion, directory: Path) -> dict[str, Tensor]:
        """Convert meta tensors, and return the results. Errors name the converter and the tensors that it
        converts."""
        try:
            return conversion.make(self._files.meta, self._model)
        except CheckpointError:
            raise
        except Exception as error:  # operations come from transformers, or from anybody
            raise ConfigError(
                f"{conversion} cannot convert {folded(conversion.sources)} of '{directory}' ({error}): correct its operations, or leave "
                "it out"
            ) from error

    def sources(self, name: str) -> list[str]:
        """Return the full names of the stored tensors from which the tensor ``name`` is computed."""
        return self._conversion_of[name].sources if name in self._conversion_of else [name]

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[ReadTensor]:
        """Do as `quark.models.hf.file_tensors.TensorFiles.reading` says.

        Raises:
            CheckpointError: A file has changed or cannot be read.
        """
        with self._files.reading(device) as stored:
            converted: dict[str, Tensor] = {}  # results of conversions that are not read yet

            def read(name: str, dtype: torch.dtype) -> Tensor:
                conversion = self._conversion_of.get(name)
                if conversion is None:
                    return stored(name, dtype)
                if name not in converted:
                    converted.update(conversion.make({source: stored(source, dtype) for source in conversion.sources}, self._model))
                return converted.pop(name)

            yield read


def _named(converter: Any) -> str:
    return f"the weight converter {', '.join(converter.source_patterns)} → {', '.join(converter.target_patterns)}"


def _log_applied(converters: Sequence[Any], conversions: Sequence[Conversion], applied: Sequence[Conversion]) -> None:
    for converter in converters:
        if places := sum(conversion.converter is converter for conversion in applied):
            get_logger(__name__).info(f"{_named(converter)} is applied at {places} places of the checkpoint")
        else:
            has_matches = any(conversion.converter is converter for conversion in conversions)
            reason = "the model has a place for the tensors as they are stored" if has_matches else "no stored tensor has such a name"
            get_logger(__name__).info(f"{_named(converter)} is not applied: {reason}")
