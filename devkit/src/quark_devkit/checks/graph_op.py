"""Checks of operators of FX graph mode: they exist and behave as their records say."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from quark.config.enums import QuantizationMode
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers import QuantizerModule
from quark.runs import ModelQuantizer
from quark_devkit.check import assume, check, require
from quark_devkit.example_specs import int8_spec
from quark_devkit.option_effects import digest
from quark_devkit.subject import Subject

if TYPE_CHECKING:
    from quark_graph.operators import Operator

_QUANTIZED = 0.1
"""Relative error that is far too large for an output computed from 8-bit tensors."""


def _example(subject: Subject) -> tuple[Any, tuple[Any, ...]]:
    record = subject.record
    assume(find_spec("quark_graph") is not None, "quark-graph, which has FX graph mode, is not installed")
    assume(record.example is not None, "the record names no example")
    return subject.load("example")(record.name)


def _schemas(subject: Subject) -> dict[str, list[Any]]:
    """Return the schemas of each operator: one schema for each overload that returns a new tensor."""
    if subject.record.example is not None:
        _example(subject)  # the example's module may define the operator
    schemas = {}
    for full_name in subject.record.operators:
        namespace, _, name = full_name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        overloads = [] if packet is None else [getattr(packet, overload)._schema for overload in packet.overloads()]
        schemas[full_name] = [schema for schema in overloads if not schema.is_mutable]
    return schemas


def _captured(subject: Subject) -> tuple[fx.GraphModule, Operator, tuple[Any, ...]]:
    module, args = _example(subject)
    from quark_graph import capture
    from quark_graph.normal_form import normal_form
    from quark_graph.operators import operators_in

    graph = normal_form(capture(module, args)).model
    operators = [operator for operator in operators_in(graph.graph) if operator.record.name == subject.record.name]
    require(operators, f"is not in the graph of its example. The graph has {', '.join(str(n.target) for n in graph.graph.nodes)}")
    return graph, operators[0], args


class _Recording(fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


@check("graph_op")
def names_operators_of_torch(subject: Subject) -> None:
    """Every operator of the record exists under the name of torch's schema and returns a new tensor."""
    missing = [name for name, schemas in _schemas(subject).items() if not schemas]
    require(not missing, f"names {', '.join(missing)}, which torch does not have, or which only write to their arguments")


@check("graph_op")
def names_arguments_of_its_operators(subject: Subject) -> None:
    """Every operator has the arguments that the record names as inputs, weight and bias."""
    record = subject.record
    names = [*record.inputs, *filter(None, [record.weight, record.bias])]
    for operator, schemas in _schemas(subject).items():
        of_operator = {argument.name for schema in schemas for argument in schema.arguments}
        wrong = [name for name in names if name not in of_operator]
        require(not wrong, f"names {', '.join(wrong)}, but the arguments of {operator} are {', '.join(sorted(of_operator))}")


@check("graph_op")
def names_a_layer_type(subject: Subject) -> None:
    """The layer type is registered and has a quantized class."""
    name = subject.record.layer_type
    assume(name is not None, "it has no weight")
    known = subject.catalog.layer_types
    require(name in known and known.get(name).quantized is not None, f"names the layer type '{name}', which is unknown or never quantized")


@check("graph_op")
def is_in_its_example(subject: Subject) -> None:
    """The graph of the example contains the operator, which reads floating-point tensors or indices."""
    _, operator, _ = _captured(subject)
    require(operator.inputs or operator.is_lookup, "reads no floating-point tensor in its example")
    require(operator.outputs, "returns no floating-point tensor in its example")


@check("graph_op", since=2)
def has_the_same_example_each_time(subject: Subject) -> None:
    """The example has the same arguments and the same output each time."""
    one, other = ([*args, module(*args)] for module, args in (_example(subject), _example(subject)))
    require(digest(*one) == digest(*other), "has another example the second time: draw its numbers from a generator with a seed")


@check("graph_op")
def moves_values_if_it_says_so(subject: Subject) -> None:
    """If the record says that the operator moves values, each output value is an input value or 0."""
    assume(subject.record.moves_values, "it computes new values")
    graph, operator, args = _captured(subject)
    run = _Recording(graph)
    with torch.no_grad():
        run.run(*args)
    inputs = torch.cat([run.values[node].flatten() for node in operator.inputs] + [torch.zeros(1)])
    outputs: Tensor = torch.cat([run.values[node].flatten() for node in operator.outputs])
    require(bool(torch.isin(outputs, inputs).all()), "returns values that its inputs do not have: leave moves_values out")


@check("graph_op")
def is_quantized(subject: Subject) -> None:
    """With 8 bits for all tensors, the example's output is close to its float output, and each quantizer has
    a scale.
    """
    spec = int8_spec()
    layer = QLayerConfig(input_tensors=spec, output_tensors=spec, weight=spec)
    mode = QuantizationMode.fx_graph_mode
    config = QConfig(global_quant_config=QLayerConfig(), layer_type_quant_config={subject.record.name: layer}, quant_mode=mode)
    module, args = _example(subject)
    with torch.no_grad():
        before = module(*args)
    from quark_graph import capture

    graph = ModelQuantizer(config).quantize_model(capture(module, args), [args])
    quantizers = [module for module in graph.modules() if isinstance(module, QuantizerModule)]
    require(quantizers and all(quantizer.scale is not None for quantizer in quantizers), "gets no quantizer, or one without a scale")
    error = ((graph(*args) - before).norm() / before.norm().clamp(min=1e-6)).item()
    require(error < _QUANTIZED, f"computes a wrong result with 8 bits: the relative error is {error:.2g}")
