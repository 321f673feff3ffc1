"""Functions that make a subject of each kind work once and return the results. The laws compare these
results.

The data are float32, whatever the default dtype is. Each function imports the checks of its kind, so that
other kinds are not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quark.errors import QuarkError
from quark_devkit.check import NotApplicableError
from quark_devkit.subject import Subject

if TYPE_CHECKING:
    from quark_devkit.checks.layout.exports import FirstExport

__all__ = ["KNOWN_WORKS", "PREPARATIONS", "WORKS", "Work", "wide_data"]

Work = Callable[[Subject], Mapping[str, Any]]
"""Lets a subject work once, and returns tensors or other values by name."""
_SHAPES = ((64, 64), (1, 1000), (1, 4097), (2, 14336), (3, 1))
"""Shapes of tensors: a square, one row of a length without a small divisor, wide rows, and one column."""


def wide_data(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return normally distributed float32 values. They are the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def of_format(subject: Subject) -> dict[str, Any]:
    """Return values, codes, scales and packed codes of tensors of several shapes, for up to four specs."""
    from quark_devkit.checks.format.cases import cases, numbers

    results: dict[str, Any] = {}
    for case in cases(subject)[:4]:
        t = numbers(case)
        results[f"numbers ({case})"] = case.format.round_(t.roll(t.numel() // 3))  # rolled, so that the last number is not the largest
        for shape in _SHAPES if not case.is_scale else ():
            if case.quantizer.shape_error(shape) is None:
                values, qparams = case.quantizer.round_to_nearest(wide_data(shape))
                codes = case.quantizer.codes_of(values, qparams)
                packed = case.quantizer.pack(codes, qparams)
                parts = {"values": values, **{f"stored {name}": tensor for name, tensor in packed.items()}}
                parts["decoded"] = case.quantizer.dequantize(codes, qparams)
                results.update({f"{name} of {list(shape)} ({case})": tensor for name, tensor in parts.items()})
    return results


def prepare_format(subject: Subject) -> None:
    """Use quantizers of the format in the way in which a model on the meta device uses them."""
    from quark_devkit.checks.format.cases import cases

    with suppress(NotApplicableError):
        for case in cases(subject)[:4]:
            number_format = case.quantizer.stored_level.format  # without a table, since there is no weight to learn one from
            qparams = case.quantizer.empty_qparams((64, 64), "meta")
            codes = torch.empty(64, 64, dtype=number_format.storage_dtype, device="meta")
            case.quantizer.pack(codes, qparams)
            number_format.max_magnitude(case.spec)


def of_observer(subject: Subject) -> dict[str, Any]:
    """Return the range of one tensor, and the range of three tensors, for each granularity."""
    from quark_devkit.checks.observer import examples_of, range_of
    from quark_devkit.example_specs import SHAPE

    results: dict[str, Any] = {}
    for example in examples_of(subject):
        parts = [wide_data(SHAPE, seed) * (1 + seed) for seed in range(3)]
        for count in (1, 3):
            with suppress(QuarkError):  # it may accept only one tensor
                ends = range_of(example, *parts[:count])
                results.update({f"{name} of {count} ({example})": end for name, end in zip(("low", "high"), ends, strict=True)})
    return results


def of_scheme(subject: Subject) -> dict[str, Any]:
    """Return the configuration in its JSON form, and a rounded weight."""
    from quark.config.layer import QLayerConfig
    from quark.numbers import quantizer_for

    built: QLayerConfig = subject.load("config")()
    results: dict[str, Any] = {"configuration": str(built.to_dict())}
    if built.weight is not None:
        quantizer, shape = quantizer_for(built.weight, activation=False), (256, 512)
        if quantizer.shape_error(shape) is None:
            results["values of a weight"] = quantizer.fake_quantize(wide_data(shape))
    return results


def of_rounding(subject: Subject) -> dict[str, Any]:
    """Return rounded weights of layers, for up to two schemes. The rounding can validate on held-out
    tokens."""
    from quark_devkit.checks.rounding.tasks import cases, layers_of, rounded
    from quark_devkit.statistic_laws import inputs

    results: dict[str, Any] = {}
    for case in cases(subject)[:2]:
        layers = layers_of(case.config)
        rounded(case.rounding(), layers, held_out=inputs(1, 32))
        for name, layer in layers.items():
            results[f"weight of {name} ({case})"] = layer.weight.detach()  # type: ignore[operator]
    return results


def of_transform(subject: Subject) -> dict[str, Any]:
    """Return the parameters of the small model after the transform and without rounding."""
    from quark_devkit.algorithm_runs import schemes_for, valid_settings
    from quark_devkit.transformed_models import transformed

    result = transformed(schemes_for(subject)[0], valid_settings(subject))
    return {name: parameter.detach() for name, parameter in result.model.named_parameters()}


def of_block_tuning(subject: Subject) -> dict[str, Any]:
    """Return the parameters of the small model after the tuning."""
    from quark_devkit.algorithm_runs import valid_settings
    from quark_devkit.small_models import batches, coarse_scheme, quantized, run_config

    model = quantized(run_config(coarse_scheme(), valid_settings(subject)), data=batches(2, 16))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def of_branch(subject: Subject) -> dict[str, Any]:
    """Return the weights and the branches of the small model."""
    from quark_devkit.algorithm_runs import run_with
    from quark_devkit.small_models import quantized

    return {name: tensor.detach() for name, tensor in quantized(run_with(subject)).state_dict().items()}


def of_layout(subject: Subject) -> dict[str, Any]:
    """Return the files of an export of the small model, and the logits of the reloaded model."""
    from quark_devkit.checks.layout.exports import new_export

    return _of_export(subject, new_export(subject))


def known_of_layout(subject: Subject) -> dict[str, Any]:
    """Return the results of `of_layout` for the export that checks of this process share."""
    from quark_devkit.checks.layout.exports import first_export

    return _of_export(subject, first_export(subject))


def _of_export(subject: Subject, export: FirstExport) -> dict[str, Any]:
    from quark.checkpoint.reader import import_model_from_safetensors
    from quark_devkit.checks.layout.exports import written
    from quark_devkit.small_models import logits
    from quark_devkit.whole_runs import contents

    with written(export) as out:
        results: dict[str, Any] = dict(contents(out))
        if subject.record.reader is not None:
            results["logits"] = logits(import_model_from_safetensors(None, out, device="cpu"))
    return results


def of_selector(subject: Subject) -> dict[str, Any]:
    """Return the selector's choice for each group of layers."""
    from quark_devkit.checks.selector import asked

    return dict(asked(subject)[1].choices)


