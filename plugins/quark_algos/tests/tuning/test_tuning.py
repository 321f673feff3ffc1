"""Tuning lowers the error of blocks and of the model, and changes only the parameters of its settings.

It does so behind other roundings.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import RoundedBlock, Sample, weight_quantizer
from quark.config.algorithm import AlgoConfig
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.gptq.config import GPTQConfig
from quark_algos.tuning import block as tuning_of_blocks
from quark_algos.tuning.autoround import AutoRound
from quark_algos.tuning.block import TuneBlock
from quark_algos.tuning.config import AutoRoundConfig, TuningConfig

from ..runs import BLOCKS, float_model, layers, off_grid, quantized


@cache
def data() -> list[Tensor]:
    """Eight sequences to calibrate on, and four that no run sees."""
    return list(torch.cat(tiny.calibration_batches(12, 128)).split(1))


def run(*algorithms: AlgoConfig, scheme: str = "int4_wo_64", blocks: int = 1) -> Any:
    config = LLMTemplate.get("llama").get_config(scheme=scheme)
    config.algo_config = list(algorithms) or None
    return ModelQuantizer(config).quantize_model(tiny.tiny_model(blocks=blocks), data()[:8])


@cache
def behind_gptq() -> Any:
    """Of 768 tokens half the step, since GPTQ leaves the small model little to gain."""
    return run(GPTQConfig(), blocks=BLOCKS), run(GPTQConfig(), TuningConfig(lr=0.0075), blocks=BLOCKS)


@torch.no_grad()
def divergence(model: nn.Module) -> float:
    """Mean KL divergence from the float model on unseen sequences."""
    plain, total = float_model(), 0.0
    for ids in data()[8:]:
        log_p, log_q = (torch.log_softmax(m(ids).logits[0], -1) for m in (plain, model))
        total += float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    return total / 4


def test_blocks_and_the_model_come_nearer_to_the_float_ones_than_by_gptq_alone() -> None:
    gptq, tuned = behind_gptq()
    applied = [metrics["tuning"] for metrics in tuned.quark_report.tuned.values() if metrics["tuning"]["applied"]]
    assert applied
    for metrics in applied:
        assert metrics["held_out"]
        assert metrics["error_after"] < metrics["error_before"]
        assert metrics["last_loss"] < metrics["first_loss"]
        assert 0 < metrics["codes"] < 0.2
    assert divergence(tuned) < divergence(gptq)


def test_what_it_leaves_lies_on_the_grids() -> None:
    assert [name for name, layer in layers(behind_gptq()[1]).items() if off_grid(layer)] == []


@pytest.mark.parametrize(("settings", "expected"), [({}, 8), ({"batch_size": 4}, 8), ({"batch_size": 1}, 32), ({"epochs": 1}, 2)], ids=str)
def test_many_samples_make_larger_batches_and_no_more_steps(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], expected: int
) -> None:
    steps: list[float] = []
    state = tuning_of_blocks.BlockState
    step = state.step
    monkeypatch.setattr(tuning_of_blocks, "MOST_STEPS", 2)
    monkeypatch.setattr(state, "step", lambda own, *rates: steps.append(rates[0]) or step(own, *rates))
    run(TuningConfig(**settings))  # of eight samples
    assert len(steps) == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", ["rounding", "scales", "norms"])
def test_each_part_can_be_tuned_alone(part: str) -> None:
    alone = {name: name == part for name in ("rounding", "scales", "norms")}
    model, plain = run(TuningConfig(**alone, epochs=3), blocks=BLOCKS), run(blocks=BLOCKS)
    changed = set()
    for name, layer in layers(model).items():
        other = layers(plain)[name]
        scales, others = weight_quantizer(layer).scale, weight_quantizer(other).scale
        codes, before = (weight_quantizer(one).quantizer.codes_of(one.weight, weight_quantizer(one).qparams) for one in (layer, other))
        changed |= {"scales"} if not torch.equal(scales, others) else set()
        changed |= {"rounding"} if not torch.equal(codes, before) else set()
    norms = [name for name, p in model.named_parameters() if p.ndim == 1 and not torch.equal(p, plain.get_parameter(name))]
    changed |= {"norms"} if norms else set()
    assert changed == {part}


def test_the_second_run_gives_the_same_bits_and_another_seed_others() -> None:
    first, second, other = (run(TuningConfig(seed=seed)).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.parametrize(("kind", "settings"), [(TuneBlock, TuningConfig(epochs=2, patience=100)), (AutoRound, AutoRoundConfig(iters=40))])
def test_nothing_is_fitted_to_held_out_tokens(kind: Any, settings: AlgoConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, expected = kind.tune, run(settings)
    count = 0

    def with_other_targets(self: Any, block: RoundedBlock) -> Any:
        nonlocal count
        for sample in block.samples:
            count += int(sample.is_held_out.sum())
            sample.target[sample.is_held_out] += 1.0
        try:
            return plain(self, block)
        finally:
            for sample in block.samples:
                sample.target[sample.is_held_out] -= 1.0

    monkeypatch.setattr(kind, "tune", with_other_targets)
    found = run(settings)
    assert count > 0
    assert all(torch.equal(one, other) for one, other in zip(found.parameters(), expected.parameters(), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(found.parameters(), run().parameters(), strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_schemes_that_quantize_activations_are_tuned_through_these(scheme: str) -> None:
    model = run(GPTQConfig(), TuningConfig(epochs=4), scheme=scheme)
    applied = [metrics["tuning"] for metrics in model.quark_report.tuned.values() if metrics["tuning"]["applied"]]
    assert applied
    assert sum(m["error_after"] for m in applied) < 0.97 * sum(m["error_before"] for m in applied)


@pytest.mark.parametrize(
    ("asked", "instructions", "expected"),
    [
        ("auto", "AVX2", None),
        ("auto", "DEFAULT", None),
        ("auto", "AVX512", torch.bfloat16),
        ("auto", "SVE256", torch.bfloat16),
        ("bfloat16", "AVX2", torch.bfloat16),
        ("float32", "AVX512", None),
    ],
)
def test_products_are_bfloat16_where_the_processor_multiplies_it(
    asked: str, instructions: str, expected: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a block without memory is not tried again in the model's dtype, None here."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    dtypes = []

    def output(_: Sample, dtype: torch.dtype | None) -> Tensor:
        dtypes.append(dtype)
        raise torch.OutOfMemoryError("CUDA out of memory")

    sample = Sample(0, torch.ones(4, 8), torch.zeros(4, dtype=torch.bool))
    block = RoundedBlock("block", {}, {}, {}, [sample], output, lambda _: nullcontext())
    for tuning in (TuneBlock(TuningConfig(compute_dtype=asked)), AutoRound(AutoRoundConfig(compute_dtype=asked))):
        with pytest.raises(torch.OutOfMemoryError):
            tuning.tune(block)
    assert dtypes == [expected] * 2


def test_settings_are_refused_where_they_mean_nothing() -> None:
    for wrong in ({"epochs": 0}, {"target": "layer"}, {"margin": 0.6}, {"compute_dtype": "int8"}, {"lr": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TuningConfig(**wrong)


def test_it_is_chosen_by_name_beside_others() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm=["awq", "gptq", "tuning"])
    assert [settings.name for settings in config.algo_config or []] == ["awq", "gptq", "tuning"]
    model = quantized(TuningConfig(epochs=1))
    assert any("tuned by tuning" in note for note in model.quark_plan.notes)
