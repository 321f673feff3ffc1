"""Functions for a model that is a single layer, such as an ``nn.Linear`` that is not inside another module.

During a run, such a layer is the only child of a wrapper module, and the wrapper only calls the layer.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from quark.models.layers.quantized_layers import QuantizedLayer, counts_as

_RESULTS = ("quant_config", "quark_plan", "quark_report", "quark_quantized")


class OneLayer(nn.Module):
    """A model that only calls its child ``layer``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.train(layer.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer."""
        return self.layer(*args, **kwargs)


def as_model(model: nn.Module) -> nn.Module:
    """If ``model`` is a quantizable or quantized layer, return a `OneLayer` around it. If not, return
    ``model``."""
    if counts_as(model) is None and not isinstance(model, QuantizedLayer):
        return model
    wrapper = OneLayer(model)
    _move_results(model, wrapper)
    return wrapper


def put_back(whole: nn.Module, model: nn.Module) -> None:
    """Turn ``model`` into the layer that is now in the wrapper ``whole``.

    ``whole`` is the result of `as_model` for ``model``, and the run may have replaced the layer in it. The
    class and the attributes of ``model`` change in place. If ``whole`` is not a wrapper, do nothing.
    """
    if not isinstance(whole, OneLayer) or whole is model:
        return
    if whole.layer is not model:
        object.__setattr__(model, "__class__", type(whole.layer))
        model.__dict__.clear()
        model.__dict__.update(whole.layer.__dict__)
    _move_results(whole, model)


def _move_results(source: nn.Module, target: nn.Module) -> None:
    """Copy the attributes with the results of a run from ``source`` to ``target``."""
    for name in _RESULTS:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
