"""A rounding chooses the codes of weights. A run has exactly one rounding, by default `RoundToNearest`."""

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
"""Metrics of an algorithm for one layer, as a mapping from name to a JSON value."""


_ROWS = 256
"""Number of rows of each slice that a deterministic run rounds separately."""


@attrs.frozen(eq=False)
class HeldOut:
    """Inputs of layers for held-out tokens. A run uses them to validate codes and to compare alternatives.

    The statistics include held-out tokens only if there are very many calibration tokens. n is the number of
    held-out tokens, K the number of input channels, and N the number of output channels.

    Attributes:
        x: Inputs of the layers in the quantized model, ``[n, K]``, in the dtype of the model.
        reference: Inputs of the layers in the float model, with the same shape and dtype. None if no
            statistic needs them, or if they are unknown.
        float_outputs: Outputs ``[n, N]`` of a single layer in the float model, without bias. A run stores
            them instead of ``reference`` if it collects the statistic `Statistic.of_outputs`. Otherwise None.
    """

    x: Tensor
    reference: Tensor | None = None
    float_outputs: Tensor | None = None

    def outputs(self, weight: Tensor) -> Tensor:
        """Return the outputs of a layer with the float weight ``[N, K]``, as a float32 tensor ``[n, N]``.

        The weight may be a slice of the rows of a layer's weight. The inputs are ``reference``, or ``x`` if
        ``reference`` is None. If there are ``float_outputs``, return these instead.
        """
        if self.float_outputs is not None:
            return self.float_outputs.float()
        x = self.x if self.reference is None else self.reference
        return x.float() @ weight.float().t()

    def squared_error(self, rounded: Tensor, outputs: Tensor) -> Tensor:
        """Return the squared output error of each token, as a float32 tensor ``[n]``.

        Args:
            rounded: A rounded weight ``[N, K]``.
            outputs: Result of the method `outputs` for the float weight, ``[n, N]``.
        """
        return torch.addmm(outputs, self.x.float(), rounded.float().t(), alpha=-1).square_().sum(1)


