"""Code that separates fused experts into layers, and that recognizes layers of experts by their names."""

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
    """A mixture-of-experts module with fused parameters that can be separated into linear layers.

    Attributes:
        module: The mixture-of-experts module.
        facts: Facts about the family of the model that contains the module.
    """

    module: nn.Module
    facts: Architecture

    def parts(self) -> ExpertParts:
        """Return the matrices of each expert, as views of the current parameters of the module."""
        parts = expert_parts(self.module, self.facts)
        assert parts is not None
        return parts

    @property
    def is_meta(self) -> bool:
        """Whether the parameters of the module are on the meta device."""
        return next(self.module.parameters()).is_meta


def fused_mixtures(model: nn.Module) -> dict[str, FusedMixture]:
    """Return the fused mixture-of-experts modules that can be separated, as a dictionary from full name."""
    facts = architecture_of(model) or Architecture(model_type="")
    return {name: FusedMixture(m, facts) for name, m in model.named_modules() if expert_parts(m, facts) is not None}


def separate_experts(model: nn.Module, config: QConfig, kept: Container[str] = ()) -> list[str]:
    """Replace fused experts in ``model`` by separate layers, in place, if the configuration needs this.

    A fused module is replaced if a layer of one of its experts is quantized, is excluded by its full name, or
    is in ``kept``. If an algorithm needs separate experts, all fused modules are replaced. The model computes
    the same results as before. Return the full names of the modules that were replaced.
    """
    everywhere = any(settings.separates_experts() for settings in config.algo_config or ())
    parts_of = {n: parts for n, m in fused_mixtures(model).items() if _is_told_apart(n, parts := m.parts(), config, kept) or everywhere}
    for name, parts in parts_of.items():
        model.set_submodule(name, separated(parts))
    return list(parts_of)


def _is_told_apart(name: str, parts: ExpertParts, config: QConfig, kept: Container[str]) -> bool:
    """Return whether a layer of an expert is quantized, is in ``kept``, or is excluded by its full name."""
    layers = [f"{name}.{i}.{layer}" for layer, weight in parts.weights.items() for i in range(weight.shape[0])]
    excluded = frozenset(config.exclude)
    return any(layer in excluded or layer in kept or layer_config_for(config, layer, nn.Linear).config is not None for layer in layers)


class ExpertNames:
    """An object that recognizes layers of experts by their names.

    The architecture has the name of the module that contains the experts. Without an architecture, this name
    is ``experts``. The experts are the children of this module whose names are numbers.

    Args:
        architecture: Facts about the model family, or None if the family is unknown.

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
        """Return the full name of an expert's layer with the number of the expert replaced by ``*``.

        The result is the same for the corresponding layers of all experts. Return None if ``layer`` does not
        belong to an expert.
        """
        return self._expression.sub(r"\1*\2", layer) if self._expression.search(layer) else None

    def expert(self, layer: str) -> str:
        """Return the full name of the expert that contains ``layer``. If there is none, return ``layer``."""
        match = self._expression.search(layer)
        return layer if match is None else layer[: match.end() - 1]

    def among(self, layers: Iterable[str]) -> list[str]:
        """Return the names in ``layers`` that are names of layers of experts."""
        return [layer for layer in layers if self._expression.search(layer)]


def fused_parameters(model: nn.Module) -> Iterator[str]:
    """Yield the full names of parameters with the matrices of many experts. A plan has no row for them."""
    facts = architecture_of(model)
    holder = EXPERTS if facts is None else facts.experts
    for name, module in model.named_modules() if holder is not None else ():
        if counts_as(module) is None and f".{holder}." in f".{name}.":
            for own, tensor in module.named_parameters(recurse=False):
                # Matrices that are concatenated along their rows have two axes. Stacked biases of many
                # experts have two axes too, so the name must tell them apart.
                if tensor.ndim >= 2 and "bias" not in own:
                    yield f"{name}.{own}"
