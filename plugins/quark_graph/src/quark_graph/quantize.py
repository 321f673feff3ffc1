"""Quantization in FX graph mode. The steps are normal form, plan, rounding of parameters, insertion of
quantizers, and calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx, nn

from quark.base.log import get_logger
from quark.calibration.batches import Call, calls
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.plan.quant_plan import has_static_scale
from quark_graph.graph_capture import capture, refuse_unfit_graph
from quark_graph.insertion import insert, observe, quantized_parameters, refuse_unfit_parameters, round_parameters
from quark_graph.normal_form import NormalForm, normal_form
from quark_graph.operators import operators_in
from quark_graph.placement import place
from quark_graph.plan import GraphPlan, make_graph_plan

__all__ = ["plan_graph", "quantize_graph"]

Data = Iterable[Any] | Callable[[str], Iterable[Any] | None] | None
_STATIC = "activations with static scales"


def plan_graph(model: nn.Module, config: QConfig) -> GraphPlan:
    """Return the `GraphPlan` of a model. The tensors of the model may be on the meta device.

    Args:
        model: A graph module of torch.export, such as the result of `quark_graph.capture`. It does not
            change.
        config: The configuration.

    Raises:
        ConfigError: The graph cannot be quantized, or the configuration does not fit it.
        UnsupportedError: This mode does not support a part of the graph or the configuration.
    """
    if not isinstance(model, fx.GraphModule):
        raise ConfigError(
            f"this {type(model).__name__} is not a graph. Capture it with quark_graph.capture(model, example_inputs), or with "
            "torch.export.export(model, example_inputs).module()"
        )
    return _planned(model, config)[1]


def quantize_graph(model: nn.Module, config: QConfig, data: Data = None) -> fx.GraphModule:
    """Quantize a graph, and return the quantized graph. If an error is raised, ``model`` is unchanged.

    Args:
        model: A graph module of torch.export, or another module in inference mode. A graph module is changed
            in place. New tensors replace its original tensors, which are not changed, because the captured
            model may share them. Any other module does not change. It is captured with the first batch of
            ``data``. If possible, the size of the batch axis may vary in the captured graph.
        config: The configuration.
        data: Batches as in `quark.calibration.batches.calls`, or a function that returns such batches. A
            batch must contain only arguments of the model. Batches are read only if a module must be captured
            or if static scales must be calibrated.

    Returns:
        A graph module with the attributes ``quant_config``, ``quark_plan`` (a `GraphPlan`) and
        ``quark_quantized``. Its submodules ``….input_quantizer``, ``….output_quantizer``,
        ``….weight_quantizer`` and ``….bias_quantizer`` have the scales.

    Raises:
        ConfigError: The graph cannot be quantized, or the configuration does not fit it.
        UnsupportedError: torch.export cannot capture the module, or this mode does not support the
            configuration.
        CalibrationError: Data are missing, or the graph cannot be called with the data.
        NonFiniteError: A parameter or an activation contains NaN or Inf.
    """
    batches = _Batches(data)
    given = model if isinstance(model, fx.GraphModule) else _captured(model, batches)
    form, plan = _planned(given, config)
    result = form.model
    operators = operators_in(result.graph)
    configs = {row.node: row.config for row in plan.rows}
    parameters = quantized_parameters(operators, configs)
    points = place(operators, configs)
    refuse_unfit_parameters(result, parameters)
    forwards = batches.read(_STATIC) if any(has_static_scale(point.spec) for point in points) else []
    for line in str(plan).splitlines():
        get_logger().info(line)
    round_parameters(result, parameters)
    observe(result, insert(result, points), forwards)
    _become(given, result, plan)
    return given


def _planned(model: fx.GraphModule, config: QConfig) -> tuple[NormalForm, GraphPlan]:
    refuse_unfit_graph(model)
    form = normal_form(model)
    return form, make_graph_plan(form, config.copied())


class _Batches:
    """Calibration data. They are read only once, when they are needed for the first time."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._calls: list[Call] | None = None

    def read(self, wanted_by: str) -> list[Call]:
        if self._calls is None:
            data = self._data(wanted_by) if callable(self._data) and not isinstance(self._data, Iterable) else self._data
            self._calls = calls(data, wanted_by)
        return self._calls


def _captured(model: nn.Module, batches: _Batches) -> fx.GraphModule:
    first = batches.read("the capture of the model as a graph (it is not a torch.fx.GraphModule)")[0]
    return capture(model, first.args, first.kwargs)


def _become(given: fx.GraphModule, result: fx.GraphModule, plan: GraphPlan) -> None:
    """Change ``given`` in place so that it becomes the graph ``result``, and set the public attributes of
    ``given``.
    """
    object.__setattr__(given, "__class__", type(result))
    given.__dict__.clear()
    given.__dict__.update(result.__dict__)
    given.graph = result.graph  # this makes ``given`` the owner of the graph
    given.quant_config, given.quark_plan, given.quark_quantized = plan.config, plan, True  # type: ignore[assignment]
