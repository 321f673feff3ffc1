"""AutoRound lowers the error of blocks from round-to-nearest, within its bounds on offsets and ranges."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import quark_tiny_model as tiny
from quark.algorithms import weight_quantizer
from quark.config.algorithm import AlgoConfig
from quark.errors import ConfigError
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.tuning.config import AutoRoundConfig, TuningConfig

from ..runs import layers, off_grid


@cache
def run(*settings: tuple[str, Any], scheme: str = "int4_wo_64") -> Any:
    config = LLMTemplate.get("llama").get_config(scheme=scheme)
    config.algo_config = [AutoRoundConfig(**dict(settings))] if settings else None
    return ModelQuantizer(config).quantize_model(tiny.tiny_model(blocks=1), tiny.calibration_batches(6, 128))


def codes(layer: Any) -> torch.Tensor:
    module = weight_quantizer(layer)
    return module.quantizer.codes_of(layer.weight, module.qparams).int()  # type: ignore[arg-type]


def test_blocks_come_nearer_to_the_float_ones_than_by_round_to_nearest() -> None:
    model = run(("iters", 20), ("batch_size", 2))
    metrics = [of_block["autoround"] for of_block in model.quark_report.tuned.values()]
    assert all(m["applied"] and m["error_after"] < 0.95 * m["error_before"] for m in metrics)
    assert all(m["best_loss"] < m["first_loss"] for m in metrics)
    assert [name for name, layer in layers(model).items() if off_grid(layer)] == []


def test_codes_move_to_a_neighbour_and_ranges_become_narrower() -> None:
    model, fixed = run(("iters", 20), ("batch_size", 2)), run(("iters", 20), ("batch_size", 2), ("enable_minmax_tuning", False))
    nearest = layers(run())
    moved = {name: int((codes(layer) - codes(nearest[name])).abs().max()) for name, layer in layers(fixed).items()}
    assert set(moved.values()) == {1}
    for name, layer in layers(fixed).items():
        assert torch.equal(weight_quantizer(layer).scale, weight_quantizer(nearest[name]).scale)  # type: ignore[arg-type]
    ratios = [weight_quantizer(layer).scale / weight_quantizer(nearest[n]).scale for n, layer in layers(model).items()]  # type: ignore[operator]
    assert all(bool(((ratio <= 1 + 2**-20) & (ratio >= 0.5)).all()) for ratio in ratios)
    assert any(bool((ratio < 0.999).any()) for ratio in ratios)


def test_a_run_has_one_of_the_two() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    both: list[AlgoConfig] = [AutoRoundConfig(), TuningConfig()]
    config.algo_config = both
    with pytest.raises(ConfigError, match=r"'autoround' and 'tuning' .*have the same role"):
        ModelQuantizer(config).quantize_model(tiny.tiny_model(), tiny.calibration_batches(1, 32))
