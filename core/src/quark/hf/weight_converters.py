"""WeightConverter: which tensors of a checkpoint become which others, by name; applied to tensors, and undone.

Source: the documented `weight_convert` interface, whose patterns are matched against the end of a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs
from torch import Tensor

from quark.config.architecture import FUSED_EXPERTS, Architecture, WeightConversion
from quark.errors import CheckpointError, ConfigError
from quark.hf.conversion_ops import Chunk, Concatenate, ConversionOps, FuseExperts, Inputs, SplitFusedExperts, Transpose

OPERATIONS: dict[str, type[ConversionOps]] = {
    kind.__name__: kind for kind in (Chunk, Concatenate, FuseExperts, SplitFusedExperts, Transpose)
}
"""Steps that the facts of a family can name."""


@attrs.frozen
class Found:
    """Where a name matches: what stands before the pattern, which pattern it is, and the number of the expert, if names have one."""

    prefix: str
    pattern: str
    number: int | None


class WeightConverter:
    """Tensors that become others, in one step or several.

    A pattern is the end of a tensor's name, from a dot on: ``gate_up_proj`` is that of ``….experts.gate_up_proj``, and not of
    ``….fused_gate_up_proj``. A star in it stands for the number of an expert.

    Args:
        source_patterns: Of the tensors that are taken; all must be there.
        target_patterns: Of those that they become. One of the two is a single pattern.
        operations: The steps, in order.

    Raises:
        ConfigError: (a ValueError) No step is given, or both sides have several patterns.

    Example:
        >>> import torch
        >>> converter = WeightConverter("gate_up_proj.weight", ["gate_proj.weight", "up_proj.weight"], operations=[Chunk(dim=0)])
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
            raise ConfigError(f"the converter of {self.source_patterns} has no operations: say at least one, such as Chunk(dim=0)")
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

    def find(self, name: str) -> Found | None:
        """Where a tensor's full name matches one of the sources; None where it does not."""
        for pattern, expression in self._expressions:
            match = expression.match(name)
            if match is not None:
                number = match.groupdict().get("number")
                return Found(match["prefix"], pattern, None if number is None else int(number))
        return None

    def convert(self, found: Inputs, prefix: str = "") -> dict[str, Tensor]:
        """The tensors that those of one place become.

        Args:
            found: By source pattern; a list, in the order of experts, where names have their numbers.
            prefix: What stands before the patterns in the names of these tensors.

        Returns:
            Tensors by full name.
        """
        current: Inputs = found
        for step in self.operations:
            current = step.convert(current, source_patterns=self.source_patterns, target_patterns=self.target_patterns)
        return {prefix + name: tensor for name, tensor in current.items()}  # type: ignore[misc]  # steps give no lists

    def reverse_transform(self) -> WeightConverter:
        """The converter that undoes this one; raises UnsupportedError where a step cannot be undone."""
        return WeightConverter(self.target_patterns, self.source_patterns, [step.reverse_op for step in reversed(self.operations)])


def _expression(pattern: str, joins_experts: bool) -> re.Pattern[str]:
    before, star, after = pattern.partition("*")
    number = r"(?P<number>\d+)"
    body = f"{re.escape(before)}{number}{re.escape(after)}" if star else (number + r"\." if joins_experts else "") + re.escape(pattern)
    return re.compile(rf"(?P<prefix>(?:.*\.)?){body}\Z")


def apply_converters(tensors: Mapping[str, Tensor], converters: Sequence[WeightConverter]) -> dict[str, Tensor]:
    """Convert tensors by name; the first converter that knows a name takes it, and what none knows stays.

    Args:
        tensors: By full name. Sources of one converter must be there together: all parts of a matrix, all experts of a mixture.
        converters: Applied side by side, not one after another.

    Returns:
        Tensors by full name, views of the given ones where nothing is joined, in their order.

    Raises:
        CheckpointError: Some sources of a converter are there and others are not.
        ConfigError: (a ValueError) A tensor is not of the form its converter works on, or two results have one name.
    """
    places: dict[str, tuple[int, str]] = {}
    members: dict[tuple[int, str], dict[str, dict[int | None, str]]] = {}
    for name in tensors:
        for index, converter in enumerate(converters):
            found = converter.find(name)
            if found is not None:
                place = places[name] = (index, found.prefix)
                members.setdefault(place, {}).setdefault(found.pattern, {})[found.number] = name
                break
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in places:
            _add(made, {name: tensor})
        elif (group := members.pop(places[name], None)) is not None:
            index, prefix = places[name]
            _add(made, converters[index].convert(_gather(tensors, converters[index], group, prefix), prefix))
    return made


def revert_converters(tensors: Mapping[str, Tensor], converters: Sequence[WeightConverter]) -> dict[str, Tensor]:
    """What `apply_converters` was given, from what it made; raises as it does."""
    return apply_converters(tensors, [converter.reverse_transform() for converter in converters])


def _gather(
    tensors: Mapping[str, Tensor], converter: WeightConverter, group: Mapping[str, Mapping[int | None, str]], prefix: str
) -> dict[str, Tensor | list[Tensor]]:
    missing = [pattern for pattern in converter.source_patterns if pattern not in group]
    numbers = {frozenset(names) for names in group.values()}
    if missing or len(numbers) > 1 or not any(_complete(found) for found in numbers):
        have = sorted(name for names in group.values() for name in names.values())
        raise CheckpointError(
            f"{converter} needs all of its sources together, under '{prefix}' there are only {', '.join(have[:4])}"
            f"{' …' if len(have) > 4 else ''}: give it the tensors of the whole block"
        )
    return {pattern: _by_number(tensors, group[pattern]) for pattern in converter.source_patterns}


def _complete(numbers: frozenset[int | None]) -> bool:
    return numbers == {None} or numbers == set(range(len(numbers)))


def _by_number(tensors: Mapping[str, Tensor], names: Mapping[int | None, str]) -> Tensor | list[Tensor]:
    return tensors[names[None]] if None in names else [tensors[names[i]] for i in range(len(names))]


def _add(made: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    twice = made.keys() & more.keys()
    if twice:
        raise ConfigError(f"two tensors would get the name '{min(twice)}': the converters do not fit this checkpoint")
    made.update(more)


def make_converters(rows: Iterable[WeightConversion]) -> list[WeightConverter]:
    """Converters from data.

    Args:
        rows: As in `quark.config.architecture.Architecture.weight_converters`.

    Raises:
        ConfigError: (a ValueError) An operation is not known.
    """
    return [
        WeightConverter(source, list(targets), [_operation(name, *settings) for name, *settings in steps])
        for source, targets, steps in rows
    ]


def _operation(name: object, *settings: object) -> ConversionOps:
    if name not in OPERATIONS:
        raise ConfigError(f"there is no conversion step '{name}': use one of {', '.join(OPERATIONS)}")
    made: ConversionOps = OPERATIONS[str(name)](*settings)
    return made


def converters_of(architecture: Architecture | None) -> list[WeightConverter]:
    """What makes single experts of the fused ones in checkpoints of a family; tensors that lie there one by one are not touched.

    Args:
        architecture: Facts about the family. Mixtures that state nothing have the common layout, `FUSED_EXPERTS`.
    """
    if architecture is None or not (architecture.weight_converters or architecture.experts):
        return []
    return make_converters(architecture.weight_converters or FUSED_EXPERTS)
