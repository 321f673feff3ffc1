"""Rounding: choose the codes of weights. A run has exactly one; this is the default one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms.statistics import Statistic
from quark.base.parallel import SMALL, parallel_map, row_slices
from quark.base.ranks import ALONE, Ranks
from quark.errors import ConfigError
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.numbers import GroupScales, Observer, RoundedGrid, WeightGrid, cast_finite

S = TypeVar("S", bound=Statistic)
T = TypeVar("T")
Metrics = Mapping[str, float | int | str | bool]
"""Metrics of a rounding for one layer, by name; JSON values."""


_ROWS = 256
"""Rows of a slice that is rounded separately in a deterministic run."""


@attrs.frozen(eq=False)
class HeldOut:
    """Held-out tokens, for validating codes and choosing between alternatives.

    Unless there are many tokens, no statistic contains the held-out tokens.

    Attributes:
        x: Inputs of the layers in the quantized model, ``[n, K]``, in the model's dtype.
        reference: Inputs of the layers in the float model, likewise; None if no statistic needs them, or they
            are unknown.
        float_outputs: Output of a single layer in the float model, without bias, ``[n, N]``, instead of
            ``reference`` (`Statistic.of_outputs`); else None.
    """

    x: Tensor
    reference: Tensor | None = None
    float_outputs: Tensor | None = None

    def outputs(self, weight: Tensor) -> Tensor:
        """Return the outputs of the float weight ``[N, K]``, or of some of its rows, ``[n, N]``, float32.

        Inputs come from the float model, if they are known.
        """
        if self.float_outputs is not None:
            return self.float_outputs.float()
        x = self.x if self.reference is None else self.reference
        return x.float() @ weight.float().t()

    def squared_error(self, rounded: Tensor, outputs: Tensor) -> Tensor:
        """Return the squared error of each token's outputs, ``[n]``, float32.

        Args:
            rounded: A rounded weight ``[N, K]``.
            outputs: `outputs` of the float weight, ``[n, N]``.
        """
        return torch.addmm(outputs, self.x.float(), rounded.float().t(), alpha=-1).square_().sum(1)


@attrs.frozen(eq=False)
class RoundingTask:
    """Layers that are rounded together.

    All weights have one spec. If there are statistics, all layers have the same input.

    Attributes:
        layers: Layers by full name. Their ``weight`` is the float weight.
        statistics: Statistics of their input, by class; empty for a rounding that needs none, and for layers
            that no calibration token has reached.
        shares_scale: Whether all the weights share one scale.
        held_out: Tokens of the layers' input to validate codes on; None if there are too few.
        ranks: The processes that have this task, with the same weights, statistics and held-out tokens. All
            of them round the layers, and get the same result.
    """

    layers: Mapping[str, QuantizedLayer]
    statistics: Mapping[type[Statistic], Statistic] = attrs.field(factory=dict)
    shares_scale: bool = False
    held_out: HeldOut | None = None
    ranks: Ranks = ALONE

    def statistic(self, kind: type[S]) -> S:
        """Return the statistic of that class.

        Raises KeyError if the rounding does not declare it in its ``needs``.
        """
        if kind not in self.statistics:
            names = ", ".join(k.__name__ for k in self.statistics) or "none"
            raise KeyError(f"asked for the statistic {kind.__name__}, which it does not declare: its needs are {names}")
        return cast("S", self.statistics[kind])

    def stacked(self) -> StackedWeights:
        """Return the weights of all layers as one matrix that has their grid and can update the layers.

        Example:
            The body of a rounding that leaves scales as they are::

                weights = task.stacked()
                grid = weights.grid()
                scales = grid.fixed or grid.scales(weights.wt)
                weights.keep(grid, grid.round_(weights.wt, grid.with_subscales(weights.wt, scales)), scales)
        """
        return StackedWeights(self.layers, shares_scale=self.shares_scale)

    def shared_observer(self) -> Observer | None:
        """Return an observer of the range of all layers' weights together; None if they share no scale.

        A rounding that finds scales layer by layer passes it to ``find_qparams`` of each quantizer.
        """
        if not self.shares_scale:
            return None
        observer = weight_quantizer(next(iter(self.layers.values()))).quantizer.observer()
        for layer in self.layers.values():
            observer.observe(float_weight(layer))
        return observer

    def by_rows(self, work: Callable[[slice], T], rows: int) -> list[T]:
        """Return the results of ``work`` on consecutive slices of the rows, the same on all ranks.

        Each slice is processed by one rank. In a deterministic run, slices do not depend on the number of
        ranks: the last bits of a row in a matrix product depend on the number of rows.

        Args:
            work: Function of a slice, which must not depend on other rows. Its result is sent to the other
                ranks.
            rows: Number of rows.
        """
        most = _ROWS if self.ranks.is_deterministic else -(-rows // self.ranks.size)
        slices = row_slices(rows, 1, most)
        parts = self.ranks.gather(list(map(work, slices[self.ranks.part(len(slices))])))
        return [result for part in parts for result in part]


class StackedWeights:
    """The weights of layers that are rounded together, as one matrix.

    Args:
        layers: Layers by full name, with float weights. All weights have one spec and the same number of
            input channels.
        shares_scale: Whether all the weights share one scale.

    Attributes:
        wt: ``Wᵀ [K, N]``, float32, contiguous: each row is an input channel. A copy, which the algorithm may
            change.
        rows: Number of output channels of each layer, N in total.
    """

    def __init__(self, layers: Mapping[str, QuantizedLayer], *, shares_scale: bool = False) -> None:
        self._layers = layers
        self._shares_scale = shares_scale
        weights = [float_weight(layer) for layer in layers.values()]
        self._dtype = weights[0].dtype
        self.wt = torch.cat(weights).t().float().contiguous()  # [K, N]
        self.rows = [weight.shape[0] for weight in weights]

    def grid(self, importance: Tensor | None = None) -> WeightGrid:
        """Return the `WeightGrid` of the weights.

        Scales that span rows or layers, and tables, come from `wt` as it is now, including your changes.

        Args:
            importance: As in `WeightGrid`.
        """
        quantizers = [weight_quantizer(layer).quantizer for layer in self._layers.values()]
        return WeightGrid(quantizers, self.rows, self.wt, shared=self._shares_scale, importance=importance)

    def rounded_grid(self) -> RoundedGrid:
        """Return the grid of weights that are rounded already, with the scales of the layers."""
        modules = [weight_quantizer(layer) for layer in self._layers.values()]
        qparams = [module.qparams for module in modules]
        if any(q is None for q in qparams):
            raise ConfigError(f"the weights of {', '.join(self._layers)} are not rounded yet: use grid()")
        return RoundedGrid([module.quantizer for module in modules], self.rows, self.wt, qparams)  # type: ignore[arg-type]

    def keep(self, grid: WeightGrid, qt: Tensor, scales: GroupScales) -> None:
        """Give the layers their rounded weights and scales, and their codes if known.

        Args:
            grid: Result of `grid`.
            qt: ``Qᵀ [K, N]``, values of the grid.
            scales: Scales of all groups.
        """
        for layer, (values, qparams, codes) in zip(self._layers.values(), grid.weights(qt, scales, self._dtype), strict=True):
            weight_quantizer(layer).set_qparams(qparams, codes=codes)
            layer.weight = nn.Parameter(values, requires_grad=False)

    def by_layer(self, per_row: Tensor) -> dict[str, Tensor]:
        """Split values ``[N]`` of all output channels by layer, and return them by full name."""
        return dict(zip(self._layers, per_row.split(self.rows), strict=True))


def weight_quantizer(layer: QuantizedLayer) -> QuantizerModule:
    """Return the weight quantizer of a layer.

    Raises:
        ConfigError: The layer has none.
    """
    if layer.weight_quantizer is None:
        raise ConfigError("a layer without a weight quantizer cannot be rounded")
    return layer.weight_quantizer


def float_weight(layer: QuantizedLayer) -> Tensor:
    """Return the weight of a layer that has not been rounded yet."""
    return layer.weight.data  # type: ignore[return-value]


class Rounding(ABC):
    """Chooses the codes of weights. A subclass defines `round`.

    Attributes:
        needs: Statistics of the layers' inputs; without any, no calibration data are needed.
        rounds_vectors: Whether it rounds formats whose elements share codes
            (`quark.numbers.NumberFormat.vector`), a vector at a time. If not, a run with
            such weights is refused.
    """

    needs: Sequence[type[Statistic]] = ()
    rounds_vectors: bool = False

    def applies_to(self, name: str) -> bool:
        """Return whether it rounds the layer of that name, relative to its block; by default always.

        Other layers are rounded to nearest.
        """
        return True

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names in the settings that match no layer; ``names`` are relative to their blocks.

        The plan warns of them. By default, the settings name no layers.
        """
        return ()

    @abstractmethod
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round the weights of the layers.

        On return, each layer's ``weight`` is a new parameter with values on the grid of its
        ``weight_quantizer``, whose scales are set. Nothing else of the layers may change, such as bias, hooks
        or submodules: a checkpoint has no place for a new bias. Returns metrics by layer, as JSON values. A
        run checks weights, scales and metrics, and the conformance suite checks all of this.
        `RoundingTask.stacked` helps with weights, grid and scales.

        The pipeline validates the codes. Layers whose outputs on held-out tokens are worse than with
        round-to-nearest get round-to-nearest instead.

        Raises:
            RoundingError: No codes can be found from these statistics; the layers are rounded to nearest
                instead.
        """


class RoundToNearest(Rounding):
    """Rounds every element to the nearest value that its scale allows, without data.

    A layer gets a new parameter. So weights that are mapped from a checkpoint are read once and never
    written; writing would copy them page by page. A module that shares the earlier parameter keeps it.

    Args:
        defers: Whether weights stay float if they give the same codes as rounded values would
            (`quark.models.layers.QuantizerModule.is_deferred`). No forward may run through such layers.
    """

    rounds_vectors = True
    _defers = False  # for subclasses with their own constructor

    def __init__(self, *, defers: bool = False) -> None:
        self._defers = defers

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round the layers to nearest; there are no metrics."""
        shared = task.shared_observer()

        def round_layer(layer: QuantizedLayer) -> None:
            quantizer, weight, is_deferred, codes = weight_quantizer(layer), float_weight(layer), False, None
            if quantizer.quantizer.stored_level.format.vector > 1:  # values in 16 bits may not tell their codes
                qparams = quantizer.quantizer.find_qparams(weight, shared)
                codes = quantizer.quantizer.quantize(weight, qparams)
                values = cast_finite(quantizer.quantizer.dequantize(codes, qparams), weight.dtype)
            elif shared is None and not self._defers:
                values, qparams = quantizer.quantizer.round_to_nearest(weight)
            else:
                qparams = quantizer.quantizer.find_qparams(weight, shared)
                is_deferred = self._defers and quantizer.quantizer.recovers_codes(weight.dtype, qparams)
                values = weight if is_deferred else quantizer.quantizer.fake_quantize(weight, qparams)
            layer.weight = nn.Parameter(values, requires_grad=False)
            quantizer.set_qparams(qparams, is_deferred=is_deferred, codes=codes)

        layers = list(task.layers.values())
        # Few parts of one layer keep few threads busy, so a lone layer is split by rows instead.
        if len(layers) > 1 and all(float_weight(layer).numel() <= SMALL for layer in layers):
            parallel_map(round_layer, layers, float_weight(layers[0]).device)
        else:
            list(map(round_layer, layers))
        return {}


def find_nearest_scales(task: RoundingTask) -> None:
    """Set the scales of round-to-nearest, and leave the weights float (`QuantizerModule.is_deferred`)."""
    shared = task.shared_observer()
    for layer in task.layers.values():
        quantizer = weight_quantizer(layer)
        quantizer.set_qparams(quantizer.quantizer.find_qparams(float_weight(layer), shared), is_deferred=True)
