"""Functions that find the modules of a mapping in one decoder block. If the mapping does not apply to the
block, they return the reason.

`Channels` maps the output channels of a smooth layer to the input channels of its balance layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import attrs
import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.models.layers.layer_types import is_transposed
from quark.models.layers.quantized_layers import linear_weight
from quark_algos.mappings.mapping import LayerMapping

__all__ = ["Channels", "ResolvedMapping", "input_axis", "resolve", "submodule"]


@attrs.frozen
class Channels:
    """Maps the C output channels of a smooth layer to the K input channels of its balance layers.

    Usually, K = C. The values of grouped-query attention are an exception: several query heads use each
    key-value head, so K = C · repeats.

    Attributes:
        count: C, the number of output channels of the smooth layer.
        repeats: Number of query heads per key-value head. It is 1 for all other mappings.
        size: Number of channels of one head. It is used only if ``repeats`` is not 1.
    """

    count: int
    repeats: int = 1
    size: int = 1

    @property
    def columns(self) -> int:
        """K, the number of input channels of the balance layers."""
        return self.count * self.repeats

    def expand_scale(self, s: Tensor) -> Tensor:
        """Expand values per output channel, ``[…, C]``, to values per input channel of the balance layers,
        ``[…, K]``.

        With grouped-query attention, the values of each key-value head are repeated.
        """
        if self.repeats == 1:
            return s
        return s.unflatten(-1, (-1, self.size)).repeat_interleave(self.repeats, -2).flatten(-2)

    def reduced(self, x: Tensor, by: Literal["mean", "max"]) -> Tensor:
        """Reduce values per input channel of the balance layers, ``[…, K]``, to values per output channel of
        the smooth layer, ``[…, C]``.

        If several query heads use a key-value head, the result is the mean or the maximum over these query
        heads.
        """
        if self.repeats == 1:
            return x
        heads = x.unflatten(-1, (-1, self.repeats, self.size))
        return (heads.mean(-2) if by == "mean" else heads.amax(-2)).flatten(-2)


@attrs.frozen(eq=False)
class ResolvedMapping:
    """The modules of a mapping in one block. For a mapping between layers of experts, there is one object per
    expert.

    Attributes:
        name: Name of the smooth layer, relative to the block. If the name in the mapping has a star, the
            number of the expert replaces the star.
        smooth_layer: The module whose output channels are divided.
        balance_layers: The modules whose input channels are multiplied, as a dictionary from name relative to
            the block to module. No module occurs twice.
        channels: Maps the channels of the smooth layer to the channels of the balance layers.
        rows: Indices of the output rows of the smooth layer that are divided, ``[C]``, int64. It is None if
            all rows are divided, in their order.
        unit_offset: Whether the smooth layer is a norm that multiplies by ``1 + weight``.
    """

    name: str
    smooth_layer: nn.Module
    balance_layers: Mapping[str, nn.Module]
    channels: Channels
    rows: Tensor | None = None
    unit_offset: bool = False


def resolve(mapping: LayerMapping, block: nn.Module, facts: Architecture, heads: int) -> tuple[ResolvedMapping, ...] | str:
    """Return the modules of a mapping in one decoder block, or a reason why the mapping does not apply.

    Args:
        mapping: A mapping that `quark_algos.mappings.mapping.mappings_of` has returned, or a user mapping.
        block: The decoder block.
        facts: Architecture of the model. It states whether the norms have a unit offset.
        heads: Number of query heads of the attention.

    Returns:
        A tuple of `ResolvedMapping` objects. It has one object per expert if the name of the smooth layer has
            a star, and a single object if it has no star. If the mapping does not apply to this block, the
            result is a text that states the reason: a module is missing, experts are fused, the norm has no
            weight, or shapes do not fit.
    """
    matches = {name: _matches(name, block) for name in (mapping.smooth_layer, *mapping.balance_layers)}
    missing = [name for name, modules in matches.items() if not modules]
    if missing:
        fused = any("*" in name for name in missing) and mapping.smooth_layer not in missing
        return f"the block has no {', '.join(missing)}" + (" (its experts are fused, or it is of another kind)" if fused else "")
    is_of_experts = "*" in mapping.smooth_layer
    every = {name: module for layer in mapping.balance_layers for name, module in matches[layer].items()}
    balance_layers_of = list(_by_expert(mapping, matches)) if is_of_experts else [every]
    mappings = []
    for (name, smooth_layer), balance_layers in zip(matches[mapping.smooth_layer].items(), balance_layers_of, strict=True):
        if is_of_experts and len(balance_layers) != len(mapping.balance_layers):
            return f"not every expert with {mapping.smooth_layer} has {', '.join(mapping.balance_layers)}"
        resolved = _resolve_one(mapping, name, smooth_layer, balance_layers, facts, heads)
        if isinstance(resolved, str):
            return resolved
        mappings.append(resolved)
    return tuple(mappings)


def submodule(block: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule ``name`` of a block, or None if the block does not have it or the name is
    empty.
    """
    try:
        return block.get_submodule(name) if name else None
    except AttributeError:
        return None


