"""The normal form of a graph. It has no in-place operators, all weights are parameters, and batch norms are
folded.
"""

from __future__ import annotations

import operator
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from quark.base.names import folded
from quark.errors import UnsupportedError
from quark_graph.operators import Operator, arguments, operators_in, schema_name, shape_of
from quark_graph.tensors import set_parameter, value_of

__all__ = ["BatchNorm", "NormalForm", "fold_batch_norms", "folded_parameters", "normal_form"]

_DROPOUTS = ("aten::dropout", "aten::dropout_", "aten::feature_dropout", "aten::alpha_dropout")


@attrs.frozen(eq=False)
class NormalForm:
    """A graph in normal form, which is ready for quantization.

    Attributes:
        model: A new graph module that shares the tensors of the original graph.
        folded: Number of folded batch norms.
    """

    model: fx.GraphModule
    folded: int


def normal_form(model: fx.GraphModule) -> NormalForm:
    """Return a graph in normal form that computes the same outputs as ``model``. ``model`` does not change.

    Raises:
        UnsupportedError: An operator writes to a buffer, or to a tensor that is read again.
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
    # Remove nodes that nothing reads, except inputs and the checks of inputs.
    copy.graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())
    copy.recompile()
    copy.delete_all_unused_submodules()
    return NormalForm(copy, count)


def _replace_writing(graph: fx.Graph) -> None:
    """Replace in-place operators, such as ``aten::add_``, by operators that return a new tensor."""
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
            f"{len(wrong)} operator(s) of this graph write to a buffer, or to a tensor that is read again ({folded(wrong)}). Capture the "
            "model with torch.export.export(model, example_inputs).run_decompositions({}).module(), or rewrite it without in-place "
            "operators such as add_"
        )


def _aliases(node: fx.Node) -> set[fx.Node]:
    """Return the nodes whose tensors share storage with the tensor of ``node``, including ``node``."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    aliases, open_nodes = {node}, [node]
    while open_nodes:
        views = [user for user in open_nodes.pop().users if _is_view(user) and user not in aliases]
        aliases.update(views)
        open_nodes += views
    return aliases


def _is_view(node: fx.Node) -> bool:
    """Return whether the result of a node may share storage with an argument of the node.

    This is so for views, and for operators that return one of several arguments.
    """
    target: Any = node.target
    if target is operator.getitem:
        return True
    return schema_name(node) is not None and not target._schema.is_mutable and any(r.alias_info is not None for r in target._schema.returns)


def _functional(target: Any) -> Any:
    """Return the operator that computes the same values as the in-place operator ``target`` but returns a new
    tensor.

    Return None if there is no such operator with the same overload.
    """
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, target._overloadname, None)


def _remove_dropouts(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if schema_name(node) in _DROPOUTS:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _evaluate_weights(model: fx.GraphModule) -> None:
    """Compute the weights and biases that depend only on parameters, and replace them by new parameters."""
    for layer in operators_in(model.graph):
        for name in (layer.record.weight, layer.record.bias):
            node = layer.argument(name)
            if isinstance(node, fx.Node) and node.op == "call_function" and (value := _constant(model, node)) is not None:
                assert name is not None
                set_parameter(model, [layer.node], None, name, f"{layer.name}.{name}", value)


def _constant(model: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """Return the value of a node if it depends only on parameters, or None if it depends on inputs."""
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


def fold_batch_norms(model: fx.GraphModule) -> int:
    """Fold batch norms into the operators in front of them, and return the number of folded batch norms.

    A batch norm is folded if it is the only reader of an operator that has a weight.

    The norm has the statistics ``μ, σ²`` and the parameters ``γ, β``. The new weight is ``W' = W · γ / √(σ² +
    ε)`` along the output channels, and the new bias is ``b' = (b − μ) · γ / √(σ² + ε) + β``. Both are
    computed in float64, so the graph computes the same function except for rounding errors. New tensors
    replace the old tensors, which are not changed.
    """
    count = 0
    for layer in operators_in(model.graph):
        norm = next(iter(layer.node.users), None)
        if norm is not None and _is_foldable(layer, norm):
            _fold(model, layer, norm)
            count += 1
    return count


def _is_foldable(layer: Operator, norm: fx.Node) -> bool:
    if layer.record.bias is None or norm.target is not torch.ops.aten.batch_norm.default or len(layer.node.users) != 1:
        return False
    values = arguments(norm)
    names = [values.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    tensors = [layer.argument(layer.record.weight), layer.argument(layer.record.bias), *names]
    # A norm has its channels on axis 1, but a linear layer has them on the last axis.
    is_same_axis = len(shape_of(tensors[0])) > 2 or len(shape_of(norm)) == 2
    has_statistics = names[2] is not None and names[3] is not None
    return is_same_axis and has_statistics and all(node is None or node.op == "get_attr" for node in tensors)


def _fold(model: fx.GraphModule, layer: Operator, norm: fx.Node) -> None:
    values = arguments(norm)
    weight_node, bias_node = layer.argument(layer.record.weight), layer.argument(layer.record.bias)
    weight, bias = folded_parameters(
        value_of(model, weight_node),
        _value(model, bias_node),
        BatchNorm(
            mean=value_of(model, values["running_mean"]),
            variance=value_of(model, values["running_var"]),
            weight=_value(model, values.get("weight")),
            bias=_value(model, values.get("bias")),
            eps=values["eps"],
        ),
        is_transposed=layer.layer_type is not None and layer.layer_type.transposed,
        groups=arguments(layer.node).get("groups", 1),
    )
    set_parameter(model, [layer.node], weight_node, str(layer.record.weight), f"{layer.name}.weight", weight)
    set_parameter(model, [layer.node], bias_node, str(layer.record.bias), f"{layer.name}.bias", bias)
    norm.replace_all_uses_with(layer.node)
    model.graph.erase_node(norm)


def _value(model: fx.GraphModule, node: fx.Node | None) -> Tensor | None:
    return None if node is None else value_of(model, node)


@attrs.frozen(eq=False)
class BatchNorm:
    """A batch norm in inference.

    Attributes:
        mean: The mean of each channel, ``[channels]``. The other tensors have the same shape.
        variance: The variance of each channel.
        weight: The factor of each channel. None means that all factors are 1.
        bias: The bias of each channel. None means that all biases are 0.
        eps: Number that is added to the variance.
    """

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def folded_parameters(
    weight: Tensor, bias: Tensor | None, norm: BatchNorm, *, is_transposed: bool = False, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the weight and bias with which a layer alone computes the same outputs as the layer and a batch
    norm after it.

    Args:
        weight: Weight of the layer, ``[out, in / groups, …]``.
        bias: Bias of the layer, ``[out]``, or None.
        norm: Batch norm with ``out`` channels.
        is_transposed: Whether the layer is a transposed convolution. Then the shape of the weight is ``[in,
            out / groups, …]``.
        groups: Number of groups of a convolution.
    """
    factor = torch.rsqrt(norm.variance.detach().double() + norm.eps)
    if norm.weight is not None:
        factor = factor * norm.weight.detach()
    new_bias = ((0.0 if bias is None else bias.detach().double()) - norm.mean.detach()) * factor
    if norm.bias is not None:
        new_bias = new_bias + norm.bias.detach()
    values = weight.detach().double()
    if is_transposed:
        by_group = values.unflatten(0, (groups, -1))
        values = (by_group * factor.reshape(groups, 1, -1, *[1] * (values.ndim - 2))).flatten(0, 1)
    else:
        values = values * factor.reshape(-1, *[1] * (values.ndim - 1))
    return values.to(weight.dtype), new_bias.to(weight.dtype)
