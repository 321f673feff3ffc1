"""Mixtures of experts: names of experts' layers, and the separation of fused experts."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.models.hf.fused_experts import expert_parts
from quark.models.layers.experts import ExpertParts, separated
from quark.models.layers.quantized_layers import counts_as
from quark.models.plan.family import architecture_of
from quark.models.plan.inferred_architecture import EXPERTS
from quark.models.plan.rules import layer_config_for


@attrs.frozen(eq=False)
class FusedMixture:
    """A fused mixture of experts that can be separated into linear layers.

    Attributes:
        module: The mixture.
        facts: Facts about its model family.
    """

    module: nn.Module
    facts: Architecture

    def parts(self) -> ExpertParts:
        """Return the matrices of each expert, as views of the mixture's current parameters."""
        parts = expert_parts(self.module, self.facts)
        assert parts is not None
        return parts

    @property
    def is_meta(self) -> bool:
        """Whether the parameters of the mixture are on the meta device."""
        return next(self.module.parameters()).is_meta


def fused_mixtures(model: nn.Module) -> dict[str, FusedMixture]:
    """Return the fused mixtures of a model that can be separated, by full name."""
    facts = architecture_of(model) or Architecture(model_type="")
    return {name: FusedMixture(m, facts) for name, m in model.named_modules() if expert_parts(m, facts) is not None}


def separate_experts(model: nn.Module, config: QConfig, kept: Container[str] = ()) -> list[str]:
    """Replace fused experts by separate ones, in place, if one of their layers is changed or kept.

    This holds if a layer of an expert is quantized, excluded by its full name, in ``kept``, or changed by an
    algorithm. The model computes the same as before. Returns the full names of the separated mixtures.
    """
    everywhere = any(settings.separates_experts() for settings in config.algo_config or ())
    parts_of = {n: parts for n, m in fused_mixtures(model).items() if _is_told_apart(n, parts := m.parts(), config, kept) or everywhere}
    for name, parts in parts_of.items():
        model.set_submodule(name, separated(parts))
    return list(parts_of)


def _is_told_apart(name: str, parts: ExpertParts, config: QConfig, kept: Container[str]) -> bool:
    """Return whether a layer of an expert is quantized, kept, or excluded by its full name."""
    layers = [f"{name}.{i}.{layer}" for layer, weight in parts.weights.items() for i in range(weight.shape[0])]
    excluded = frozenset(config.exclude)
    return any(layer in excluded or layer in kept or layer_config_for(config, layer, nn.Linear).config is not None for layer in layers)


class ExpertNames:
    """Finds the layers that belong to experts, from the architecture.

    Without one, experts are the children of a module named ``experts``.

    Args:
        architecture: Facts about the family; None if nothing is known.

    Example:
        >>> names = ExpertNames(Architecture(model_type="acme", experts="mlp.experts"))
        >>> layer = "model.layers.0.mlp.experts.7.up_proj"
        >>> names.expert(layer), names.projection(layer)
        ('model.layers.0.mlp.experts.7', 'model.layers.0.mlp.experts.*.up_proj')
        >>> names.projection("model.layers.0.mlp.up_proj") is None
        True
    """

    def __init__(self, architecture: Architecture | None) -> None:
        holder = EXPERTS if architecture is None else architecture.experts
        matches_nothing = "(?!)"
        self._expression = re.compile(matches_nothing if holder is None else rf"((?:^|\.){re.escape(holder)}\.)\d+(\.)")

    def projection(self, layer: str) -> str | None:
        """Return the name of an expert's layer with ``*`` as the expert's number, the same for all experts.

        None for other layers.
        """
        return self._expression.sub(r"\1*\2", layer) if self._expression.search(layer) else None

    def expert(self, layer: str) -> str:
        """Return the full name of the expert that a layer belongs to, or the layer's own name."""
        match = self._expression.search(layer)
        return layer if match is None else layer[: match.end() - 1]

    def among(self, layers: Iterable[str]) -> list[str]:
        """Return the layers that belong to experts."""
        return [layer for layer in layers if self._expression.search(layer)]


def fused_parameters(model: nn.Module) -> Iterator[str]:
    """Yield the full names of parameters that hold the matrices of many experts and are in no plan row."""
    facts = architecture_of(model)
    holder = EXPERTS if facts is None else facts.experts
    for name, module in model.named_modules() if holder is not None else ():
        if counts_as(module) is None and f".{holder}." in f".{name}.":
            for own, tensor in module.named_parameters(recurse=False):
                # Stacked biases of many experts have two axes too, like matrices that are concatenated along
                # their rows.
                if tensor.ndim >= 2 and "bias" not in own:
                    yield f"{name}.{own}"
