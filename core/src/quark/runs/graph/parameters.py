"""Weights and biases of a graph, rounded to nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor, fx

from quark.base.names import folded
from quark.calibration.finite import is_finite
from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.slot import PARAMETERS, Slot
from quark.errors import ConfigError, NonFiniteError
from quark.models.layers import RoundedParameter
from quark.numbers import TensorQuantizer
from quark.runs.graph.operators import Operator
from quark.runs.graph.tensors import add_module, free_path, set_parameter, value_of

__all__ = ["QuantizedParameter", "quantized_parameters", "refuse_unfit_parameters", "round_parameters"]


@attrs.frozen(eq=False)
class QuantizedParameter:
    """A parameter that is quantized, with all operators that read it by one spec.

    Attributes:
        node: The ``get_attr`` node.
        slot: Whether it is a weight or a bias.
        spec: Its quantization.
        quantizer: Its quantizer.
        operators: That read it.
    """

    node: fx.Node
    slot: Slot
    spec: TensorSpec
    quantizer: TensorQuantizer
    operators: list[Operator] = attrs.field(factory=list)

    @property
    def argument(self) -> str:
        """Name of the argument in the operators' schema."""
        record = self.operators[0].record
        name = record.weight if self.slot is Slot.weight else record.bias
        assert name is not None
        return name


def quantized_parameters(operators: Sequence[Operator], configs: Mapping[str, QLayerConfig | None]) -> list[QuantizedParameter]:
    """Return the weights and biases that are quantized.

    ``configs`` as of `quark.runs.graph.placement.place`.
    """
    parameters: dict[object, QuantizedParameter] = {}
    for operator in operators:
        config = configs[operator.node.name]
        for slot in PARAMETERS:
            node = operator.argument(operator.record.weight if slot is Slot.weight else operator.record.bias)
            spec: TensorSpec | None = None if config is None else getattr(config, slot)
            if spec is not None and isinstance(node, fx.Node) and node.op == "get_attr":
                quantizer = operator.quantizer(slot, spec)
                key = (node, slot, quantizer)
                parameters.setdefault(key, QuantizedParameter(node, slot, spec, quantizer)).operators.append(operator)
    return list(parameters.values())


def refuse_unfit_parameters(model: fx.GraphModule, parameters: Sequence[QuantizedParameter]) -> None:
    """Check the values of parameters that are to be quantized.

    Raises:
        ConfigError: Parameters are on the meta device, without values.
        NonFiniteError: Parameters hold NaN or Inf.
    """
    values: dict[str, Tensor] = {str(parameter.node.target): value_of(model, parameter.node) for parameter in parameters}
    if empty := [name for name, value in values.items() if value.is_meta]:
        raise ConfigError(
            f"{len(empty)} parameter(s) of this graph are on the meta device, without values: {folded(empty)}. Load them first"
        )
    if wrong := [name for name, value in values.items() if not is_finite(value.detach())]:
        raise NonFiniteError(
            f"NaN or Inf in {len(wrong)} parameter(s): {folded(wrong)}. Nothing has been changed. The checkpoint is damaged or comes from "
            "a diverged run; repair it, or exclude what reads them",
            tensor=wrong[0],
        )


def round_parameters(model: fx.GraphModule, parameters: Sequence[QuantizedParameter]) -> None:
    """Round parameters to nearest, each to a new one that its operators read through quantizers.

    The quantizer of ``stem.0.weight`` is ``stem.0.weight_quantizer``, a `RoundedParameter`.
    """
    for parameter in parameters:
        module = RoundedParameter(parameter.spec, activation=False, quantizer=parameter.quantizer)
        values, qparams = parameter.quantizer.round_to_nearest(value_of(model, parameter.node).detach())
        module.set_qparams(qparams)
        name, readers = parameter.operators[0].name, [operator.node for operator in parameter.operators]
        node = set_parameter(model, readers, parameter.node, parameter.argument, f"{name}.{parameter.argument}", values)
        path = free_path(model, f"{name}.{parameter.slot.quantizer_attribute}")
        add_module(model, path, module)
        with model.graph.inserting_before(min(readers)):
            call = model.graph.call_module(path, (node,))
        call.meta = {"val": node.meta["val"]}
        for reader in list(node.users):
            if reader is not call:
                reader.replace_input_with(node, call)
