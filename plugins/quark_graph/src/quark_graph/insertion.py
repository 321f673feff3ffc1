"""Functions that insert quantizers into a graph.

Parameters are rounded to nearest. A quantizer is inserted between a parameter and the operators that read it.
Quantizers of activations observe values during calibration, and fake-quantize activations afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor, fx, nn

from quark.base.finite import is_finite
from quark.base.names import folded
from quark.calibration.batches import Call
from quark.config.layer import PARAMETERS, QLayerConfig, Slot, TensorSpec
from quark.errors import CalibrationError, ConfigError, NonFiniteError, QuarkError
from quark.models.layers import QuantizerModule, RoundedParameter
from quark.numbers import Observer, TensorQuantizer
from quark_graph.operators import Operator
from quark_graph.placement import Point
from quark_graph.tensors import free_path, set_parameter, value_of

__all__ = ["Observed", "insert", "observe", "quantized_parameters", "refuse_unfit_parameters", "round_parameters"]


class Observed(nn.Module):
    """A module that replaces a quantizer during calibration. It observes the tensor and returns it unchanged.

    Attributes:
        quantizer: The replaced quantizer.
        observer: The observer. All tensors that share the quantizer share this observer, too.
    """

    def __init__(self, quantizer: QuantizerModule, observer: Observer) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.observer = observer

    def forward(self, x: Tensor) -> Tensor:
        """Observe ``x``, and return it."""
        self.observer.observe(x.detach())
        return x


def insert(model: fx.GraphModule, points: Sequence[Point]) -> list[str]:
    """Insert the call of a quantizer at each point. Return the paths of the quantizers that need calibration.

    A quantizer is named after the first operator that needs it, for example ``"stem.0.output_quantizer"``.
    """
    paths: dict[int, str] = {}
    static = []
    quantized: dict[fx.Node, fx.Node] = {}
    for point in points:
        if (path := paths.get(id(point.group))) is None:
            path = paths[id(point.group)] = free_path(model, f"{point.operator}.{point.slot.quantizer_attribute}")
            quantizer = QuantizerModule(point.spec, activation=True, quantizer=point.quantizer)
            module: nn.Module = quantizer
            if quantizer.is_static:
                module = Observed(quantizer, quantizer.quantizer.observer())
                static.append(path)
            model.add_submodule(path, module)
        _call(model.graph, point, path, quantized)
    model.recompile()
    return static


def _call(graph: fx.Graph, point: Point, path: str, quantized: dict[fx.Node, fx.Node]) -> None:
    """Insert the call of one quantizer.

    ``quantized`` is a dictionary from an output to the node of the quantized output. It is updated. If
    ``point`` is for an input that is such an output, the call gets the quantized output.
    """
    tensor = quantized.get(point.tensor, point.tensor)
    readers = set(point.readers) or set(tensor.users)
    with graph.inserting_after(tensor):
        call = graph.call_module(path, (tensor,))
    call.meta = {"val": point.tensor.meta["val"]}
    tensor.replace_all_uses_with(call, delete_user_cb=lambda user: user in readers, propagate_meta=False)
    if point.slot is Slot.output_tensors:
        quantized[point.tensor] = call


def observe(model: fx.GraphModule, paths: Iterable[str], calls: Sequence[Call]) -> None:
    """Run the model on calibration data. Then replace each observer by a quantizer whose scale comes from the
    observed range.

    During calibration, parameters are quantized and activations are float. Calibration with quantized
    activations would be closer to the final model. But then quantizers would have to be calibrated one after
    another. No order is possible, because the inputs of a sum or concatenation share a scale with the result.

    Raises:
        CalibrationError: The graph cannot be called with a batch.
        NonFiniteError: An activation contains NaN or Inf.
    """
    with torch.no_grad():
        for number, call in enumerate(calls):
            try:
                call.run(model)
            except QuarkError:
                raise  # the message has the cause and the fix already
            except Exception as error:
                raise CalibrationError(
                    f"the graph cannot be called with calibration batch {number} ({type(error).__name__}: {error}). Give batches that "
                    f"have only its inputs ({_inputs(model)}) and the same sizes as in the capture, without padding and without a smaller "
                    f"last batch (drop_last=True); or capture the model with quark_graph.capture, which lets the batch size vary"
                ) from error
    for path in paths:
        observed = model.get_submodule(path)
        assert isinstance(observed, Observed)
        low, high = observed.observer.range()
        if not (is_finite(low) and is_finite(high)):
            raise NonFiniteError(
                f"a tensor of '{path}' contains NaN or Inf during calibration. The model overflows there, for example in float16, or its "
                f"weights or the data are bad. Check the dtype, the weights and the data. The model is unchanged",
                tensor=path,
            )
        observed.quantizer.set_qparams(observed.quantizer.quantizer.qparams_from(observed.observer))
        model.add_submodule(path, observed.quantizer)


def _inputs(model: fx.GraphModule) -> str:
    shapes = [f"{node.name} {_shape(node.meta.get('val'))}".strip() for node in model.graph.nodes if node.op == "placeholder"]
    return ", ".join(shapes) or "none"


def _shape(value: object) -> str:
    return f"[{', '.join(map(str, value.shape))}]" if isinstance(value, Tensor) else ""


@attrs.frozen(eq=False)
class QuantizedParameter:
    """A quantized parameter, and the operators that read it and quantize it with the same spec.

    Attributes:
        node: The ``get_attr`` node of the parameter.
        slot: The slot of the parameter: a weight or a bias.
        spec: The quantization of the parameter.
        quantizer: The quantizer of the parameter.
        operators: The operators that read the parameter.
    """

    node: fx.Node
    slot: Slot
    spec: TensorSpec
    quantizer: TensorQuantizer
    operators: list[Operator] = attrs.field(factory=list)

    @property
    def argument(self) -> str:
        """Name of the parameter in the schema of the operators."""
        record = self.operators[0].record
        name = record.weight if self.slot is Slot.weight else record.bias
        assert name is not None
        return name


def quantized_parameters(operators: Sequence[Operator], configs: Mapping[str, QLayerConfig | None]) -> list[QuantizedParameter]:
    """Return the weights and biases that ``configs`` quantizes.

    `quark_graph.placement.place` describes ``configs``.
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
    """Raise an error if parameters have no values, or if they have values that cannot be quantized.

    Raises:
        ConfigError: Parameters are on the meta device, so they have no values.
        NonFiniteError: Parameters contain NaN or Inf.
    """
    values: dict[str, Tensor] = {str(parameter.node.target): value_of(model, parameter.node) for parameter in parameters}
    if empty := [name for name, value in values.items() if value.is_meta]:
        raise ConfigError(
            f"{len(empty)} parameter(s) of this graph are on the meta device, without values: {folded(empty)}. Load them first"
        )
    if wrong := [name for name, value in values.items() if not is_finite(value.detach())]:
        raise NonFiniteError(
            f"NaN or Inf in {len(wrong)} parameter(s): {folded(wrong)}. The checkpoint is damaged or comes from a diverged run. Repair "
            f"it, or exclude the operators that read them",
            tensor=wrong[0],
        )


def round_parameters(model: fx.GraphModule, parameters: Sequence[QuantizedParameter]) -> None:
    """Round parameters to nearest, and insert a quantizer between each rounded parameter and the operators
    that read it.

    The quantizer of ``stem.0.weight`` is ``stem.0.weight_quantizer``, a `RoundedParameter`.
    """
    for parameter in parameters:
        module = RoundedParameter(parameter.spec, activation=False, quantizer=parameter.quantizer)
        values, qparams = parameter.quantizer.round_to_nearest(value_of(model, parameter.node).detach())
        module.set_qparams(qparams)
        name, readers = parameter.operators[0].name, [operator.node for operator in parameter.operators]
        node = set_parameter(model, readers, parameter.node, parameter.argument, f"{name}.{parameter.argument}", values)
        path = free_path(model, f"{name}.{parameter.slot.quantizer_attribute}")
        model.add_submodule(path, module)
        with model.graph.inserting_before(min(readers)):
            call = model.graph.call_module(path, (node,))
        call.meta = {"val": node.meta["val"]}
        for reader in list(node.users):
            if reader is not call:
                reader.replace_input_with(node, call)