def _matches(name: str, block: nn.Module) -> dict[str, nn.Module]:
    """Return all modules that match ``name``, as a dictionary from name in the block to module.

    A star matches every expert. The experts are in the order of their numbers.
    """
    if "*" not in name:
        module = submodule(block, name)
        return {} if module is None else {name: module}
    before, after = name.split(".*.")
    holder = _matches(before, block)
    numbers = [n for n, _ in holder[before].named_children() if re.fullmatch(r"\d+", n)] if holder else []
    return {n: m for number in numbers for n, m in _matches(f"{before}.{number}.{after}", block).items()}


def _by_expert(mapping: LayerMapping, matches: Mapping[str, Mapping[str, nn.Module]]) -> Iterator[dict[str, nn.Module]]:
    """Yield the balance layers of each expert, as a dictionary from name to module.

    ``matches`` is a dictionary from a name in the mapping to all modules that match the name.
    """
    before, after = mapping.smooth_layer.split("*")
    for name in matches[mapping.smooth_layer]:
        number = name[len(before) : -len(after)]
        own = [layer.replace("*", number) for layer in mapping.balance_layers]
        yield {n: matches[layer][n] for n, layer in zip(own, mapping.balance_layers, strict=True) if n in matches[layer]}


def _resolve_one(
    mapping: LayerMapping, name: str, smooth_layer: nn.Module, balance_layers: Mapping[str, nn.Module], facts: Architecture, heads: int
) -> ResolvedMapping | str:
    """Return the `ResolvedMapping` of one smooth layer, or the reason why the smooth layer and the balance
    layers do not fit together.
    """
    no_matrix = [n for n, module in balance_layers.items() if _ndim(module) != 2]
    if no_matrix:
        return f"{', '.join(no_matrix)}: the layer has no single weight matrix, so its input cannot be scaled"
    widths = {n: linear_weight(module).shape[1] for n, module in balance_layers.items()}
    if len(set(widths.values())) != 1:
        return "the balance layers have different numbers of input channels: " + ", ".join(f"{n} {k}" for n, k in widths.items())
    columns = next(iter(widths.values()))
    if mapping.kind == "by_module":
        mapping = attrs.evolve(mapping, kind="value" if _ndim(smooth_layer) == 2 else "norm")
    is_norm = "norm" in mapping.kind
    layout = _of_norm(smooth_layer, columns) if is_norm else _of_projection(mapping, smooth_layer, columns, heads)
    if isinstance(layout, str):
        return f"{name}: {layout}"
    channels, rows = layout
    # If a module has several names, its last name is used.
    distinct = {module: n for n, module in balance_layers.items()}
    by_name = {n: module for module, n in distinct.items()}
    return ResolvedMapping(name, smooth_layer, by_name, channels, rows, facts.norm_has_unit_offset and is_norm)


def _of_norm(norm: nn.Module, columns: int) -> tuple[Channels, None] | str:
    """Return the channels of a norm and None for its rows. If no scale can be folded into the norm, return
    the reason.
    """
    if _ndim(norm) != 1:
        return "the norm has no weight, so no scale can be folded into it"
    others = [n for n, _ in norm.named_parameters() if n not in ("weight", "bias")]
    if others:
        return f"the norm has parameters besides weight and bias: {', '.join(others)}"
    size = norm.get_parameter("weight").shape[0]
    return (Channels(columns), None) if size == columns else f"the norm has {size} channels, but its balance layers have {columns}"


def _of_projection(mapping: LayerMapping, projection: nn.Module, columns: int, heads: int) -> tuple[Channels, Tensor | None] | str:
    """Return the channels and the divided rows of a projection. If no scale can be folded into the
    projection, return the reason.
    """
    if _ndim(projection) != 2:
        return "this layer has no single weight matrix, so its outputs cannot be scaled"
    outputs = linear_weight(projection).shape[0]
    if mapping.kind == "mlp_value" or mapping.rows == "last_of_each_head":
        count = columns
    else:  # a fused matrix has `columns` rows for queries, and then as many rows for keys as for values
        count = outputs if mapping.rows == "all" else (outputs - columns) // 2
    fits = 0 < count <= outputs and columns % count == 0 and (mapping.rows != "all" or count == outputs)
    if not fits:
        return f"the {outputs} outputs of this layer do not match the {columns} input channels of its balance layers"
    by_head = count != columns or mapping.rows == "last_of_each_head"
    if by_head and (columns % heads or count % (columns // heads) or outputs % (heads if count == columns else 1)):
        return f"the {outputs} outputs of this layer and the {columns} input channels of its balance layers do not fit {heads} heads"
    channels = Channels(count, columns // count, columns // heads if count != columns else 1)
    every = torch.arange(outputs)
    if mapping.rows == "all":
        return channels, None
    if mapping.rows == "last":
        return channels, every[outputs - count :]
    each = outputs // heads
    return channels, every.view(heads, each)[:, each - columns // heads :].flatten()


def _ndim(module: nn.Module) -> int | None:
    """Return the number of axes of a module's weight, or None if the module has no weight parameter."""
    weight = getattr(module, "weight", None)
    return weight.ndim if isinstance(weight, nn.Parameter) else None


def input_axis(module: nn.Module) -> int:
    """Return the index of the axis of ``module.weight`` that has the input channels."""
    return 0 if is_transposed(module) else 1
