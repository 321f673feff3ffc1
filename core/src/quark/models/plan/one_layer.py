"""Models that are a single layer, such as a bare ``nn.Linear``.

For the run, a module that only calls the layer wraps them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from quark.models.layers.quantized_layers import QuantizedLayer, counts_as

_RESULTS = ("quant_config", "quark_plan", "quark_report", "quark_quantized")


class OneLayer(nn.Module):
    """A model whose only module is ``layer``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.train(layer.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer."""
        return self.layer(*args, **kwargs)


def as_model(model: nn.Module) -> nn.Module:
    """Return ``model``, or a `OneLayer` around it if it is itself a quantizable or quantized layer."""
    if counts_as(model) is None and not isinstance(model, QuantizedLayer):
        return model
    wrapper = OneLayer(model)
    _move_results(model, wrapper)
    return wrapper


def put_back(whole: nn.Module, model: nn.Module) -> None:
    """Turn ``model``, in place, into the layer that replaced it in ``whole``, the wrapper from `as_model`.

    Its class and its attributes change.
    """
    if not isinstance(whole, OneLayer) or whole is model:
        return
    if whole.layer is not model:
        object.__setattr__(model, "__class__", type(whole.layer))
        model.__dict__.clear()
        model.__dict__.update(whole.layer.__dict__)
    _move_results(whole, model)


def _move_results(source: nn.Module, target: nn.Module) -> None:
    for name in _RESULTS:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
