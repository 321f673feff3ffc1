"""Round layers and validate the codes on held-out tokens.

A layer whose output error is larger than with round-to-nearest is rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import HeldOut, RoundingTask, RoundToNearest, float_weight, is_worse, weight_quantizer
from quark.base.from_device import numbers
from quark.calibration.figures import decibels
from quark.calibration.plugin_checks import CheckedRounding
from quark.errors import RoundingError

__all__ = ["REASON", "round_validated"]

REASON = "to_nearest_because"
"""The metric of a layer that was rounded to nearest instead: why."""


@torch.no_grad()
def round_validated(checked: CheckedRounding, tasks: Iterable[RoundingTask]) -> dict[str, dict[str, Any]]:
    """Round the layers of ``tasks``, and return their metrics, by layer.

    Where tokens are held out, ``held_out_error`` is the squared error of the layer's outputs on them ÷ that
    of round-to-nearest; ``output_snr_db`` and ``nearest_snr_db`` are the signal-to-noise ratios of these
    outputs with the final codes and with those of round-to-nearest. Layers that must share a scale are
    compared, and given up, together.

    Args:
        checked: The rounding; where it raises RoundingError, all layers are rounded to nearest.
        tasks: Their layers' weights are replaced, and their quantizers' scales set.

    Raises:
        PluginError: The rounding is a plugin's, and leaves a layer in a wrong state, or raised an exception.
    """
    metrics: dict[str, dict[str, Any]] = {}
    for task in tasks:
        weights = {name: cast("nn.Parameter", layer.weight) for name, layer in task.layers.items()}
        try:
            with checked.checks(task):
                report = checked.rounding.round(task)
        except RoundingError as error:
            _to_nearest(task, weights)
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
    """Keep the better of the layers' codes and round-to-nearest; return the metrics."""
    quantizers = {name: weight_quantizer(layer) for name, layer in task.layers.items()}
    rounded = {name: (layer.weight, quantizers[name].qparams, quantizers[name].codes) for name, layer in task.layers.items()}
    errors = _output_error(task, weights, held_out)
    _to_nearest(task, weights)
    nearest = _output_error(task, weights, held_out)
    of_layers = [held_out.output_energy(weights[name].data) for name in task.layers]
    least = nearest.sum().clamp(min=torch.finfo(torch.float32).tiny)
    ratio, noise, noise_of_nearest, *energies = numbers(errors.sum() / least, errors.sum(), nearest.sum(), *of_layers)
    signal = sum(energies)
    to_nearest = decibels(signal, noise_of_nearest)
    if is_worse(errors, nearest):
        reason = f"{ratio:.3g} times the error on held-out tokens"
        return {"held_out_error": ratio, "output_snr_db": to_nearest, "nearest_snr_db": to_nearest, REASON: reason}
    for name, (weight, qparams, codes) in rounded.items():
        task.layers[name].weight = weight
        if qparams is not None:
            quantizers[name].set_qparams(qparams, codes=codes)
    return {"held_out_error": ratio, "output_snr_db": decibels(signal, noise), "nearest_snr_db": to_nearest}


def _output_error(task: RoundingTask, weights: Mapping[str, nn.Parameter], held_out: HeldOut) -> Tensor:
    """Return the squared error of all layers together for each token, ``[n]``."""
    errors = [held_out.output_error(weights[name].data, float_weight(layer)) for name, layer in task.layers.items()]
    return torch.stack(errors).sum(0)


def _to_nearest(task: RoundingTask, weights: Mapping[str, nn.Parameter]) -> None:
    for name, layer in task.layers.items():
        layer.weight = weights[name]
    RoundToNearest().round(task)
