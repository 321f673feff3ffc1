"""Batch norms behind convolutions and linear layers, folded into their weights."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from quark.graph.operators import Operator, arguments, operators_in, schema_name, shape_of
from quark.graph.tensors import set_parameter, value_of

__all__ = ["fold_batch_norms", "folded_parameters"]

_PARAMETERS = ("weight", "bias", "running_mean", "running_var")


def fold_batch_norms(model: fx.GraphModule) -> int:
    """Fold every batch norm that alone reads the output of an operator with a weight, and return how many.

    With the statistics ``μ, σ²`` and the parameters ``γ, β`` of the norm, ``W' = W · γ / √(σ² + ε)`` along the output channels and
    ``b' = (b − μ) · γ / √(σ² + ε) + β``, computed in float64: the same function but for rounding. The tensors are replaced, not changed.
    """
    count = 0
    for layer in operators_in(model.graph):
        norm = next(iter(layer.node.users), None)
        if norm is not None and _is_foldable(layer, norm):
            _fold(model, layer, norm)
            count += 1
    return count


def _is_foldable(layer: Operator, norm: fx.Node) -> bool:
    weight, bias = layer.argument(layer.record.weight), layer.argument(layer.record.bias)
    if layer.record.weight is None or layer.record.bias is None or schema_name(norm) != "aten::batch_norm" or len(layer.node.users) != 1:
        return False
    values = arguments(norm)
    tensors = [weight, *([] if bias is None else [bias]), *(values[name] for name in _PARAMETERS if values.get(name) is not None)]
    # A norm has its channels at axis 1, a linear layer at the last.
    is_same_axis = layer.record.name != "linear" or len(shape_of(norm)) == 2
    has_statistics = values.get("running_mean") is not None and values.get("running_var") is not None
    return is_same_axis and has_statistics and all(isinstance(node, fx.Node) and node.op == "get_attr" for node in tensors)


def _fold(model: fx.GraphModule, layer: Operator, norm: fx.Node) -> None:
    values = arguments(norm)
    gamma, beta, mean, variance = (None if (node := values.get(name)) is None else value_of(model, node) for name in _PARAMETERS)
    assert mean is not None and variance is not None
    weight_node, bias_node = layer.argument(layer.record.weight), layer.argument(layer.record.bias)
    weight, bias = folded_parameters(
        value_of(model, weight_node),
        None if bias_node is None else value_of(model, bias_node),
        (gamma, beta, mean, variance),
        eps=values["eps"],
        axis=layer.record.output_axis,
        groups=arguments(layer.node).get("groups", 1),
    )
    assert layer.record.weight is not None and layer.record.bias is not None
    set_parameter(model, [layer.node], weight_node, layer.record.weight, f"{layer.name}.weight", weight)
    set_parameter(model, [layer.node], bias_node, layer.record.bias, f"{layer.name}.bias", bias)
    norm.replace_all_uses_with(layer.node)
    model.graph.erase_node(norm)


def folded_parameters(
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
    *,
    eps: float,
    axis: int = 0,
    groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the layer that computes what a layer and the batch norm behind it compute.

    Args:
        weight: ``[out, in, …]``, with the output channels at ``axis``.
        bias: ``[out]``, or None.
        norm: ``γ`` and ``β``, each ``[out]`` or None, mean and variance, each ``[out]``.
        eps: What the norm adds to the variance.
        axis: Of the output channels; at axis 1, as transposed convolutions have it, those of one group: ``[in, out / groups, …]``.
        groups: Of a convolution.
    """
    gamma, beta, mean, variance = (None if t is None else t.detach().double() for t in norm)
    assert mean is not None and variance is not None
    factor = torch.rsqrt(variance + eps) * (1.0 if gamma is None else gamma)
    shift = (0.0 if bias is None else bias.detach().double()) - mean
    new_bias = shift * factor + (0.0 if beta is None else beta)
    rows = weight.detach().double()
    if axis == 0:
        rows = rows * factor.reshape(-1, *[1] * (rows.ndim - 1))
    else:
        by_group = rows.reshape(groups, rows.shape[0] // groups, *rows.shape[1:])
        rows = (by_group * factor.reshape(groups, 1, -1, *[1] * (rows.ndim - 2))).reshape(rows.shape)
    return rows.to(weight.dtype), new_bias.to(weight.dtype)
