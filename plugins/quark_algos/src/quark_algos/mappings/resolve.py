"""From the names of a site to the modules of one decoder block, or the reason why it does not hold there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.modules.layers import is_transposed, linear_weight
from quark_algos.mappings.channels import Channels
from quark_algos.mappings.mapping import LayerMapping

__all__ = ["ResolvedMapping", "input_axis", "resolve", "submodule"]


@attrs.frozen(eq=False)
class ResolvedMapping:
    """A site in one block. Where ``prev`` has a star there is one for each expert.

    Attributes:
        site: What it was found for.
        name: Of ``prev``, relative to the block, with the number of the expert.
        prev: What is divided.
        readers: What is multiplied, by name relative to the block; the same module never twice.
        channels: How what is divided corresponds to the readers' columns.
        rows: Indices ``[C]``, int64, of the rows of ``prev`` that are divided; None for all, in their order.
        unit_offset: ``prev`` is a norm that multiplies by ``1 + weight``.
    """

    site: LayerMapping
    name: str
    prev: nn.Module
    readers: Mapping[str, nn.Module]
    channels: Channels
    rows: Tensor | None = None
    unit_offset: bool = False


def resolve(site: LayerMapping, block: nn.Module, facts: Architecture, heads: int) -> tuple[ResolvedMapping, ...] | str:
    """The modules of a site in one decoder block.

    Args:
        site: One of `quark_algos.mappings.mapping.mappings_of`.
        block: The decoder block.
        facts: About its family; whether its norms have a unit offset.
        heads: Of queries in its attention.

    Returns:
        One for each expert where ``prev`` has a star, else one; or the reason why the site does not hold in this block: something is not
        there, experts are fused, the norm has no weight, or shapes do not fit.
    """
    found = {name: _matches(name, block) for name in (site.prev, *site.layers)}
    missing = [name for name, modules in found.items() if not modules]
    if missing:
        fused = any("*" in name for name in missing) and site.prev not in missing
        return f"the block has no {', '.join(missing)}" + (" (its experts are fused, or it is of another kind)" if fused else "")
    if "*" not in site.prev:
        readers = {name: module for layer in site.layers for name, module in found[layer].items()}
        one = _one(site, site.prev, found[site.prev][site.prev], readers, facts, heads)
        return one if isinstance(one, str) else (one,)
    made = []
    for (name, prev), readers in zip(found[site.prev].items(), _by_expert(site, found), strict=True):
        if len(readers) != len(site.layers):
            return f"not every expert with {site.prev} has {', '.join(site.layers)}"
        expert = _one(site, name, prev, readers, facts, heads)
        if isinstance(expert, str):
            return expert
        made.append(expert)
    return tuple(made)


def submodule(block: nn.Module, name: str) -> nn.Module | None:
    """The submodule of that name; None where there is none, or the name is empty."""
    try:
        return block.get_submodule(name) if name else None
    except AttributeError:
        return None


def _matches(name: str, block: nn.Module) -> dict[str, nn.Module]:
    """Modules that a name means, by their names in the block; the experts of a star in the order of their numbers."""
    if "*" not in name:
        module = submodule(block, name)
        return {} if module is None else {name: module}
    before, after = name.split(".*.")
    holder = _matches(before, block)
    numbers = [n for n, _ in holder[before].named_children() if re.fullmatch(r"\d+", n)] if holder else []
    return {n: m for number in numbers for n, m in _matches(f"{before}.{number}.{after}", block).items()}


def _by_expert(site: LayerMapping, found: Mapping[str, Mapping[str, nn.Module]]) -> Iterator[dict[str, nn.Module]]:
    """The readers of each expert that ``prev`` stands for."""
    before, after = site.prev.split("*")
    for name in found[site.prev]:
        number = name[len(before) : -len(after)]
        own = [layer.replace("*", number) for layer in site.layers]
        yield {n: found[layer][n] for n, layer in zip(own, site.layers, strict=True) if n in found[layer]}


def _one(
    site: LayerMapping, name: str, prev: nn.Module, readers: Mapping[str, nn.Module], facts: Architecture, heads: int
) -> ResolvedMapping | str:
    no_matrix = [n for n, module in readers.items() if _ndim(module) != 2]
    if no_matrix:
        return f"{', '.join(no_matrix)}: no layer with one matrix, so its input cannot be multiplied"
    widths = {n: linear_weight(module).shape[1] for n, module in readers.items()}
    if len(set(widths.values())) != 1:
        return "the readers differ in their number of input channels: " + ", ".join(f"{n} {k}" for n, k in widths.items())
    columns = next(iter(widths.values()))
    if site.kind == "by_module":
        site = attrs.evolve(site, kind="value" if _ndim(prev) == 2 else "norm")
    found = _of_norm(prev, columns) if "norm" in site.kind else _of_projection(site, prev, columns, heads)
    if isinstance(found, str):
        return f"{name}: {found}"
    channels, rows = found
    unit = facts.norm_has_unit_offset and "norm" in site.kind
    kept = {n: m for m, n in {m: n for n, m in readers.items()}.items()}  # by one of its names, where a module has several
    return ResolvedMapping(site, name, prev, kept, channels, rows, unit)


def _of_norm(prev: nn.Module, columns: int) -> tuple[Channels, None] | str:
    if _ndim(prev) != 1:
        return "the norm has no weight, so no scale can be folded into it"
    others = [n for n, _ in prev.named_parameters() if n not in ("weight", "bias")]
    if others:
        return f"beside weight and bias the norm has {', '.join(others)}"
    size = prev.get_parameter("weight").shape[0]
    return (Channels(columns), None) if size == columns else f"it has {size} channels, what reads it has {columns}"


def _of_projection(site: LayerMapping, prev: nn.Module, columns: int, heads: int) -> tuple[Channels, Tensor | None] | str:
    if _ndim(prev) != 2:
        return "no layer with one matrix, so its outputs cannot be divided"
    outputs = linear_weight(prev).shape[0]
    if site.kind == "mlp_value" or site.rows == "last_of_each_head":
        held = columns
    else:  # in a fused matrix, before the values: queries, as many as columns, and as many keys as values
        held = outputs if site.rows == "all" else (outputs - columns) // 2
    fits = 0 < held <= outputs and columns % held == 0 and (site.rows != "all" or held == outputs)
    if not fits:
        return f"its {outputs} outputs do not go into {columns} input channels"
    by_head = held != columns or site.rows == "last_of_each_head"
    if by_head and (columns % heads or held % (columns // heads) or outputs % (heads if held == columns else 1)):
        return f"its {outputs} outputs and {columns} input channels do not fit {heads} heads"
    channels = Channels(held, columns // held, columns // heads if held != columns else 1)
    every = torch.arange(outputs)
    if site.rows == "all":
        return channels, None
    if site.rows == "last":
        return channels, every[outputs - held :]
    each = outputs // heads
    return channels, every.view(heads, each)[:, each - columns // heads :].flatten()


def _ndim(module: nn.Module) -> int | None:
    """Of its weight; None where there is none."""
    weight = getattr(module, "weight", None)
    return weight.ndim if isinstance(weight, nn.Parameter) else None


def input_axis(module: nn.Module) -> int:
    """The axis of ``module.weight`` along which its input channels lie."""
    return 0 if is_transposed(module) else 1
