"""Observe the activations of some layers while forwards run through them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.errors import CalibrationError, NonFiniteError
from quark.model.plan import PlanRow, static_activations
from quark.numerics import QParams, quantizer_for
from quark.numerics.observer import Observer
from quark.numerics.quantizer import TensorQuantizer


@attrs.frozen(eq=False)
class Observation:
    """What is being collected of one activation: the input or the output of one layer."""

    layer: str
    slot: str
    quantizer: TensorQuantizer
    observer: Observer

    @property
    def tensor(self) -> str:
        """What people call it."""
        return f"{'input' if self.slot == 'input_tensors' else 'output'} of '{self.layer}'"

    def qparams(self) -> QParams:
        """The scales of what was seen.

        Raises:
            NonFiniteError: NaN or Inf was seen.
            CalibrationError: Nothing was seen.
        """
        try:
            low, high = self.observer.range()
        except CalibrationError as error:
            raise CalibrationError(
                f"no calibration batch reached '{self.layer}': its static scale would be made up. Give data that use it"
            ) from error
        if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise NonFiniteError(
                f"the {self.tensor} holds NaN or Inf during calibration: the model overflows there (float16?), or weights or data are bad. "
                "Layers of earlier blocks are quantized already: load the model again before the next try",
                tensor=self.tensor,
            )
        return self.quantizer.qparams_from(self.observer)


def observations(rows: Iterable[PlanRow]) -> list[Observation]:
    """A fresh observation for every activation of these layers that has a static scale."""
    found = []
    for row in rows:
        for slot in static_activations(row.config):
            quantizer = quantizer_for(getattr(row.config, slot), activation=True)
            found.append(Observation(row.name, slot, quantizer, quantizer.observer()))
    return found


@contextmanager
def observing(model: nn.Module, wanted: Iterable[Observation]) -> Iterator[None]:
    """Let the observations see what their layers get and give while the body runs."""
    hooks: list[Any] = []
    try:
        for item in wanted:
            layer = model.get_submodule(item.layer)
            if item.slot == "input_tensors":
                hooks.append(layer.register_forward_pre_hook(_see_input(item)))
            else:
                hooks.append(layer.register_forward_hook(_see_output(item)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _see_input(item: Observation) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        item.observer.observe(args[0].detach())

    return hook


def _see_output(item: Observation) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        item.observer.observe(output.detach())

    return hook
