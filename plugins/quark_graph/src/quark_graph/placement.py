"""Functions that decide which tensors of a graph are fake-quantized, and which tensors share a quantizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import fx

from quark.config.layer import QLayerConfig, Slot, TensorSpec
from quark.numbers import TensorQuantizer, quantizer_for
from quark_graph.operators import Operator

__all__ = ["Point", "place"]


@attrs.define(eq=False)
class Point:
    """A place in a graph where a tensor is fake-quantized.

    Attributes:
        tensor: The node of the tensor.
        spec: The quantization of the tensor.
        quantizer: The quantizer of the tensor.
        operator: Name of the first operator that needs the quantized tensor.
        slot: The slot of the tensor: an input or an output of that operator. An output is quantized for all
            readers.
        readers: The nodes that get the quantized tensor. If it is empty, all readers of the tensor get the
            quantized tensor.
        group: The points that share the quantizer, including this point. All these points refer to the same
            list.
    """

    tensor: fx.Node
    spec: TensorSpec
    quantizer: TensorQuantizer
    operator: str
    slot: Slot
    readers: list[fx.Node] = attrs.field(factory=list)
    group: list[Point] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.group = [self]


def place(operators: Sequence[Operator], configs: Mapping[str, QLayerConfig | None]) -> list[Point]:
    """Return the points of a graph, in the order of its nodes.

    The inputs of an operator are quantized with its input spec, and the outputs with its output spec. These
    rules apply:

    * A tensor between two operators is quantized once if both have the same spec. Otherwise it is quantized
      first as an output for all readers, then as an input of the operators with another spec.
    * Nothing is quantized between an operator and the ReLU that continues it (`GraphOpRecord.continues`);
      the output spec of the operator applies to the ReLU's output.
    * Inputs and outputs of an operator that moves values (`GraphOpRecord.moves_values`) share a quantizer.
      They can share a quantizer only if it has one static scale. Otherwise, the operator gets no quantizers.

    Args:
        operators: Operators of the graph, in the order of the graph.
        configs: A dictionary from the name of an operator's node to the configuration of the operator, or to
            None if the operator is not quantized.
    """
    quantized = [(operator, config) for operator in operators if (config := configs[operator.node.name]) is not None]
    points = _Points()
    continued = _continued([operator for operator, _ in quantized])
    inherited: dict[fx.Node, TensorSpec] = {}
    for operator, config in quantized:
        spec = config.output_tensors or inherited.get(operator.node)
        for tensor in operator.outputs:
            if (reader := continued.get(tensor)) is not None:
                if spec is not None:
                    inherited[reader] = spec
            elif spec is not None and _asks(operator, spec):
                points.of_output(tensor, spec, operator)
    for operator, config in quantized:
        spec = config.input_tensors
        if spec is not None and _asks(operator, spec):
            for tensor in operator.inputs:
                if continued.get(tensor) is not operator.node:
                    points.of_input(tensor, spec, operator)
    for operator, config in quantized:
        if operator.record.moves_values:
            points.share(operator, config.input_tensors)
    order = {node: place for place, node in enumerate(quantized[0][0].node.graph.nodes)} if quantized else {}
    return sorted(points, key=lambda point: order[point.tensor])


def _asks(operator: Operator, spec: TensorSpec) -> bool:
    return not operator.record.moves_values or _is_shareable(spec)


def _is_shareable(spec: TensorSpec) -> bool:
    """Return whether tensors with this spec can share a quantizer. They can if the quantizer has one static
    scale.
    """
    quantizer: TensorQuantizer = quantizer_for(spec, activation=True)
    return quantizer.has_tensor_scale and not quantizer.is_dynamic and not quantizer.is_float


def _continued(operators: Sequence[Operator]) -> dict[fx.Node, fx.Node]:
    """Return a dictionary from the output of an operator to the node that continues the operator, such as a
    ReLU.

    It has only tensors with a single reader.
    """
    continuing = {operator.node for operator in operators if operator.record.continues}
    return {
        tensor: reader
        for operator in operators
        if not operator.record.moves_values
        for tensor in operator.outputs
        if len(tensor.users) == 1 and (reader := next(iter(tensor.users))) in continuing
    }


class _Points:
    """The points of a graph that have been added so far."""

    def __init__(self) -> None:
        self._outputs: dict[fx.Node, Point] = {}
        self._inputs: dict[fx.Node, list[Point]] = {}

    def __iter__(self) -> Iterator[Point]:
        """Yield all points. The points of outputs come first, because points of inputs may quantize the same
        tensors again.
        """
        yield from self._outputs.values()
        for points in self._inputs.values():
            yield from points

    def of_output(self, tensor: fx.Node, spec: TensorSpec, operator: Operator) -> None:
        quantizer = operator.quantizer(Slot.output_tensors, spec)
        self._outputs[tensor] = Point(tensor, spec, quantizer, operator.name, Slot.output_tensors)

    def of_input(self, tensor: fx.Node, spec: TensorSpec, operator: Operator) -> None:
        quantizer = operator.quantizer(Slot.input_tensors, spec)
        point = self._point(tensor, quantizer)
        if point is None:
            point = Point(tensor, spec, quantizer, operator.name, Slot.input_tensors)
            self._inputs.setdefault(tensor, []).append(point)
        if point.slot is Slot.input_tensors:
            point.readers.append(operator.node)

    def share(self, operator: Operator, spec: TensorSpec | None) -> None:
        """Make the points at the inputs and outputs of an operator share one quantizer.

        This applies only to points that quantize with ``spec``, and only if ``spec`` has one static scale.
        """
        if spec is None or not _is_shareable(spec):
            return
        quantizer = operator.quantizer(Slot.input_tensors, spec)
        shared = [p for tensor in (*operator.inputs, *operator.outputs) if (p := self._point(tensor, quantizer)) is not None]
        for point in shared[1:]:
            if point.group is not shared[0].group:
                shared[0].group.extend(point.group)
                for each in point.group:
                    each.group = shared[0].group

    def _point(self, tensor: fx.Node, quantizer: TensorQuantizer) -> Point | None:
        """Return the point that quantizes ``tensor`` with a quantizer that is equivalent to ``quantizer``.

        Return None if there is no such point.
        """
        points = [*([self._outputs[tensor]] if tensor in self._outputs else []), *self._inputs.get(tensor, ())]
        return next((point for point in points if _is_same(point.quantizer, quantizer)), None)


def _is_same(one: TensorQuantizer, other: TensorQuantizer) -> bool:
    """Return whether two quantizers are equivalent.

    Quantizers of the same layer type with equal specs are the same object. Other quantizers with equal specs
    are equivalent if both have a single scale for the whole tensor, because their axes then do not matter.
    """
    return one is other or (one.spec == other.spec and one.has_tensor_scale and other.has_tensor_scale)
