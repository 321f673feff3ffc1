"""Folding a scale changes weights and keeps the block's output.

A mapping with which the output changes is detected.
"""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.config.architecture import Architecture
from quark_algos.mappings.fold import SavedParameters, allowed, fold, holds, probe
from quark_algos.mappings.mapping import LayerMapping, mappings_of
from quark_algos.mappings.resolve import Channels, ResolvedMapping, resolve

from .blocks import HEADS, block_of, facts_of, model_of, runner

FAMILIES = ["bloom", "gemma", "gpt2", "gpt_neox", "llama", "mixtral", "opt", "phi", "phi3"]
PLAIN = Architecture(model_type="plain")
NORM = LayerMapping("norm", "norm", ("reader",))


def resolved(mapping: LayerMapping, block: nn.Module, facts: Architecture) -> tuple[ResolvedMapping, ...]:
    modules = resolve(mapping, block, facts, HEADS)
    assert not isinstance(modules, str), modules
    return modules


def some_scales(modules: ResolvedMapping) -> torch.Tensor:
    return torch.rand(modules.channels.count, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3 + 0.25


def two(norm: nn.Module, outputs: int = 3, columns: int = 4) -> nn.Module:
    block = nn.Module()
    block.norm, block.reader = norm, nn.Linear(columns, outputs)
    return block


@pytest.mark.parametrize("model_type", FAMILIES)
def test_folding_a_scale_into_any_mapping_keeps_the_output_of_the_block(model_type: str) -> None:
    facts = facts_of(model_type)
    model = model_of(model_type)
    block = block_of(model, facts)
    run = runner(model, block)
    before = run()
    for mapping in mappings_of(facts):
        for modules in resolved(mapping, block, facts):
            s = some_scales(modules)
            old = modules.smooth_layer.weight.detach()
            fold(modules, s)
            assert float((modules.smooth_layer.weight.detach() - old).abs().max()) > 1e-3, mapping
            assert float((run() - before).abs().max() / before.abs().max()) < 1e-9, mapping
            fold(modules, 1 / s)
    assert float((run() - before).abs().max() / before.abs().max()) < 1e-9


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("leave_out", ["smooth layer", "a balance layer"])
def test_every_module_of_a_mapping_counts(model_type: str, leave_out: str) -> None:
    facts = facts_of(model_type)
    model = model_of(model_type)
    block = block_of(model, facts)
    run = runner(model, block)
    for mapping in mappings_of(facts):
        modules = resolved(mapping, block, facts)[0]
        short = (
            attrs.evolve(modules, balance_layers=dict(list(modules.balance_layers.items())[:-1]))
            if leave_out == "a balance layer"
            else modules
        )
        before, saved = run(), SavedParameters.of(modules)
        fold(short, some_scales(modules))
        if leave_out == "smooth layer":
            modules.smooth_layer.weight = saved.parameters[0][2]
        assert float((run() - before).abs().max() / before.abs().max()) > 1e-6, mapping
        saved.restore()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_probe_accepts_the_mappings_of_usual_variants_and_restores_the_modules(model_type: str, dtype: torch.dtype) -> None:
    facts = facts_of(model_type)
    model = model_of(model_type, dtype)
    block = block_of(model, facts)
    run, parameters = runner(model, block), dict(block.named_parameters())
    for mapping in mappings_of(facts):
        for modules in resolved(mapping, block, facts):
            assert holds(modules, probe(modules), run) <= allowed(modules, dtype), mapping
    assert all(p is parameters[name] for name, p in block.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "variant", "prev"),
    [
        ("opt", {"do_layer_norm_before": False}, "self_attn_layer_norm"),
        ("opt", {"do_layer_norm_before": False}, "final_layer_norm"),
        ("opt", {"activation_function": "gelu"}, "fc1"),
        ("stablelm", {"use_parallel_residual": True}, "input_layernorm"),
        ("falcon", {"parallel_attn": False}, "input_layernorm"),
    ],
)
def test_the_probe_rejects_a_mapping_that_does_not_hold_in_another_variant(
    model_type: str, variant: dict, prev: str, dtype: torch.dtype
) -> None:
    facts = facts_of(model_type)
    model = model_of(model_type, dtype, **variant)
    block = block_of(model, facts)
    (mapping,) = (mapping for mapping in mappings_of(facts) if mapping.smooth_layer == prev)
    (modules,) = resolved(mapping, block, facts)
    assert holds(modules, probe(modules), runner(model, block)) > 2 * allowed(modules, dtype)


def test_a_norm_with_a_unit_offset_folds_in_16_bits_as_well_as_any_other() -> None:
    facts = attrs.evolve(PLAIN, norm_has_unit_offset=True)
    block = two(nn.RMSNorm(64), 16, 64)
    nn.init.constant_(block.norm.weight, 0.3)
    (modules,) = resolved(NORM, block.to(torch.bfloat16), facts)
    old, wanted = block.reader.weight.double(), torch.linspace(0.01, 300, 64)
    real = fold(modules, wanted).double()
    new = (1 + block.norm.weight.double()) * block.reader.weight.double()
    torch.testing.assert_close(new, 1.30078125 * old, rtol=2**-8, atol=0)
    assert float((real / wanted - 1).abs().max()) > 0.01  # there is something that had to be made up for


