"""A checkpoint's tensors after weight converters.

Names, shapes and dtypes come from headers alone; values are computed on reading. A converter's pattern
matches the end of a tensor's name, after a dot: ``gate_up_proj`` matches ``….experts.gate_up_proj``, but not
``….fused_gate_up_proj``. A star in a pattern stands for the number of an expert.
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
    """One application of a converter, which computes new tensors from some tensors of one module.

    Attributes:
        converter: transformers' ``WeightConverter``.
        prefix: The part of the tensors' names before the patterns.
        names: Full names by source pattern and number of the expert; the number is None if names have none.
    """

    converter: Any
    prefix: str
    names: Mapping[str, Mapping[int | None, str]]

    def __str__(self) -> str:
        return _named(self.converter)

    @property
    def sources(self) -> list[str]:
        """Full names of the tensors to convert."""
        return [name for numbered in self.names.values() for name in numbered.values()]

    def fits_as_stored(self, has_place: Callable[[str], bool]) -> bool:
        """Return whether the model has a place for all sources, and no result reuses the name of a source."""
        keeps_a_name = not set(self.converter.source_patterns).isdisjoint(self.converter.target_patterns)
        return not keeps_a_name and all(map(has_place, self.sources))

    def make(self, tensors: Mapping[str, Tensor], model: Any = None) -> dict[str, Tensor]:
        """Return the results by full name.

        Args:
            tensors: The sources, by full name; meta tensors give meta tensors.
            model: The transformers model, or its configuration and tensors, which some operations use.

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
    """Return the applications of converters, in the order of their first tensors.

    Args:
        names: Full names of tensors.
        converters: transformers' ``WeightConverter``; the first that matches a name takes it.
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
    """Return the tensor of a name without a number, or the tensors of all experts in order."""
    return tensors[names[None]] if None in names else [tensors[names[i]] for i in range(len(names))]


class ConvertedTensors:
    """The tensors of a checkpoint, some of them converted.

    A converter is applied to stored tensors that the model has no place for, and to tensors whose name it
    keeps. For example, if both model and checkpoint have fused experts, they are read as stored: a plan
    separates them later.

    Args:
        files: The tensors to convert.
        directory: The checkpoint, for messages.
        converters: transformers' ``WeightConverter``, from the user or the model's template.
        has_place: Whether the model has a place for a tensor of that name.
        model: The transformers model, or its configuration and tensors, which some operations use.

    Attributes:
        meta: As in `quark.models.hf.file_tensors.TensorFiles`.

    Raises:
        CheckpointError: Sources of a converter are missing, or the model has no place for its results.
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
        """Return the results of a conversion of meta tensors; errors name the converter and its tensors."""
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
        """Return the names, before conversion, of the tensors that give the tensor ``name``."""
        return self._conversion_of[name].sources if name in self._conversion_of else [name]

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[ReadTensor]:
        """See `quark.models.hf.file_tensors.TensorFiles.reading`.

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
