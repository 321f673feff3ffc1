"""Batch norms behind convolutions and linear layers, folded into their weights."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor, fx

from quark.runs.graph.operators import Operator, arguments, operators_in, shape_of
from quark.runs.graph.tensors import set_parameter, value_of

__all__ = ["BatchNorm", "fold_batch_norms", "folded_parameters"]


def fold_batch_norms(model: fx.GraphModule) -> int:
    """Fold every batch norm that alone reads the output of an operator with a weight, and return how many.

    With the statistics ``μ, σ²`` and the parameters ``γ, β`` of the norm, ``W' = W · γ / √(σ² + ε)`` along
    the output channels and ``b' = (b − μ) · γ / √(σ² + ε) + β``, computed in float64: the same function but
    for rounding. The tensors are replaced, not changed.
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
    # A norm has its channels at axis 1, a linear layer at the last.
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
    """A batch norm as it works in inference.

    Attributes:
        mean: ``[channels]``, as all its tensors.
        variance: Not negative.
        weight: None for 1.
        bias: None for 0.
        eps: Added to the variance.
    """

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def folded_parameters(
    weight: Tensor, bias: Tensor | None, norm: BatchNorm, *, is_transposed: bool = False, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a layer that computes the same as a layer with the batch norm behind it.

    Args:
        weight: ``[out, in / groups, …]``.
        bias: ``[out]``, or None.
        norm: With ``out`` channels.
        is_transposed: Whether the weight is ``[in, out / groups, …]``.
        groups: Of a convolution.
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
