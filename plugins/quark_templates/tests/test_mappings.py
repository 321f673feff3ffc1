"""Mappings and input groups of an architecture, on a tiny model of every family, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark_algos.mappings.mapping import LayerMapping, mappings_of, of_experts, readers_of_attention_norm

from .whole_models import ALL, batch_for, blocks_of, distance, each_block, facts_of, heads_of, logits, named_by, weights_of, whole_model

TOLERANCE = 1e-9
"""Far above float64 rounding in two blocks, far below the effect of a scale."""


def scale_rows(module: nn.Module, rows: slice | Tensor, by: Tensor, offset: float = 0.0) -> None:
    """Multiply output channels of ``module``; ``offset`` is 1 for norms that multiply by ``1 + weight``."""
    with torch.no_grad():
        weight = weights_of(module)
        factor = by if weight.ndim == 1 else by[:, None]
        weight[rows] = (weight[rows] + offset) * factor - offset
        if getattr(module, "bias", None) is not None:
            module.bias[rows] *= by  # type: ignore[operator]


def value_rows(mapping: LayerMapping, outputs: int, columns: int, heads: int) -> tuple[Tensor, int]:
    """Return the indices of the rows that are values, and how many query heads read each of them.

    Values are of attention or of an MLP.
    """
    if mapping.kind == "mlp_value":
        return torch.arange(0 if mapping.rows == "all" else outputs - columns, outputs), 1
    if mapping.rows == "last_of_each_head":
        per_head, values = outputs // heads, columns // heads
        return torch.arange(outputs).view(heads, per_head)[:, per_head - values :].flatten(), 1
    values = outputs if mapping.rows == "all" else (outputs - columns) // 2  # before them: queries, as many as columns, and keys
    return torch.arange(outputs - values, outputs), columns // values


def pairs(mapping: LayerMapping, prev: list[str], layers: list[list[str]]) -> list[tuple[str, list[str]]]:
    """Return each scaled module with its balance layers: expert by expert where both names have a star."""
    if "*" not in mapping.smooth_layer:
        return [(prev[0], [name for found in layers for name in found])]
    return list(zip(prev, ([name] for found in layers for name in found), strict=True))


def move_scale(
    mapping: LayerMapping, block: nn.Module, prev: str, readers: list[str], facts: Architecture, heads: int, *, undo: bool
) -> None:
    """Divide the output of ``prev`` by a scale, or (``undo``) multiply the inputs of its readers by it."""
    source, targets = block.get_submodule(prev), [block.get_submodule(name) for name in readers]
    generator = torch.Generator().manual_seed(len(prev))
    if "norm" in mapping.kind:
        rows, repeats = torch.arange(weights_of(source).shape[0]), 1
    else:
        rows, repeats = value_rows(mapping, weights_of(source).shape[0], weights_of(targets[0]).shape[1], heads)
    scale = torch.rand(len(rows), generator=generator, dtype=torch.float64) * 1.5 + 0.5
    if not undo:
        unit = facts.norm_has_unit_offset and "norm" in mapping.kind
        scale_rows(source, rows, 1 / scale, 1.0 if unit else 0.0)
        return
    spread = scale.view(-1, weights_of(targets[0]).shape[1] // heads).repeat_interleave(repeats, 0).flatten() if repeats > 1 else scale
    with torch.no_grad():
        for target in targets:
            weights_of(target).mul_(spread)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model_type", ALL)
def test_moving_a_scale_in_every_mapping_keeps_the_logits(model_type: str) -> None:
    model, facts = whole_model(model_type), facts_of(model_type)
    batch, heads = batch_for(model_type, model), heads_of(model)
    expected = logits(model, batch)
    for mapping in mappings_of(facts):
        places = [
            (block, prev, readers)
            for block, (found, *layers) in each_block(model, facts, (mapping.smooth_layer, *mapping.balance_layers))
            for prev, readers in pairs(mapping, found, layers)
        ]
        assert places, f"{mapping} holds in no block"
        for block, prev, readers in places:
            move_scale(mapping, block, prev, readers, facts, heads, undo=False)
        assert distance(logits(model, batch), expected) > 1e-6, f"{mapping}: no layer reads it"
        for block, prev, readers in places:
            move_scale(mapping, block, prev, readers, facts, heads, undo=True)
        assert distance(logits(model, batch), expected) < TOLERANCE, mapping


@pytest.mark.parametrize("model_type", [one for one in ALL if facts_of(one).shared_experts])
def test_shared_experts_state_a_value_exactly_where_a_scale_passes_through_them(model_type: str) -> None:
    """A clamp or another function of the product would let none pass, and a large one shows it."""
    model, facts = whole_model(model_type), facts_of(model_type)
    batch, scale = batch_for(model_type, model), 2.0**20
    expected = logits(model, batch)
    for block in blocks_of(model, facts):
        for value, output in zip(*(named_by(block, name) for name in facts.shared_experts[-2:]), strict=True):
            of, to = block.get_submodule(value), block.get_submodule(output)
            rows = slice(-weights_of(to).shape[1], None)  # after those of the gate, where one matrix has both
            scale_rows(of, rows, torch.tensor(scale, dtype=torch.float64).expand(weights_of(to).shape[1]))
            with torch.no_grad():
                weights_of(to).div_(scale)
    passes = distance(logits(model, batch), expected) < TOLERANCE
    assert passes == (facts.shared_expert_value is not None)


@pytest.mark.parametrize("model_type", ALL)
def test_layers_of_an_input_group_receive_the_same_tensor(model_type: str) -> None:
    model, facts = whole_model(model_type), facts_of(model_type)
    groups = [*readers_of_attention_norm(facts), facts.mlp_inputs]
    watched: list[list[nn.Module]] = []
    for block in blocks_of(model, facts):
        watched += [[block.get_submodule(n) for n in names] for names in groups if names and all(named_by(block, n) for n in names)]
        for_each = [named_by(block, name) for name in of_experts(facts, facts.expert_inputs)]
        watched += [[block.get_submodule(n) for n in names] for names in zip(*for_each, strict=True)]
    received: dict[nn.Module, Tensor] = {}
    for module in (module for group in watched for module in group):
        module.register_forward_pre_hook(lambda m, args: received.__setitem__(m, args[0]))
    logits(model, batch_for(model_type, model))
    ran = [group for group in watched if any(module in received for module in group)]
    assert len(ran) >= 2 * len(blocks_of(model, facts))
    assert all(received[module] is received[group[0]] for group in ran for module in group)
