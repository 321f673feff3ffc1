"""Mixtures of experts in a model: those whose experts a configuration quantizes are taken apart first."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from quark.model.resolve import layer_config_for
from quark.nn.experts import SeparateExperts, expert_layers, is_fused
from quark.specs.model import QConfig


def separate_experts(model: nn.Module, config: QConfig) -> list[str]:
    """Replace fused experts by separate ones, in place, wherever the configuration quantizes one of their layers.

    The model computes the same as before. Returns the full names of the mixtures that were taken apart.
    """
    wanted = [name for name, module in model.named_modules() if is_fused(module) and _is_quantized(name, module, config)]
    for name in wanted:
        model.set_submodule(name, SeparateExperts(model.get_submodule(name)))
    return wanted


def _is_quantized(name: str, module: nn.Module, config: QConfig) -> bool:
    experts = range(module.gate_up_proj.shape[0])  # type: ignore[index]
    layers = (f"{name}.{i}.{layer}" for i in experts for layer in expert_layers(module))
    return any(layer_config_for(config, layer, nn.Linear).config is not None for layer in layers)


def fused_parameters(model: nn.Module) -> Iterator[str]:
    """Full names of the matrices of many experts in one parameter, which no plan reaches."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and "expert" in name:
            yield name
