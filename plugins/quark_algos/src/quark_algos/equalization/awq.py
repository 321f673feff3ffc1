"""AWQ and AutoSmoothQuant: for each mapping, both search the scales with the smallest output error."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from quark.algorithms import (
    BlockContext,
    Rounding,
    Statistic,
)
from quark.config.algorithm import AlgoConfig
from quark.config.layer import QLayerConfig, levels
from quark.models.layers.quantized_layers import linear_weight
from quark.numbers import WeightGrid, quantizer_for
from quark_algos.equalization.candidates import Quadratic
from quark_algos.equalization.config import AutoSmoothQuantConfig
from quark_algos.equalization.equalization import Equalization
from quark_algos.equalization.inputs import ChannelRanges, SampleOfSample, TokenSample, errors_of_inputs
from quark_algos.equalization.search import AbsMeanOfSample, ActivationErrors, HessianOfSample, Loss, Part, SearchedNearest, autosmooth, awq
from quark_algos.gptq.damping import shrunk
from quark_algos.mappings.resolve import ResolvedMapping

__all__ = ["AutoSmoothQuant", "Awq"]

_S = TypeVar("_S", bound=Statistic)

_ROWS = 512
"""Candidates are compared on about this many rows of the balance layers, evenly spaced.

These rows are enough to find the best candidate, and need only a fraction of the time.
"""


class _Searched(Equalization):
    """Base class of AWQ and AutoSmoothQuant. Both compute the error of each candidate from the Hessian."""

    def _parts(self, modules: ResolvedMapping, block: BlockContext) -> dict[str, Part]:
        """Return the quantized balance layers, grouped by their input and their weight spec.

        The result is a dictionary. The key of a group is the name of its first layer, and the value is a
        `Part`.
        """
        groups: dict[tuple[int, Any], list[str]] = {}
        for name in self._read(modules, block):
            groups.setdefault((id(block.statistics[name]), levels(block.configs[name].weight)), []).append(name)
        quadratics: dict[int, Quadratic] = {}
        parts = {}
        for (key, _), names in groups.items():
            hessian = _read_by(names[0], block, HessianOfSample)
            quadratic = quadratics.setdefault(key, Quadratic(shrunk(hessian.matrix(), hessian.shrinkage())))
            parts[names[0]] = _part([modules.balance_layers[n] for n in names], block.configs[names[0]], quadratic, hessian.tokens)
        return parts

    def _errors(self, parts: Collection[str], block: BlockContext, sample: type[TokenSample]) -> list[ActivationErrors]:
        """Return one object per part, which computes the rounding errors of the part's inputs."""
        ranges = {n: _read_by(n, block, ChannelRanges) for n in parts} if ChannelRanges in self.needs else {}
        return [errors_of_inputs(block.configs[n], _read_by(n, block, sample), ranges.get(n), len(parts)) for n in parts]


def _read_by(layer: str, block: BlockContext, kind: type[_S]) -> _S:
    """Return the statistic of type ``kind`` of a layer. At least one token must have reached the layer."""
    return cast("_S", block.statistic(layer, kind))


def _part(layers: Sequence[nn.Module], config: QLayerConfig, quadratic: Quadratic, tokens: int) -> Part:
    assert config.weight is not None
    quantizer = quantizer_for(config.weight, activation=False)
    weights = [linear_weight(layer) for layer in layers]
    # A scale that spans rows depends on all rows, so no sample of rows can be used.
    step = max(1, sum(w.shape[0] for w in weights) // _ROWS) if quantizer.granularity.is_local else 1
    weights = [w[::step] for w in weights]
    rows = [w.shape[0] for w in weights]
    if quantizer.stored_level.format.table_shape is not None:
        rows = [sum(rows)]  # each layer has its own table, but the search uses one for all layers

    def grid_of(wt: Tensor) -> WeightGrid:
        return WeightGrid([quantizer] * len(rows), rows, wt)

    return Part(torch.cat(weights).t().float().contiguous(), quadratic, grid_of, tokens)


class Awq(_Searched):
    """AWQ (arXiv 2306.00978): searches the scales among powers of the mean magnitude of each input channel.

    If the inputs of the layers are quantized, the loss includes the rounding error of the inputs. If the run
    selects no other rounding, the weights are rounded with AWQ's clipping.
    """

    needs = (HessianOfSample, AbsMeanOfSample, SampleOfSample)

    def rounding(self) -> Rounding | None:
        """Return AWQ's clipping. It rounds to nearest, with the weight scales that give the smallest output
        error.
        """
        return SearchedNearest()

    def scale(self, modules: ResolvedMapping, block: BlockContext) -> Tensor | None:
        parts = self._parts(modules, block)
        if not parts:
            return None
        errors: list[ActivationErrors] = []
        if any(block.configs[name].input_tensors is not None for name in parts):
            errors = self._errors(parts, block, SampleOfSample)
        x_mean = self._combined(modules, block, AbsMeanOfSample)
        return awq(list(parts.values()), x_mean, errors, channels=modules.channels).scale


class AutoSmoothQuant(_Searched):
    """AutoSmoothQuant: SmoothQuant with a search for the alpha of each mapping.

    The search minimizes the output error that results from rounding both weights and activations.
    """

    needs = (HessianOfSample, ChannelRanges, TokenSample)

    def __init__(self, settings: AlgoConfig) -> None:
        super().__init__(settings)
        assert isinstance(settings, AutoSmoothQuantConfig)
        self._loss = cast("Loss", settings.compute_scale_loss)

    def scale(self, modules: ResolvedMapping, block: BlockContext) -> Tensor | None:
        parts = self._parts(modules, block)
        if not parts:
            return None
        errors = self._errors(parts, block, TokenSample)
        x_max = self._combined(modules, block, ChannelRanges)
        return autosmooth(list(parts.values()), x_max, errors, channels=modules.channels, loss=self._loss).scale