def of_layer_type(subject: Subject) -> dict[str, Any]:
    """Return the output of a layer that quantizes its output to 8 bits."""
    from quark.config.layer import QLayerConfig
    from quark_devkit.checks.layer_type import float_layer, input_of, output, quantized_layer
    from quark_devkit.example_specs import int8_spec

    layer = float_layer(subject)
    x = input_of(layer)
    return {"output": output(quantized_layer(subject, QLayerConfig(output_tensors=int8_spec(is_dynamic=True)), layer), x)}


def of_dataset(subject: Subject) -> dict[str, Any]:
    """Return the first samples of the source."""
    from quark_devkit.checks.dataset import files_of, read

    with files_of(subject) as files:
        return {f"sample {number}": str(sample) for number, sample in enumerate(islice(read(subject, *files), 16))}


def of_metric(subject: Subject) -> dict[str, Any]:
    """Return the metric's number for each token."""
    from quark_devkit.checks.metric import example, metric_of

    return {"numbers": metric_of(subject)(*example())}


def of_quant_mode(subject: Subject) -> dict[str, Any]:
    """Return the outputs of a model that the mode has quantized."""
    from quark_devkit.checks.quant_mode import outputs, quantized

    return {"outputs": outputs(quantized(subject))}


WORKS: dict[str, Work] = {
    "format": of_format,
    "observer": of_observer,
    "scheme": of_scheme,
    "rounding": of_rounding,
    "transform": of_transform,
    "block_tuning": of_block_tuning,
    "branch": of_branch,
    "layout": of_layout,
    "selector": of_selector,
    "layer_type": of_layer_type,
    "dataset": of_dataset,
    "metric": of_metric,
    "quant_mode": of_quant_mode,
}
"""The work of each kind of record. A template has none, since it only states facts. An operator of a graph
has none, since torch computes it."""
KNOWN_WORKS: dict[str, Work] = {"layout": known_of_layout}
"""Works that use results of other checks in the same process."""
PREPARATIONS: dict[str, Callable[[Subject], None]] = {"format": prepare_format}
"""Calls to a record that a program makes while it builds a model, before there are data."""