@attrs.frozen(eq=False)
class RoundingTask:
    """Layers that are rounded together.

    All their weights have the same configuration. If there are statistics, all layers have the same input.

    Attributes:
        layers: Mapping from the full name of a layer to the layer. Its ``weight`` is the float weight.
        statistics: Mapping from a class of statistics to the statistic of the layers' input. It is empty if
            the rounding needs no statistics, or if no calibration token has reached the layers.
        shares_scale: Whether all the weights share one scale.
        held_out: Tokens of the layers' input on which codes are validated. None if there are too few tokens.
        ranks: The processes that work on this task together. They have the same weights, statistics and
            held-out tokens, and must all get the same result.
    """

    layers: Mapping[str, QuantizedLayer]
    statistics: Mapping[type[Statistic], Statistic] = attrs.field(factory=dict)
    shares_scale: bool = False
    held_out: HeldOut | None = None
    ranks: Ranks = ALONE

    def statistic(self, kind: type[S]) -> S:
        """Return the statistic of the class ``kind``.

        Raise KeyError if the rounding does not declare ``kind`` in its ``needs``.
        """
        if kind not in self.statistics:
            names = ", ".join(k.__name__ for k in self.statistics) or "none"
            raise KeyError(f"asked for the statistic {kind.__name__}, which it does not declare: its needs are {names}")
        return cast("S", self.statistics[kind])

    def stacked(self) -> StackedWeights:
        """Return the weights of all layers as one matrix.

        The result has methods that return the grid of the weights and that set the rounded weights.

        Example:
            The body of a method `Rounding.round` that does not change scales::

                weights = task.stacked()
                grid = weights.grid()
                scales = grid.fixed or grid.scales(weights.wt)
                weights.keep(grid, grid.round_(weights.wt, grid.with_subscales(weights.wt, scales)), scales)
        """
        return StackedWeights(self.layers, shares_scale=self.shares_scale)

    def shared_observer(self) -> Observer | None:
        """Return an observer that has observed the weights of all layers.

        Return None if the layers share no scale. If your rounding computes scales layer by layer, pass the
        observer to ``find_qparams`` of each layer's weight quantizer.
        """
        if not self.shares_scale:
            return None
        observer = weight_quantizer(next(iter(self.layers.values()))).quantizer.observer()
        for layer in self.layers.values():
            observer.observe(float_weight(layer))
        return observer

    def by_rows(self, work: Callable[[slice], T], rows: int) -> list[T]:
        """Call ``work`` on consecutive slices of the rows, and return a list of the results.

        The ranks share the slices, but each rank gets all results. In a deterministic run, the slices do not
        depend on the number of ranks, because the last bits of a row in a matrix product depend on the number
        of rows.

        Args:
            work: Function that is called with a slice. Its result must not depend on other rows, and is sent
                to the other ranks.
            rows: Number of rows.
        """
        most = _ROWS if self.ranks.is_deterministic else -(-rows // self.ranks.size)
        slices = row_slices(rows, 1, most)
        parts = self.ranks.gather(list(map(work, slices[self.ranks.part(len(slices))])))
        return [result for part in parts for result in part]


class StackedWeights:
    """The weights of layers that are rounded together, as one matrix.

    Args:
        layers: Mapping from full name to layer, with float weights. All weights have the same configuration
            and the same number of input channels.
        shares_scale: Whether all the weights share one scale.

    Attributes:
        wt: The transposed weights ``Wᵀ [K, N]``, a contiguous float32 tensor. Each row is an input channel.
            It is a copy, so the algorithm may change it.
        rows: Number of output channels of each layer. The sum is N.
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

        If the format has tables, or if several rows or layers share a scale, the grid contains these tables
        and scales. They are computed from the current values of ``wt``, so they include your changes of
        ``wt``.

        Args:
            importance: Importance of input channels, as in `WeightGrid`.
        """
        quantizers = [weight_quantizer(layer).quantizer for layer in self._layers.values()]
        return WeightGrid(quantizers, self.rows, self.wt, shared=self._shares_scale, importance=importance)

    def rounded_grid(self) -> RoundedGrid:
        """Return the grid of weights that are already rounded. The grid uses the scales of the layers."""
        modules = [weight_quantizer(layer) for layer in self._layers.values()]
        qparams = [module.qparams for module in modules]
        if any(q is None for q in qparams):
            raise ConfigError(f"the weights of {', '.join(self._layers)} are not rounded yet: use grid()")
        return RoundedGrid([module.quantizer for module in modules], self.rows, self.wt, qparams)  # type: ignore[arg-type]

    def keep(self, grid: WeightGrid, qt: Tensor, scales: GroupScales) -> None:
        """Set the rounded weights and the scales of the layers, and also the codes if they are known.

        Args:
            grid: Result of the method `grid`.
            qt: The transposed rounded weights ``Qᵀ [K, N]``, which must be values of the grid.
            scales: Scales of all groups.
        """
        for layer, (values, qparams, codes) in zip(self._layers.values(), grid.weights(qt, scales, self._dtype), strict=True):
            weight_quantizer(layer).set_qparams(qparams, codes=codes)
            layer.weight = nn.Parameter(values, requires_grad=False)

    def by_layer(self, per_row: Tensor) -> dict[str, Tensor]:
        """Return a dictionary from the full name of a layer to its part of ``per_row [N]``."""
        return dict(zip(self._layers, per_row.split(self.rows), strict=True))


def weight_quantizer(layer: QuantizedLayer) -> QuantizerModule:
    """Return the weight quantizer of a layer.

    Raises:
        ConfigError: The layer has no weight quantizer.
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
        needs: Classes of the statistics of layer inputs that the rounding needs. If ``needs`` is empty, the
            rounding needs no calibration data.
        rounds_vectors: Whether the rounding supports formats in which several elements share a code
            (`quark.numbers.NumberFormat.vector`). If False, quark refuses a run with such weights.
    """

    needs: Sequence[type[Statistic]] = ()
    rounds_vectors: bool = False

    def applies_to(self, name: str) -> bool:
        """Return whether this rounding applies to the layer ``name``. By default, return True.

        ``name`` is relative to the block of the layer. Other layers are rounded to nearest.
        """
        return True

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names in this rounding's settings that match no layer in ``names``.

        ``names`` are relative to their blocks. The plan shows a warning about the returned names. By default,
        return no names.
        """
        return ()

    @abstractmethod
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round the weights of the layers.

        The method replaces the ``weight`` of each layer by a new parameter with values on the grid of the
        layer's ``weight_quantizer``, and sets the scales of the quantizer. It must not change anything else,
        such as bias, hooks or submodules. It returns a dictionary from the name of a layer to its metrics. A
        run checks weights, scales and metrics, and the conformance suite checks all of this.
        `RoundingTask.stacked` helps with weights, grid and scales.

        Afterwards, the run validates the codes. If the outputs of a layer on held-out tokens are worse than
        with round-to-nearest, the run rounds the layer to nearest instead.

        Raises:
            RoundingError: The method cannot choose codes from these statistics. The run then rounds the
                layers to nearest.
        """


class RoundToNearest(Rounding):
    """Rounds every element to the nearest value that its scale allows. This needs no calibration data.

    Each layer gets a new parameter, because an in-place change of weights that are memory-mapped from a
    checkpoint would copy them page by page. If another module shares the old parameter, that module keeps it.

    Args:
        defers: If True, a weight stays float if the codes can be computed later without any difference
            (`quark.models.layers.QuantizerModule.is_deferred`). Layers with such weights must not run in a
            forward pass.
    """

    rounds_vectors = True
    _defers = False  # for subclasses with their own constructor

    def __init__(self, *, defers: bool = False) -> None:
        self._defers = defers

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round the layers to nearest. Return an empty dictionary, because there are no metrics."""
        shared = task.shared_observer()

        def round_layer(layer: QuantizedLayer) -> None:
            quantizer, weight, is_deferred, codes = weight_quantizer(layer), float_weight(layer), False, None
            if quantizer.quantizer.stored_level.format.vector > 1:  # codes may not be recoverable from 16-bit values
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
    """Set the scales that round-to-nearest computes, but leave the weights float.

    They can be rounded later (`QuantizerModule.is_deferred`).
    """
    shared = task.shared_observer()
    for layer in task.layers.values():
        quantizer = weight_quantizer(layer)
        quantizer.set_qparams(quantizer.quantizer.find_qparams(float_weight(layer), shared), is_deferred=True)
