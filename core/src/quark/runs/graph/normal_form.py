"""The normal form of a graph: no operator in place, weights as parameters, batch norms folded."""

from __future__ import annotations

import operator
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from quark.base.names import folded
from quark.errors import UnsupportedError
from quark.runs.graph.batch_norm import fold_batch_norms
from quark.runs.graph.operators import operators_in, schema_name
from quark.runs.graph.tensors import set_parameter, value_of

__all__ = ["NormalForm", "normal_form"]

_DROPOUTS = ("aten::dropout", "aten::dropout_", "aten::feature_dropout", "aten::alpha_dropout")


@attrs.frozen(eq=False)
class NormalForm:
    """A graph in the form in which it is quantized.

    Attributes:
        model: A graph module of its own, with the tensors of the given one.
        folded: How many batch norms were folded.
    """

    model: fx.GraphModule
    folded: int


def normal_form(model: fx.GraphModule) -> NormalForm:
    """Return a graph that computes the same as ``model``, which is not changed.

    Raises:
        UnsupportedError: An operator writes to a part of a tensor.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(model.graph, val_map={}))
    graph.set_codegen(model.graph._codegen)
    copy = fx.GraphModule(model, graph, type(model).__name__)
    copy.training = False
    _replace_writing(copy.graph)
    _remove_dropouts(copy.graph)
    _evaluate_weights(copy)
    count = fold_batch_norms(copy)
    # Nodes that nothing reads go, except inputs and checks of them.
    copy.graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())
    copy.recompile()
    copy.delete_all_unused_submodules()
    return NormalForm(copy, count)


def _replace_writing(graph: fx.Graph) -> None:
    """Replace in-place operators, such as ``aten::add_``, by those that return a new tensor."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    wrong = []
    for node in list(graph.nodes):
        target: Any = node.target
        if schema_name(node) is None or not target._schema.is_mutable:
            continue
        written, functional = node.args[0], _functional(target)
        readers = {user for alias in _aliases(written) for user in alias.users}
        if functional is None or written.op == "get_attr" or any(order.get(user, len(order)) > order[node] for user in readers):
            wrong.append(node.name)
            continue
        with graph.inserting_before(node):
            new = graph.create_node("call_function", functional, node.args, node.kwargs, name=functional.overloadpacket.__name__)
        new.meta, order[new] = dict(node.meta), order[node]
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    if wrong:
        raise UnsupportedError(
            f"{len(wrong)} operator(s) of this graph write to a buffer, or to a tensor that is read again ({folded(wrong)}): capture the "
            "model with torch.export.export(model, example_inputs).run_decompositions({}).module(), or write it without such as add_"
        )


def _aliases(node: fx.Node) -> set[fx.Node]:
    """Return the nodes whose tensors share storage with the tensor of ``node``, itself included."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    aliases, open_nodes = {node}, [node]
    while open_nodes:
        views = [user for user in open_nodes.pop().users if _is_view(user) and user not in aliases]
        aliases.update(views)
        open_nodes += views
    return aliases


def _is_view(node: fx.Node) -> bool:
    """Return whether a node gives a view of its argument, or takes one out of several."""
    target: Any = node.target
    if target is operator.getitem:
        return True
    return schema_name(node) is not None and not target._schema.is_mutable and any(r.alias_info is not None for r in target._schema.returns)


def _functional(target: Any) -> Any:
    """Return the operator of the same overload that gives a new tensor; None where there is none."""
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, target._overloadname, None)


def _remove_dropouts(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if schema_name(node) in _DROPOUTS:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _evaluate_weights(model: fx.GraphModule) -> None:
    """Make parameters of weights and biases that are computed from parameters alone."""
    for layer in operators_in(model.graph):
        for name in (layer.record.weight, layer.record.bias):
            node = layer.argument(name)
            if isinstance(node, fx.Node) and node.op == "call_function" and (value := _constant(model, node)) is not None:
                assert name is not None
                set_parameter(model, [layer.node], None, name, f"{layer.name}.{name}", value)


def _constant(model: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """Return the value of a node that depends on parameters alone; None where it depends on inputs."""
    if node.op == "get_attr":
        return value_of(model, node)
    if node.op != "call_function":
        return None
    values = {argument: _constant(model, argument) for argument in node.all_input_nodes}
    if not values or any(value is None for value in values.values()):
        return None
    target: Any = node.target
    with torch.no_grad():
        result: Tensor = target(*fx.map_arg(node.args, values.__getitem__), **fx.map_arg(node.kwargs, values.__getitem__))
    return result
