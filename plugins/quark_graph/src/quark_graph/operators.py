"""Operators in a graph. An operator is a node together with the record that describes it. It gives access to
the arguments and the tensors of the node.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from quark.config.layer import Slot, TensorSpec
from quark.errors import ConfigError
from quark.models.layers.layer_types import LayerShape
from quark.numbers import TensorQuantizer, output_first_shape, quantizer_for
from quark.plugins import GraphOpRecord, LayerTypeRecord, Registry, graph_ops, layer_types

__all__ = ["Operator", "arguments", "is_float", "module_of", "operators_in", "schema_name", "shape_of", "tensors_in"]


@attrs.frozen(eq=False)
class Operator:
    """An operator of a graph that a record describes.

    Attributes:
        name: Name of the module, such as ``"stem.0"``. If the module has several operators, the name of the
            node follows, as in ``"head.matmul"``.
        node: The node of the graph.
        record: The record that describes the operator.
        names: All names that patterns can match. These are ``name``, the name of the node, and also the name
            of the module if the module consists of this operator.
    """

    name: str
    node: fx.Node
    record: GraphOpRecord
    names: tuple[str, ...]

    @property
    def layer_type(self) -> LayerTypeRecord | None:
        """The layer type that computes the same outputs as the operator. It is None if the operator is only a
        function.
        """
        return None if self.record.layer_type is None else layer_types().get(self.record.layer_type)

    @property
    def is_lookup(self) -> bool:
        """Whether the operator reads indices instead of a float activation, like an embedding."""
        return self.layer_type is not None and self.layer_type.lookup

    def quantizer(self, slot: Slot, spec: TensorSpec) -> TensorQuantizer:
        """Return the quantizer for the tensors of a slot of this operator.

        The layer type of the operator defines the quantizer, so that channels and groups are on the same axes
        as in eager mode.
        """
        if self.record.layer_type is None:
            return quantizer_for(spec, activation=slot.is_activation)
        return layer_types().load_quantized(self.record.layer_type).quantizer_of(slot, spec, self._layer_shape())

    def _layer_shape(self) -> LayerShape:
        layer_type, groups = self.layer_type, self.argument("groups") or 1
        assert layer_type is not None
        stored = shape_of(self.argument(self.record.weight))
        weight = output_first_shape(stored, groups) if layer_type.transposed else stored
        return LayerShape(weight, groups, layer_type.transposed, layer_type.lookup)

    def argument(self, name: str | None) -> Any:
        """Return the value of the argument ``name`` of the operator's schema.

        Return None if the operator has no such argument, or the graph leaves the argument out.
        """
        return None if name is None else arguments(self.node).get(name)

    def tensors(self, slot: Slot) -> list[fx.Node]:
        """Return the nodes of the tensors of a slot."""
        if slot.is_activation:
            return self.inputs if slot is Slot.input_tensors else self.outputs
        value = self.argument(self.record.weight if slot is Slot.weight else self.record.bias)
        return [value] if isinstance(value, fx.Node) else []

    @property
    def inputs(self) -> list[fx.Node]:
        """The float activations that the operator reads. Each activation occurs once.

        They include weights and biases that are computed from inputs.
        """
        values = arguments(self.node)
        of_parameters = (self.record.weight, self.record.bias)
        computed = [node for name in of_parameters for node in tensors_in(self.argument(name)) if node.op != "get_attr"]
        names = self.record.inputs or [name for name in values if name not in of_parameters]
        nodes = [node for name in names for node in tensors_in(values.get(name))] + computed
        return [node for node in dict.fromkeys(nodes) if is_float(node)]

    @property
    def outputs(self) -> list[fx.Node]:
        """The float tensors that the operator returns and other nodes read.

        If the operator returns several tensors, these are the nodes that unpack its results.
        """
        nodes = (
            [self.node] if isinstance(self.node.meta.get("val"), Tensor) else [n for n in self.node.users if n.target is operator.getitem]
        )
        return [node for node in nodes if is_float(node) and node.users]


def operators_in(graph: fx.Graph) -> list[Operator]:
    """Return the operators of a graph that have a record, in the order of the graph.

    Raises:
        ConfigError: Two records describe the same operator.
    """
    registry = graph_ops()
    records = _by_operator(registry, registry.revision)
    names: set[str] = set()
    operators = []
    for node in graph.nodes:
        record = records.get(schema_name(node))
        if record is not None:
            operators.append(_operator(node, record, names))
            names.add(operators[-1].name)
    return operators


def _operator(node: fx.Node, record: GraphOpRecord, taken: set[str]) -> Operator:
    path, kind = module_of(node)
    inside = f"{path}.{node.name}" if path else node.name
    is_module = bool(path) and kind in record.modules
    name = path if is_module and path not in taken else inside
    return Operator(name, node, record, tuple(dict.fromkeys([name, *([path] if is_module else []), node.name])))


@lru_cache(maxsize=2)
def _by_operator(registry: Registry[GraphOpRecord], revision: tuple[int, int]) -> dict[str | None, GraphOpRecord]:
    """Return a dictionary from the name of an operator to its record.

    The dictionary is cached until the registry changes.
    """
    owners: dict[str | None, str] = {}
    for name in registry.names():
        for target in registry.get(name).operators:
            if (other := owners.setdefault(target, name)) != name:
                raise ConfigError(
                    f"two records describe the operator {target}: '{other}' of {registry.source(other)} and '{name}' of "
                    f"{registry.source(name)}. Leave out one plugin with QUARK_DISABLED_PLUGINS, or give one record the name of the other "
                    'and set replaces="..."'
                )
    return {target: registry.get(name) for target, name in owners.items()}


def schema_name(node: fx.Node) -> str | None:
    """Return the full name of a node's operator, such as ``"aten::add"``.

    Return None if the node does not call a torch operator.
    """
    target = node.target
    return str(target._schema.name) if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) else None


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return a dictionary from the name of an argument in the operator's schema to its value in the node."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def module_of(node: fx.Node) -> tuple[str, str]:
    """Return the full name and the class name of the innermost module whose forward pass called an operator.

    If the forward pass of the model itself called the operator, both names are empty.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    # The second call of a module has the name "head@1". The class is given as its full name or as the class.
    return str(path).partition("@")[0], (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]


def tensors_in(value: Any) -> Iterator[fx.Node]:
    """Yield the nodes in an argument, which may be a list."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def is_float(node: fx.Node) -> bool:
    """Return whether a node returns one floating-point tensor."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor.

    For variable sizes, the sizes of the captured example are returned.
    """
    return tuple(_size(size) for size in node.meta["val"].shape)


def _size(size: Any) -> int:
    hint = getattr(getattr(size, "node", None), "hint", None)
    return size if isinstance(size, int) else int(hint or 1)
