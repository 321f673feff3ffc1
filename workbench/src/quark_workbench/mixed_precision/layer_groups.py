"""Layer groups: layers that runtimes need in one scheme: q, k and v; gate and up; all experts of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import attrs

from quark.config.architecture import Architecture
from quark.models.plan.mixtures import ExpertNames
from quark.models.plan.plan_row import PlanRow

__all__ = ["LayerGroup", "layer_groups"]


@attrs.frozen
class LayerGroup:
    """Layers that get one scheme.

    Attributes:
        name: Full name of the layer; of several, their common parent and the names below it:
            ``"model.layers.0.mlp.gate_proj/up_proj"``.
        shapes: Shape of the weight of each layer, ``[out, in]``, by full name.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def layers(self) -> tuple[str, ...]:
        """Full names of its layers, in the model's order."""
        return tuple(self.shapes)

    @property
    def weights(self) -> int:
        """The number of weights of its layers together."""
        return sum(prod(shape) for shape in self.shapes.values())


def layer_groups(rows: Sequence[PlanRow], architecture: Architecture | None) -> tuple[LayerGroup, ...]:
    """Return the groups of some layers, in the model's order.

    The facts are those of the architecture: suffixes that runtimes fuse into one matrix (``fused``), and
    where the experts are. Layers of which only some are among ``rows``, since others are excluded, are
    grouped as far as they are there.

    Args:
        rows: Of the layers to group.
        architecture: Facts about the family; None where nothing is known: then every layer is alone.
    """
    fused = () if architecture is None else architecture.fused
    experts = ExpertNames(architecture)
    members: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for row in rows:
        members.setdefault(_key(row.name, fused, experts), {})[row.name] = row.shape
    return tuple(LayerGroup(_name(key, tuple(shapes)), shapes) for key, shapes in members.items())


def _key(name: str, fused: Sequence[Sequence[str]], experts: ExpertNames) -> tuple[str, str]:
    """Return what all layers of a group have in common: the module above them, and which of its groups they are."""
    if experts.projection(name) is not None:
        return experts.expert(name).rpartition(".")[0], ""
    parent, _, suffix = name.rpartition(".")
    together = next((suffixes for suffixes in fused if suffix in suffixes), (suffix,))
    return parent, "/".join(together)


def _name(key: tuple[str, str], layers: Sequence[str]) -> str:
    parent, together = key
    if not together:
        return parent
    names = "/".join(layer.rpartition(".")[2] for layer in layers)
    return f"{parent}.{names}" if parent else names
