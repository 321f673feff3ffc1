"""Models that are one layer, such as a bare ``nn.Linear``: worked as the child of a module that only calls it, and put back."""

from __future__ import annotations

from typing import Any

from torch import nn

from quark.modules.layers import QuantizedLayer, counts_as

__all__ = ["OneLayer", "as_model", "put_back"]

_RESULTS = ("quant_config", "quark_plan", "quark_report", "quark_quantized")


class OneLayer(nn.Module):
    """A model whose only module is ``layer``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.train(layer.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer gives."""
        return self.layer(*args, **kwargs)


def as_model(model: nn.Module) -> nn.Module:
    """``model``; or, where it is itself a layer that can be quantized or is, a `OneLayer` that holds it."""
    if counts_as(model) is None and not isinstance(model, QuantizedLayer):
        return model
    whole = OneLayer(model)
    _move_results(model, whole)
    return whole


def put_back(whole: nn.Module, model: nn.Module) -> None:
    """Make ``model`` what has taken its place in ``whole``, which `as_model` returned for it: the same object, of another class."""
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
