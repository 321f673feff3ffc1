"""Column by column: the rounding that GPTQ, GPTAQ and Qronos are recipes of. Plumbing between the pipeline and `quark_algos.columns`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import CrossMoment, Figures, Problem, SecondMoment, SecondMoment64, Statistic, float_weight, weight_quantizer
from quark.names import folded
from quark.numerics import GroupScales, WeightGrid
from quark.specs.algorithm import AlgoConfig
from quark_algos.columns.correction import corrected
from quark_algos.columns.factor import Factor, SingularError, damped, factor, largest_eigenvalue
from quark_algos.columns.refit import refit
from quark_algos.columns.scales import search
from quark_algos.columns.sweep import Swept, descend, ldlq, ldlq_choosing
from quark_algos.hessian import GPTQConfig, QronosConfig
from quark_algos.recipe import Recipe, recipe_of

FEW_TOKENS_DAMPING = 1.0
"""Least damping of layers that got fewer tokens than they have input channels: their H is singular, and their correction left out."""


def _names(pattern: str, layer: str) -> bool:
    return fnmatchcase(layer, pattern) or layer.endswith(f".{pattern}")


class ColumnRounding:
    """Rounds the columns of a weight one after another, in view of the outputs.

    Layers that got fewer tokens than they have input channels are damped more strongly and not corrected; their figures say
    ``few_tokens``. Figures of every layer: ``damping`` (share of H's mean diagonal), ``attempts`` at factoring H, ``dead`` channels,
    ``output_mse``, the mean squared error of an output element that the algorithm expects.

    Args:
        settings: A `GPTQConfig`, `GPTAQConfig` or `QronosConfig`.
    """

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, GPTQConfig | QronosConfig)
        self._recipe = recipe_of(settings)
        self._moment = SecondMoment64 if self._recipe.float64 else SecondMoment
        self.needs: Sequence[type[Statistic]] = (self._moment, CrossMoment) if self._recipe.share else (self._moment,)

    def takes(self, name: str) -> bool:
        """Whether the settings name this layer."""
        patterns = self._recipe.modules
        return not patterns or any(_names(p, name) for p in patterns)

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """As `quark.algorithms.NamesLayers.unmatched`."""
        return [p for p in self._recipe.modules if not any(_names(p, name) for name in names)]

    @torch.no_grad()
    def round(self, problem: Problem) -> Mapping[str, Figures]:
        """As `quark.algorithms.Rounding.round`."""
        layers = list(problem.layers.values())
        weights = [float_weight(layer) for layer in layers]
        wt = torch.cat(weights).t().float().contiguous()  # [K, N]
        moment = problem.statistic(self._moment)
        h = moment.matrix()
        try:
            recipe = self._fitting(moment.tokens, h)
            solved = _ready(moment, h, recipe)
        except SingularError as error:
            raise SingularError(f"{folded(problem.layers)}: {error}") from error
        if moment.tokens >= wt.shape[0]:  # of a few tokens, silence says little about others
            wt[solved.dead] = 0
        if recipe.share and CrossMoment in problem.statistics:
            gentle = _correction_factor(moment, h, recipe)
            wt = corrected(wt, problem.statistic(CrossMoment).matrix(), gentle, recipe.share)
        quantizers = [weight_quantizer(layer) for layer in layers]
        grid = WeightGrid([q.quantizer for q in quantizers], [w.shape[0] for w in weights], wt, shared=problem.shares_scale)
        done, scales = _rounded(wt, h, grid, solved, recipe)
        for layer, quantizer, (values, qparams) in zip(layers, quantizers, grid.weights(done.q, scales, weights[0].dtype), strict=True):
            quantizer.set_qparams(qparams)
            layer.weight = nn.Parameter(values, requires_grad=False)
        figures = solved.figures | {"few_tokens": moment.tokens < wt.shape[0]}
        parts = done.loss.split([w.shape[0] for w in weights])
        return {
            name: figures | {"output_mse": float(part.mean()) / max(moment.tokens, 1)}
            for name, part in zip(problem.layers, parts, strict=True)
        }

    def _fitting(self, tokens: int, h: Tensor) -> Recipe:
        """The recipe for a layer that got that many tokens, its damping a share of the mean diagonal."""
        recipe = self._recipe
        share = recipe.damping
        if share is None:
            share = recipe.eigen_damping * largest_eigenvalue(h) / max(float(h.diagonal().mean()), torch.finfo(h.dtype).tiny)
        if tokens >= h.shape[0]:
            return attrs.evolve(recipe, damping=share)
        return attrs.evolve(recipe, damping=max(share, FEW_TOKENS_DAMPING), share=0.0)


@attrs.frozen(eq=False)
class _Ready:
    """What can be made of a second moment before any weight is looked at.

    Attributes:
        order: Of the channels, ``[K]``, or None for their own.
        factor: In that order; float32.
        dead: Channels that are always 0, in their own order.
    """

    order: Tensor | None
    factor: Factor
    dead: Tensor

    @property
    def figures(self) -> dict[str, Any]:
        """What is to be reported."""
        found = self.factor.damped
        return {"damping": found.damping, "attempts": found.attempts, "dead": int(self.dead.sum())}


def _ready(moment: SecondMoment, h: Tensor, recipe: Recipe) -> _Ready:
    """The factor of H; layers that share their input but not their format find it made."""
    key = ("ready", recipe.by_importance and recipe.static_groups, recipe.damping)
    if key not in moment.derived:
        assert recipe.damping is not None
        order = torch.argsort(h.diagonal(), descending=True, stable=True) if key[1] else None
        moment.derived[key] = _Ready(order, factor(h, recipe.damping, order).to(torch.float32), h.diagonal() <= 0)
    found: _Ready = moment.derived[key]
    return found


def _correction_factor(moment: SecondMoment, h: Tensor, recipe: Recipe) -> Factor:
    share = recipe.correction_damping or recipe.damping
    assert share is not None
    key = ("correction", share)
    if key not in moment.derived:
        moment.derived[key] = factor(h, share).to(torch.float32)
    found: Factor = moment.derived[key]
    return found


def _rounded(wt: Tensor, h: Tensor, grid: WeightGrid, ready: _Ready, recipe: Recipe) -> tuple[Swept, GroupScales]:
    """The rounded weight, and the scales of all groups."""
    if recipe.static_groups or grid.fixed is not None or grid.group == grid.columns:
        scales = _scales(wt, h, grid, recipe)
        each = grid.with_steps(wt, scales)
        done = ldlq(wt, ready.factor, grid.rounder(each, ready.order), recipe.block, ready.order)
        for _ in range(recipe.refits if grid.can_be_refitted else 0):
            done, scales = _refitted(wt, h, grid, ready, recipe, done, scales)
        each = grid.with_steps(wt, scales)
    else:

        def choose(t: Tensor, number: int) -> GroupScales:
            part = slice(number * grid.group, (number + 1) * grid.group)
            return _scales(t, h[part, part], grid, recipe)

        done, scales, each = ldlq_choosing(wt, ready.factor, grid, choose)
    for _ in range(recipe.passes):
        if not descend(done, ready.factor.damped.h, grid.rounder(each, ready.order)):
            break
    return done, scales


def _refitted(
    wt: Tensor, h: Tensor, grid: WeightGrid, ready: _Ready, recipe: Recipe, done: Swept, scales: GroupScales
) -> tuple[Swept, GroupScales]:
    """Scales fitted to the codes, and the weight rounded anew under them; rows that gain nothing stay as they are."""
    assert recipe.damping is not None
    factors = refit(done.q, done.e_in_place(), damped(h, recipe.damping).h, grid.group)
    high = scales.scale * factors * grid.reach
    fitted = grid.scales_of_ranges(-high, high)
    again = ldlq(wt, ready.factor, grid.rounder(fitted, ready.order), recipe.block, ready.order)
    better = again.loss < done.loss  # [N]
    return done.where(better, again), scales.where(better.expand_as(scales.scale), fitted)


def _scales(wt: Tensor, h: Tensor, grid: WeightGrid, recipe: Recipe) -> GroupScales:
    """Scales of the groups of ``wt [m · group, N]``, of whose channels H is ``[m · group, m · group]``."""
    if recipe.scales == "minmax":
        return grid.fixed or grid.scales(wt)
    return search(wt, grid, h.float() if recipe.scales == "hessian" else None)
