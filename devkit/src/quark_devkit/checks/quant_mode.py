"""Checks of quantization modes: a plan changes nothing, and a quantized model is close to its float model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quark.config.enums import QuantizationMode
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.runs import ModelQuantizer
from quark_devkit.check import check, complaining, require
from quark_devkit.example_specs import int8_spec
from quark_devkit.subject import Subject

_QUANTIZED = 0.1
"""Relative error that is far too large for an output computed from 8-bit tensors."""
_ALONE = 1e-5
"""Difference between float32 products of one row alone and among others."""


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def _data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator) for _ in range(2)]


def _quantizer(subject: Subject, exclude: Sequence[str] = ()) -> ModelQuantizer:
    spec = int8_spec()
    everything = QLayerConfig(input_tensors=spec, weight=spec)
    mode = QuantizationMode(subject.lookup_name)
    return ModelQuantizer(QConfig(global_quant_config=everything, quant_mode=mode, exclude=list(exclude)))


def quantized(subject: Subject) -> Any:
    """Return a small model that the mode has quantized to 8 bits."""
    return _quantizer(subject).quantize_model(_model(), _data())


def outputs(model: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the outputs of a model for the data of these checks."""
    with torch.no_grad():
        return torch.cat([model(x) for x in _data()])


@check("quant_mode")
def plans_without_a_change(subject: Subject) -> None:
    """A plan does not change the model. A model of the wrong kind raises ConfigError."""
    model, before = _model(), _model().state_dict()
    try:
        plan = _quantizer(subject).plan(model)
    except ConfigError:
        plan = "refused"
    require(plan is not None, "returns no plan")
    after = model.state_dict()
    is_same = after.keys() == before.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    require(is_same, "changes the model that it plans")


@check("quant_mode")
def gives_a_quantized_model(subject: Subject) -> None:
    """The result is a module that has the configuration and the plan as attributes. The weights are
    rounded."""
    model = quantized(subject)
    require(isinstance(model, nn.Module), f"returns a {type(model).__name__}: return the quantized module")
    missing = [name for name in ("quant_config", "quark_plan", "quark_quantized") if not hasattr(model, name)]
    require(not missing, f"returns a model without {', '.join(missing)}")
    require(not torch.equal(outputs(model), outputs(_model())), "returns a model whose output equals the float model's")


@check("quant_mode")
def is_near_the_float_model(subject: Subject) -> None:
    """With 8 bits for weights and inputs, the output is finite and close to the output of the float model."""
    before, after = outputs(_model()), outputs(quantized(subject))
    error = ((after - before).norm() / before.norm()).item()
    require(error < _QUANTIZED, f"computes a wrong output with 8 bits: the relative error is {error:.2g}")


@check("quant_mode", since=2)
def leaves_what_it_is_given(subject: Subject) -> None:
    """The mode changes neither the configuration nor the calibration data, and returns a model in evaluation
    mode."""
    quantizer, data = _quantizer(subject), _data()
    before = quantizer.config.to_dict()
    model = quantizer.quantize_model(_model(), data)
    require(quantizer.config.to_dict() == before, "changes the configuration")
    same = len(data) == len(_data()) and all(map(torch.equal, data, _data()))
    require(same, "changes the calibration data")
    require(not model.training, "returns a model in training mode: put it into evaluation mode")


@check("quant_mode", since=2)
def keeps_excluded_layers_float(subject: Subject) -> None:
    """If the configuration excludes a layer, the layer keeps its weight and the others are rounded, unless
    the mode refuses the configuration."""
    quantizer = _quantizer(subject, exclude=["0"])
    try:
        model = quantizer.quantize_model(_model(), _data())
    except ConfigError:
        return
    kept = any(p.shape == (32, 16) and torch.equal(p, _model()[0].weight) for p in model.state_dict().values())  # type: ignore[index]
    require(kept, "rounds the weight of a layer that the configuration excludes: apply `exclude`, or raise ConfigError")
    require(not torch.equal(outputs(model), outputs(_model())), "leaves all layers float if the configuration excludes one")


@check("quant_mode", since=2)
def computes_for_any_batch(subject: Subject) -> None:
    """The mode can calibrate on one batch, and on one row. The quantized model returns the same output for a
    row whether the row is alone or in a batch, and the same output for an input at every call."""
    model, (x, other) = _quantizer(subject).quantize_model(_model(), _data()[:1]), _data()
    with torch.no_grad():
        before = model(x)
        model(100 * other)
        require(torch.equal(model(x), before), "returns a model whose output depends on its earlier calls")
        with complaining("returns a model that cannot compute for one row alone", Exception):
            alone = model(x[:1])
        require(torch.allclose(alone, before[:1], rtol=_ALONE, atol=_ALONE), "returns a model with another output for a row alone")
        with complaining("cannot calibrate on one row", Exception):
            _quantizer(subject).quantize_model(_model(), [x[:1]])(other[:1])


@check("quant_mode", since=2)
def is_copied(subject: Subject) -> None:
    """The quantized model can be copied deeply, with the same outputs."""
    model = quantized(subject)
    with complaining("returns a model that cannot be copied deeply", Exception):
        copied = copy.deepcopy(model)
    require(torch.equal(outputs(copied), outputs(model)), "returns a model whose deep copy has other outputs")


@check("quant_mode")
def repeats_itself(subject: Subject) -> None:
    """Two runs on the same model and data give the same outputs, bit for bit."""
    require(torch.equal(outputs(quantized(subject)), outputs(quantized(subject))), "returns a different model the second time")
