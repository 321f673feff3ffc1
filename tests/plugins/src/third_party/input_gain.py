"""A transform that runs in each forward: it multiplies inputs by powers of two, and divides the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quark.algorithms import BlockContext, Metrics, Transform
from third_party.algorithms import InputGainConfig


class Gain:
    """A hook before a layer's forward.

    Products with powers of two are exact, so the layer's outputs keep their bits.
    """

    transforms_input = True

    def __init__(self, channels: int) -> None:
        self.value = 2.0 ** (torch.arange(channels) % 3)

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Multiply the input; torch calls this as a forward pre-hook."""
        return (args[0] * self.value.to(args[0]), *args[1:])


class InputGain(Transform):
    """The transform, its run and its restorer in one class, since it needs no facts of the model."""

    def __init__(self, settings: InputGainConfig) -> None:
        self._endings = tuple(settings.layers)

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Divide the weights of a block, and multiply the inputs."""
        for layer in self._layers(block.module):
            gain = Gain(layer.weight.shape[1])
            layer.weight = nn.Parameter(layer.weight.data / gain.value.to(layer.weight), requires_grad=False)
            layer.register_forward_pre_hook(gain)
        return {}

    def restore(self, model: nn.Module, config: object) -> None:
        """As `quark.checkpoint.restorers.Restorer.restore`."""
        for layer in self._layers(model):
            layer.register_forward_pre_hook(Gain(layer.weight.shape[1]))

    def place_of(self, name: str, tensor: Tensor) -> str:
        """Return no tensors, since the checkpoint has none of this algorithm."""
        return name

    def _layers(self, module: nn.Module) -> Iterator[Any]:
        return (m for name, m in module.named_modules() if name.endswith(self._endings))
