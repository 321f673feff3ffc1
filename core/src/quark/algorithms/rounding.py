"""Rounding: choose the codes of weights. A run has exactly one; this is the default one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, TypeVar, cast, runtime_checkable

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms.stacked_weights import StackedWeights, float_weight, weight_quantizer
from quark.algorithms.statistics import Statistic
from quark.modules import QuantizedLayer, QuantizerModule
from quark.quantizers import Observer

S = TypeVar("S", bound=Statistic)
Metrics = Mapping[str, float | int | str | bool]
"""What a rounding has to say about one layer, by name: JSON values."""


@attrs.frozen(eq=False)
class HeldOut:
    """Tokens that no statistic has seen: codes, and what leads to them, are validated on these.

    Attributes:
        x: What the layers get in the quantized model, ``[n, K]``, in the model's dtype.
        reference: What they get in the float model, likewise; None where no statistic asks for it, or it is not known.
    """

    x: Tensor
    reference: Tensor | None = None

    def output_error(self, weight: Tensor, rounded: Tensor) -> Tensor:
        """The squared error of each token's outputs, ``[n]``, float32, of weights ``[N, K]``; against the float model if that is known."""
        x, weight = self.x.float(), weight.float()
        error = x @ (weight - rounded.float()).t()  # [n, N]
        if self.reference is not None:
            error += (self.reference.float() - x) @ weight.t()
        return error.square_().sum(1)


@attrs.frozen(eq=False)
class RoundingTask:
    """Layers to be rounded together: all have one spec of weights, and, where statistics are given, one input.

    Attributes:
        layers: By full name. Their ``weight`` is the float one.
        statistics: Of their input, by class; empty for a rounding that needs none, and for layers that no calibration token has reached.
        shares_scale: Whether they get one common scale over the whole tensor.
        held_out: Tokens of their input that are in no statistic; None where there are too few to tell anything.
    """

    layers: Mapping[str, QuantizedLayer]
    statistics: Mapping[type[Statistic], Statistic] = attrs.field(factory=dict)
    shares_scale: bool = False
    held_out: HeldOut | None = None

    def statistic(self, kind: type[S]) -> S:
        """The statistic of that class, which the rounding has declared; raises KeyError where it has not."""
        if kind not in self.statistics:
            names = ", ".join(k.__name__ for k in self.statistics) or "none"
            raise KeyError(f"asked for the statistic {kind.__name__}, which it does not declare: its needs are {names}")
        return cast("S", self.statistics[kind])

    def stacked(self) -> StackedWeights:
        """Return the weights of all layers as one matrix, with the values they may take and the way back into the layers.

        Example:
            The body of a rounding that leaves scales as they are::

                weights = task.stacked()
                grid = weights.grid()
                scales = grid.fixed or grid.scales(weights.wt)
                weights.keep(grid, grid.round_(weights.wt, grid.with_subscales(weights.wt, scales)), scales)
        """
        return StackedWeights(self.layers, shares_scale=self.shares_scale)


class Rounding(Protocol):
    """Chooses codes."""

    @property
    def needs(self) -> Sequence[type[Statistic]]:
        """Statistics of the layers' inputs; without any, no data are wanted. A plain attribute will do."""

    def applies_to(self, name: str) -> bool:
        """Whether it rounds the layer of that name, relative to its block; others are rounded to nearest."""

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round the weights of the layers.

        On return each layer's ``weight`` is a new parameter with values on the grid of its ``weight_quantizer``, whose scales are set.
        Nothing else of the layers differs: bias, hooks, what modules they hold. A bias where there was none has no place in a checkpoint.
        Returns what is worth reporting, by layer, in JSON values. All of this is looked at in a run.

        The pipeline validates the codes: layers whose outputs on held-out tokens are worse than with round-to-nearest get that instead.

        Raises:
            RoundingError: No codes can be found from these statistics: the layers are rounded to nearest instead.
        """


@runtime_checkable
class NamesLayers(Protocol):
    """A `Rounding` whose settings name the layers that it takes. Names that are of none are told of before any work."""

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """Returns what the settings name, and what none of these layers, relative to their blocks, is called."""


class RoundToNearest:
    """Every element to the nearest value its scale allows, which needs no data. Source: spec of the algorithms, §1.1.

    A layer gets a new parameter, and lets its old one go: weights that are mapped from a checkpoint are read once and never written, which
    would copy them page by page, and a parameter that another module shares stays what it is there.
    """

    needs: ClassVar[Sequence[type[Statistic]]] = ()

    def applies_to(self, name: str) -> bool:
        """Everything."""
        return True

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """As `Rounding.round`; there is nothing to report."""
        layers = list(task.layers.values())
        quantizers = [weight_quantizer(layer) for layer in layers]
        shared = _seen_by_all(layers, quantizers) if task.shares_scale else None
        for layer, quantizer in zip(layers, quantizers, strict=True):
            weight = float_weight(layer)
            if shared is None:
                values, qparams = quantizer.quantizer.round_to_nearest(weight)
            else:
                qparams = quantizer.quantizer.find_qparams(weight, shared)
                values = quantizer.quantizer.fake_quantize(weight, qparams)
            layer.weight = nn.Parameter(values, requires_grad=False)
            quantizer.set_qparams(qparams)
        return {}


def _seen_by_all(layers: Sequence[QuantizedLayer], quantizers: Sequence[QuantizerModule]) -> Observer:
    """An observer of the range that the weights of all layers span together."""
    observer = quantizers[0].quantizer.observer()
    for layer in layers:
        observer.observe(float_weight(layer))
    return observer
