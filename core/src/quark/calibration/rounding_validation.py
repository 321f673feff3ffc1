"""Functions that round layers and validate the codes on held-out tokens.

If the codes of a layer cause a larger output error than round-to-nearest, the layer is rounded to nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import HeldOut, RoundingTask, RoundToNearest, float_weight, is_worse, weight_quantizer
from quark.algorithms.rounding import find_nearest_scales
from quark.base.finite import is_finite
from quark.base.names import folded
from quark.base.scalars import decibels, numbers
from quark.calibration.plugin_checks import CheckedRounding
from quark.errors import NonFiniteError, RoundingError
from quark.numbers import Granularity
from quark.numbers.on_grid import sample_of_rows

REASON = "to_nearest_because"
"""Name of the metric that says why a layer was rounded to nearest."""


@torch.no_grad()
def round_validated(checked: CheckedRounding, tasks: Iterable[RoundingTask]) -> dict[str, dict[str, Any]]:
    """Round the layers of ``tasks``, and return a dictionary from layer name to metrics.

    If tokens are held out, three metrics are added for each layer. ``held_out_error`` is the squared error of
    the layer's outputs for the held-out tokens, divided by the same error with round-to-nearest.
    ``output_snr_db`` is the signal-to-noise ratio of these outputs with the final codes. ``nearest_snr_db``
    is the ratio with round-to-nearest. If a layer has N outputs and K inputs with N > K, only about K / 2
    outputs are compared. Layers that must share a scale are compared together; either all or none of them are
    rounded to nearest.

    Args:
        checked: The rounding algorithm. If it raises RoundingError for a task, the layers of the task are
            rounded to nearest.
        tasks: The tasks. Their layers get new weights, and the weight quantizers get scales.

    Raises:
        PluginError: The rounding of a plugin has left a layer in a wrong state, or raised an exception.
        NonFiniteError: The held-out tokens contain NaN or Inf.
    """
    metrics: dict[str, dict[str, Any]] = {}
    for task in tasks:
        weights = {name: cast("nn.Parameter", layer.weight) for name, layer in task.layers.items()}
        try:
            with checked.checks(task):
                report = checked.rounding.round(task)
        except RoundingError as error:
            _restore(task, weights)
            RoundToNearest().round(task)
            metrics |= {name: {REASON: str(error)} for name in task.layers}
            continue
        metrics |= checked.metrics(report, task)
        if task.held_out is None:
            continue
        for part in [task] if task.shares_scale else [attrs.evolve(task, layers={n: q}) for n, q in task.layers.items()]:
            validation = _validated(part, weights, task.held_out)
            for name in part.layers:
                metrics[name] |= validation
    return metrics


def _validated(task: RoundingTask, weights: Mapping[str, nn.Parameter], held_out: HeldOut) -> dict[str, Any]:
    """Compare the codes of the layers with round-to-nearest, keep the better result, and return the
    metrics.
    """
    quantizers = {name: weight_quantizer(layer) for name, layer in task.layers.items()}
    rounded = {name: (layer.weight, quantizers[name].qparams, quantizers[name].codes) for name, layer in task.layers.items()}
    rows = {name: _compared_rows(quantizers[name].quantizer.granularity, weight) for name, weight in weights.items() if name in rounded}
    outputs = {name: held_out.outputs(weights[name].data[part or slice(None)]) for name, part in rows.items()}

    def output_error() -> Tensor:
        """Return the squared error of each of the n tokens as a tensor ``[n]``. Each error is summed over all
        layers.
        """
        compared = {name: quantizers[name].rows_of(float_weight(layer), rows[name]) for name, layer in task.layers.items()}
        return torch.stack([held_out.squared_error(weight, outputs[name]) for name, weight in compared.items()]).sum(0)

    errors = output_error()
    _restore(task, weights)
    find_nearest_scales(task)
    nearest = output_error()
    energies = (of_layer.square().sum() for of_layer in outputs.values())
    noise, nearest_noise, *energy = numbers(errors.sum(), nearest.sum(), *energies)
    if not (math.isfinite(sum(energy)) or is_finite(held_out.x)):
        raise NonFiniteError(
            f"the input of {folded(task.layers)} contains NaN or Inf, because activations overflow during calibration. Use another dtype "
            "or other data. Load the model again before the next attempt, because earlier blocks are already quantized",
            tensor=f"{next(iter(task.layers))}.input",
        )
    ratio = noise / max(nearest_noise, torch.finfo(torch.float32).tiny)
    found: dict[str, Any] = {"held_out_error": ratio}
    if is_worse(errors, nearest):
        RoundToNearest().round(task)
        noise, found[REASON] = nearest_noise, f"{ratio:.3g} times the error on held-out tokens"
    else:
        for name, (weight, qparams, codes) in rounded.items():
            task.layers[name].weight = weight
            if qparams is not None:
                quantizers[name].set_qparams(qparams, codes=codes)
    return found | {"output_snr_db": decibels(sum(energy), noise), "nearest_snr_db": decibels(sum(energy), nearest_noise)}


def _compared_rows(granularity: Granularity, weight: Tensor) -> slice | None:
    """Return the rows of a weight ``[N, K]`` whose outputs are compared, or None if all rows are compared.

    All rows are compared if N ≤ K. This is so for most layers that write to the residual stream. A few
    channels of this stream outweigh all others, so no channel may be left out.
    """
    return sample_of_rows(granularity, tuple(weight.shape), weight.shape[1] ** 2 // 2) if weight.shape[0] > weight.shape[1] else None


def _restore(task: RoundingTask, weights: Mapping[str, nn.Parameter]) -> None:
    """Set the weights of a task's layers to the float weights in ``weights``."""
    for name, layer in task.layers.items():
        layer.weight = weights[name]
