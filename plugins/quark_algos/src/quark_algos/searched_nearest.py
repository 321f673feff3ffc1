"""Round to nearest under scales that are searched by what they do to the outputs: AWQ's clipping, as the rounding that goes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from quark.algorithms import Hessian, Metrics, RoundingTask, Statistic, float_weight, weight_quantizer
from quark.quantizers import WeightGrid
from quark_algos.gptq.damping import shrunk
from quark_algos.scale_search import search


class SearchedNearest:
    """Every element to the nearest value, of scales whose groups' errors weigh least in the outputs."""

    needs: ClassVar[Sequence[type[Statistic]]] = (Hessian,)

    def applies_to(self, name: str) -> bool:
        """Every layer."""
        return True

    @torch.no_grad()
    def round(self, problem: RoundingTask) -> Mapping[str, Metrics]:
        """As `quark.algorithms.Rounding.round`; there is nothing to report."""
        layers = list(problem.layers.values())
        quantizers = [weight_quantizer(layer) for layer in layers]
        weights = [float_weight(layer) for layer in layers]
        wt = torch.cat(weights).t().float().contiguous()  # [K, N]
        grid = WeightGrid([q.quantizer for q in quantizers], [w.shape[0] for w in weights], wt, shared=problem.shares_scale)
        hessian = problem.statistic(Hessian)
        scales = search(wt, grid, shrunk(hessian.matrix(), hessian.shrinkage()))
        values = grid.round_(wt.clone(), grid.with_subscales(wt, scales))
        for layer, quantizer, (weight, qparams) in zip(layers, quantizers, grid.weights(values, scales, weights[0].dtype), strict=True):
            quantizer.set_qparams(qparams)
            layer.weight = nn.Parameter(weight, requires_grad=False)
        return {name: {} for name in problem.layers}
