"""Mixtures of experts in a model: those whose experts a configuration quantizes are taken apart first."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.hf.expert_forms import expert_parts
from quark.modules.experts import ExpertParts, separated
from quark.modules.layers import counts_as
from quark.planning.family import architecture_of
from quark.planning.precedence import layer_config_for


@attrs.frozen(eq=False)
class FusedMixture:
    """A module that can be taken apart.

    Attributes:
        module: The mixture.
        facts: About its family.
    """

    module: nn.Module
    facts: Architecture

    def parts(self) -> ExpertParts:
        """Its parts, views of the parameters that it has by now."""
        found = _parts(self.module, self.facts)
        assert found is not None
        return found

    @property
    def is_meta(self) -> bool:
        """Whether its parameters have no data."""
        return next(self.module.parameters()).is_meta


def fused_mixtures(model: nn.Module) -> dict[str, FusedMixture]:
    """Those of a model that can be taken apart, by full name."""
    facts = architecture_of(model) or Architecture(model_type="")
    return {name: FusedMixture(m, facts) for name, m in model.named_modules() if _parts(m, facts) is not None}


def separate_experts(model: nn.Module, config: QConfig) -> list[str]:
    """Replace fused experts by separate ones, in place, wherever the configuration quantizes one of their layers.

    The model computes the same as before. Returns the full names of the mixtures that were taken apart.
    """
    wanted = {name: parts for name, m in fused_mixtures(model).items() if _is_quantized(name, parts := m.parts(), config)}
    for name, parts in wanted.items():
        model.set_submodule(name, separated(parts))
    return list(wanted)


def _parts(module: nn.Module, facts: Architecture) -> ExpertParts | None:
    return expert_parts(module, facts.expert_form, facts.expert_inputs, facts.expert_output)


def _is_quantized(name: str, parts: ExpertParts, config: QConfig) -> bool:
    layers = (f"{name}.{i}.{layer}" for layer, weight in parts.weights.items() for i in range(weight.shape[0]))
    return any(layer_config_for(config, layer, nn.Linear).config is not None for layer in layers)


def fused_parameters(model: nn.Module) -> Iterator[str]:
    """Full names of the matrices of many experts in one parameter, which no plan reaches."""
    for name, module in model.named_modules():
        if counts_as(module) is None and "expert" in name:
            yield from (f"{name}.{p}" for p, tensor in module.named_parameters(recurse=False) if _holds_matrices(p, tensor.ndim))


def _holds_matrices(name: str, axes: int) -> bool:
    # Biases of many experts have two axes as well, and so have matrices that lie one below the other.
    return axes >= 2 and "bias" not in name