def test_a_norm_is_not_divided_where_its_weight_would_vanish() -> None:
    block = two(nn.LayerNorm(4)).to(torch.float16)
    (modules,) = resolved(NORM, block, PLAIN)
    before = block.reader.weight.clone()
    real = fold(modules, torch.tensor([1e9, 2.0, 1e-9, 1.0]))
    assert real.tolist() == [1.0, 2.0, 1.0, 1.0]
    assert torch.isfinite(block.norm.weight).all()
    torch.testing.assert_close(block.reader.weight[:, [0, 2, 3]], before[:, [0, 2, 3]], rtol=0, atol=0)


def test_parameters_are_made_anew_and_put_back_bit_by_bit() -> None:
    block = two(nn.LayerNorm(4))
    old = {name: (p, p.clone()) for name, p in block.named_parameters()}
    (modules,) = resolved(NORM, block, PLAIN)
    saved = SavedParameters.of(modules)
    fold(modules, torch.full((4,), 3.0))
    assert all(torch.equal(p, copy) for p, copy in old.values())
    assert block.norm.weight is not old["norm.weight"][0]
    assert block.norm.weight.requires_grad
    saved.restore()
    assert all(p is old[name][0] for name, p in block.named_parameters())


def test_a_tied_weight_stays_what_it_is_for_the_other_module() -> None:
    block = two(nn.RMSNorm(4))
    other = nn.Linear(4, 3)
    other.weight = block.reader.weight
    before = other.weight.clone()
    fold(resolved(NORM, block, PLAIN)[0], torch.full((4,), 2.0))
    assert torch.equal(other.weight, before)
    assert not torch.equal(block.reader.weight, before)


def test_a_module_that_two_names_mean_is_multiplied_once() -> None:
    block = two(nn.RMSNorm(4))
    block.again = block.reader
    before = block.reader.weight.clone()
    fold(resolved(LayerMapping("norm", "norm", ("reader", "again")), block, PLAIN)[0], torch.full((4,), 2.0))
    assert torch.equal(block.reader.weight, 2 * before)


def test_layers_that_keep_their_weight_input_first_are_scaled_along_the_right_axis() -> None:
    block = nn.Module()
    block.first, block.second = Conv1D(5, 4), Conv1D(3, 5)
    (modules,) = resolved(LayerMapping("mlp_value", "first", ("second",)), block, PLAIN)
    x = torch.randn(7, 4)
    before = block.second(torch.relu(block.first(x)))
    fold(modules, probe(modules))
    torch.testing.assert_close(block.second(torch.relu(block.first(x))), before, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("mapping", "block", "reason"),
    [
        (LayerMapping("norm", "norm", ("reader", "other")), two(nn.RMSNorm(4)), "has no other"),
        (LayerMapping("norm", "norm", ("experts.*.up",)), two(nn.RMSNorm(4)), "fused"),
        (NORM, two(nn.LayerNorm(4, elementwise_affine=False)), "no weight"),
        (NORM, two(nn.RMSNorm(8)), "8 channels"),
        (LayerMapping("norm", "reader", ("norm",)), two(nn.RMSNorm(4)), "no single weight matrix"),
        (LayerMapping("mlp_value", "norm", ("reader",)), two(nn.Linear(2, 3)), "do not match"),
        (LayerMapping("value", "norm", ("reader",)), two(nn.Linear(2, 2), 4, 12), "do not fit 4 heads"),
    ],
)
def test_a_mapping_that_does_not_apply_resolves_to_the_reason(mapping: LayerMapping, block: nn.Module, reason: str) -> None:
    error = resolve(mapping, block, PLAIN, HEADS)
    assert isinstance(error, str)
    assert reason in error


@pytest.mark.parametrize("s", [torch.ones(3), torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, torch.nan, 1.0, 1.0])])
def test_scales_that_cannot_be_divided_by_are_refused_and_nothing_is_changed(s: torch.Tensor) -> None:
    block = two(nn.RMSNorm(4))
    parameters = dict(block.named_parameters())
    with pytest.raises(ValueError, match="norm"):
        fold(resolved(NORM, block, PLAIN)[0], s)
    assert all(p is parameters[name] for name, p in block.named_parameters())


def test_channels_of_shared_heads_are_spread_and_reduced_head_by_head() -> None:
    channels = Channels(4, repeats=2, size=2)
    s = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert channels.expand_scale(s).tolist() == [1, 2, 1, 2, 3, 4, 3, 4]
    x = torch.tensor([1.0, 2, 3, 6, 5, 6, 7, 8])
    assert channels.reduced(x, "max").tolist() == [3, 6, 7, 8]
    assert channels.reduced(x, "mean").tolist() == [2, 4, 6, 7]
    assert torch.equal(channels.reduced(channels.expand_scale(s), "mean"), s)
