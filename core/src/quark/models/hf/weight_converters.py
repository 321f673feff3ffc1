"""WeightConverter: which tensors of a checkpoint become which others, by name.

The form of AMD Quark's ``weight_convert``.

Patterns are matched against the end of a name. `quark.models.hf.converted_tensors` applies converters when a
checkpoint is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs
from torch import Tensor

from quark.base.names import folded
from quark.config.architecture import WeightConversion
from quark.errors import CheckpointError, ConfigError
from quark.models.hf.conversion_ops import Chunk, Concatenate, ConversionOps, FuseExperts, Inputs, SplitFusedExperts, Transpose

__all__ = ["OPERATIONS", "Conversion", "NameMatch", "WeightConverter", "apply_converters", "find_conversions", "make_converters"]

OPERATIONS: dict[str, type[ConversionOps]] = {
    kind.__name__: kind for kind in (Chunk, Concatenate, FuseExperts, SplitFusedExperts, Transpose)
}
"""Operations that an architecture can name (`quark.config.architecture.WeightConversion`)."""


@attrs.frozen
class NameMatch:
    """A tensor's name as a source of a converter.

    It has the text before the pattern, the pattern, and the expert's number if there is one.
    """

    prefix: str
    pattern: str
    number: int | None


class WeightConverter:
    """Which tensors of a checkpoint become which others, by one operation or several.

    A pattern is the end of a tensor's name, from a dot on: ``gate_up_proj`` matches
    ``….experts.gate_up_proj`` and does not match ``….fused_gate_up_proj``. A star in a pattern stands for the
    number of an expert.

    Args:
        source_patterns: Patterns of the tensors that are converted; the checkpoint must have all of them.
        target_patterns: Patterns of the results. Sources or targets are a single pattern.
        operations: The operations, in order.

    Raises:
        ConfigError: (a ValueError) There is no operation, or sources and targets are several patterns each.

    Example:
        >>> import torch
        >>> targets = ["gate_proj.weight", "up_proj.weight"]
        >>> converter = WeightConverter("gate_up_proj.weight", targets, operations=[Chunk(dim=0)])
        >>> list(apply_converters({"mlp.gate_up_proj.weight": torch.ones(4, 2)}, [converter]))
        ['mlp.gate_proj.weight', 'mlp.up_proj.weight']
    """

    def __init__(
        self, source_patterns: str | Sequence[str], target_patterns: str | Sequence[str], operations: Sequence[ConversionOps] = ()
    ) -> None:
        self.source_patterns = [source_patterns] if isinstance(source_patterns, str) else list(source_patterns)
        self.target_patterns = [target_patterns] if isinstance(target_patterns, str) else list(target_patterns)
        self.operations = list(operations)
        if not self.operations:
            raise ConfigError(f"the converter of {self.source_patterns} has no operations: give at least one, such as Chunk(dim=0)")
        if not self.source_patterns or not self.target_patterns or min(len(self.source_patterns), len(self.target_patterns)) > 1:
            raise ConfigError(
                f"a converter makes one tensor of one or several, or several of one, not {self.source_patterns} → {self.target_patterns}"
            )
        joins = self.operations[0].joins_experts
        self._expressions = [(pattern, _expression(pattern, joins)) for pattern in self.source_patterns]

    def __repr__(self) -> str:
        return f"WeightConverter({self.source_patterns}, {self.target_patterns}, operations={self.operations})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def _parts(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[ConversionOps, ...]]:
        return tuple(self.source_patterns), tuple(self.target_patterns), tuple(self.operations)

    def find(self, name: str) -> NameMatch | None:
        """Return how a tensor's full name matches one of the sources; None where it does not."""
        for pattern, expression in self._expressions:
            match = expression.match(name)
            if match is not None:
                number = match.groupdict().get("number")
                return NameMatch(match["prefix"], pattern, None if number is None else int(number))
        return None

    def names_kept(self, prefix: str) -> list[str]:
        """Return the full names that sources and results have in common.

        The values change, the names do not.
        """
        return [prefix + pattern for pattern in self.source_patterns if pattern in self.target_patterns]

    def convert(self, inputs: Inputs, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors that the tensors of one place become.

        Args:
            inputs: By source pattern; a list, in the order of experts, where names have their numbers.
            prefix: What stands before the patterns in the names of these tensors.

        Returns:
            Tensors by full name.
        """
        current = inputs
        for operation in self.operations:
            current = operation.convert(current, source_patterns=self.source_patterns, target_patterns=self.target_patterns)
        return {prefix + name: tensor for name, tensor in current.items()}  # type: ignore[misc]  # operations give no lists

    def reverse_transform(self) -> WeightConverter:
        """Return the converter that undoes this one.

        Raises UnsupportedError where an operation cannot be undone.
        """
        return WeightConverter(
            self.target_patterns, self.source_patterns, [operation.reverse_op for operation in reversed(self.operations)]
        )


def _expression(pattern: str, joins_experts: bool) -> re.Pattern[str]:
    before, star, after = pattern.partition("*")
    number = r"(?P<number>\d+)"
    body = f"{re.escape(before)}{number}{re.escape(after)}" if star else (number + r"\." if joins_experts else "") + re.escape(pattern)
    return re.compile(rf"(?P<prefix>(?:.*\.)?){body}\Z")


@attrs.frozen(eq=False)
class Conversion:
    """One application of a converter: tensors of one place that become others together.

    Attributes:
        converter: Converts them.
        prefix: What stands before the patterns in their names.
        names: Full names by source pattern and number of the expert; the number is None where names have
            none.
    """

    converter: WeightConverter
    prefix: str
    names: Mapping[str, Mapping[int | None, str]]

    @property
    def sources(self) -> list[str]:
        """Full names of the tensors that are converted."""
        return [name for numbered in self.names.values() for name in numbered.values()]

    def make(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the results by full name.

        Args:
            tensors: The sources, by full name; meta tensors give meta tensors.

        Raises:
            CheckpointError: Not all sources of the converter are there.
            ConfigError: (a ValueError) A tensor is not of the form that an operation works on.
        """
        missing = [pattern for pattern in self.converter.source_patterns if pattern not in self.names]
        numbers = {frozenset(numbered) for numbered in self.names.values()}
        if missing or len(numbers) > 1 or not all(n == {None} or n == set(range(len(n))) for n in numbers):
            raise CheckpointError(
                f"{self.converter} needs all of its sources together, under '{self.prefix}' there are only {folded(sorted(self.sources))}: "
                "the checkpoint is incomplete, or the converter is for another one"
            )
        inputs = {pattern: _in_order(tensors, self.names[pattern]) for pattern in self.converter.source_patterns}
        return self.converter.convert(inputs, self.prefix)


def find_conversions(names: Iterable[str], converters: Sequence[WeightConverter]) -> list[Conversion]:
    """Return where converters match tensors, in the order of the first of each place.

    The first converter that matches a name takes it.
    """
    places: dict[tuple[int, str], dict[str, dict[int | None, str]]] = {}
    for name in names:
        matches = ((index, converter.find(name)) for index, converter in enumerate(converters))
        index, match = next(((index, match) for index, match in matches if match is not None), (0, None))
        if match is not None:
            places.setdefault((index, match.prefix), {}).setdefault(match.pattern, {})[match.number] = name
    return [Conversion(converters[index], prefix, members) for (index, prefix), members in places.items()]


def apply_converters(tensors: Mapping[str, Tensor], converters: Sequence[WeightConverter]) -> dict[str, Tensor]:
    """Convert tensors by name; a tensor that no converter matches stays as it is.

    Args:
        tensors: By full name. Sources of one converter must be there together: all parts of a matrix, all
            experts of a mixture.
        converters: Applied side by side, not one after another; the first that matches a name takes it.

    Returns:
        Tensors by full name, views of the given ones where nothing is joined, in their order.

    Raises:
        CheckpointError: Some sources of a converter are there and others are not.
        ConfigError: (a ValueError) A tensor is not of the form its converter works on, or two results have
            one name.
    """
    conversion_of = {name: conversion for conversion in find_conversions(tensors, converters) for name in conversion.sources}
    results: dict[str, Tensor] = {}
    done: set[int] = set()
    for name, tensor in tensors.items():
        conversion = conversion_of.get(name)
        if conversion is None:
            _add(results, {name: tensor})
        elif id(conversion) not in done:
            done.add(id(conversion))
            _add(results, conversion.make(tensors))
    return results


def _in_order(tensors: Mapping[str, Tensor], names: Mapping[int | None, str]) -> Tensor | list[Tensor]:
    """Return the tensor of a name without a number, or the tensors of all experts in their order."""
    return tensors[names[None]] if None in names else [tensors[names[i]] for i in range(len(names))]


def _add(results: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    twice = results.keys() & more.keys()
    if twice:
        raise ConfigError(f"two tensors would get the name '{min(twice)}': the converters do not fit this checkpoint")
    results.update(more)


def make_converters(rows: Iterable[WeightConversion]) -> list[WeightConverter]:
    """Return converters made from data.

    Args:
        rows: As in `quark.config.architecture.Architecture.weight_converters`.

    Raises:
        ConfigError: (a ValueError) There is no operation of a name.
    """
    return [
        WeightConverter(source, list(targets), [_operation(name, *settings) for name, *settings in operations])
        for source, targets, operations in rows
    ]


def _operation(name: object, *settings: object) -> ConversionOps:
    if name not in OPERATIONS:
        raise ConfigError(f"there is no conversion operation '{name}': use one of {', '.join(OPERATIONS)}")
    return OPERATIONS[str(name)](*settings)
