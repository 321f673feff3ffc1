"""Single steps of AutoRound.

Which step is kept, at which rates, and gradients against differences of the function that they are of.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark
from quark.algorithms import RoundedBlock, Sample, StackedWeights
from quark.models.layers import QuantizedLayer, quantized_class
from quark_algos.tuning import autoround
from quark_algos.tuning.autoround import AutoRound, OffsetLayer
from quark_algos.tuning.config import AutoRoundConfig

LOSSES = (4.0, 1.0, 9.0, 3.0, 2.0)
"""The third improves on none; the last two improve on their predecessors, and not on the second, which is the
best.
"""
ROWS, COLUMNS, GROUP = 6, 64, 32


@attrs.define(eq=False)
class Counted:
    """Stands for an `OffsetLayer`: its state is the number of steps made."""

    rates: list[tuple[float, float]] = attrs.field(factory=list)
    written: int | None = None
    leaf: Tensor = attrs.field(factory=lambda: torch.zeros(2, 2))

    def weight(self) -> Tensor:
        self.leaf = torch.zeros(2, 2, requires_grad=True)
        return self.leaf

    def update(self, lr: float, scale_lr: float) -> None:
        self.rates.append((lr, scale_lr))

    def state(self) -> int:
        return len(self.rates)

    def write(self, state: int) -> int:
        self.written = state
        return 1


def run(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Counted, dict[str, Any]]:
    """AutoRound on a block whose loss is the next of `LOSSES` after each step."""
    layer = Counted()
    monkeypatch.setattr(autoround, "OffsetLayer", lambda *_: layer)
    target = torch.ones(4, 8)

    def output(sample: Sample, _: torch.dtype | None) -> Tensor:
        return sample.target + LOSSES[len(layer.rates)] ** 0.5 + layer.leaf.sum() * 0

    made = RoundedBlock(
        "block",
        {"a": nn.Identity()},
        {"a": target},
        {},
        [Sample(0, target, torch.zeros(4, dtype=torch.bool))],
        output,
        lambda _: nullcontext(),
    )
    monkeypatch.setattr(RoundedBlock, "weights", lambda *_: None)
    metrics = AutoRound(AutoRoundConfig(iters=len(LOSSES), batch_size=1, **settings)).tune(made)
    return layer, dict(metrics[""])


def test_the_step_with_the_smallest_loss_is_kept_and_not_the_last_that_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, metrics = run(monkeypatch)
    assert layer.written == LOSSES.index(min(LOSSES))
    assert metrics == {"first_loss": pytest.approx(4.0), "best_loss": pytest.approx(1.0), "codes": pytest.approx(0.25)}


@pytest.mark.parametrize(("settings", "first"), [({}, (0.2, 0.2)), ({"lr": 0.5}, (0.5, 0.5)), ({"minmax_lr": 0.1}, (0.2, 0.1))], ids=str)
def test_rates_fall_from_one_over_the_number_of_steps_to_zero(
    settings: dict[str, float], first: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = run(monkeypatch, **settings)
    left = [1 - step / len(LOSSES) for step in range(len(LOSSES))]
    assert layer.rates == [(pytest.approx(first[0] * part), pytest.approx(first[1] * part)) for part in left]


def offset_layer(**settings: Any) -> tuple[OffsetLayer, QuantizedLayer, Tensor]:
    """A layer in int4 with a scale for each group, rounded to nearest, and its float weight ``[N, K]``."""
    config = quark.schemes().load_config("int4_wo_32")()
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    with torch.no_grad():
        linear.weight.copy_((torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * 0.3).clamp(-0.55, 0.55))
        linear.weight[:, ::GROUP] = torch.tensor([1.0, -1.0]).repeat(ROWS // 2)[:, None]  # one value of each group is far larger
    weight = linear.weight.detach().clone()
    layer = quantized_class(linear).from_float(linear, config)
    stacked = StackedWeights({"a": layer})
    grid = stacked.grid()
    scales = grid.scales(stacked.wt)
    stacked.keep(grid, grid.round_(stacked.wt.clone(), scales), scales)
    return OffsetLayer(StackedWeights({"a": layer}), weight, AutoRoundConfig(**settings), torch.float32), layer, weight


def toward_narrower(layer: OffsetLayer, weight: Tensor) -> Tensor:
    """A gradient ``[N, K]`` by which every range should be narrower.

    Small values, which are never clipped, times their own errors.
    """
    largest = weight.unflatten(1, (-1, GROUP)).abs().amax(-1).repeat_interleave(GROUP, 1)
    return torch.where(weight.abs() < 0.4 * largest, layer.leaf.detach() - weight, 0.0)


def surrogate(wt: Tensor, scale: Tensor, offsets: Tensor, factors: Tensor, at: Tensor, residue: Tensor) -> Tensor:
    """Return Q of Eq.

    3 to 5 ``[K, N]``, float64, with the residue of the rounding frozen at the factors ``at``; int4 is -8 to
    7.

    ``offsets`` are in codes, as published: they do not shrink with a range.
    """
    raw = wt / spread(factors * scale) + offsets / spread(at) + residue
    return raw.clamp(-8, 7) * spread(factors * scale)


def spread(groups: Tensor) -> Tensor:
    """``[groups, N]`` for each row of a group."""
    return groups.repeat_interleave(GROUP, 0)


def test_steps_go_against_the_differences_of_the_loss() -> None:
    layer, quantized, weight = offset_layer()
    scale = quantized.weight_quantizer.scale.t().double()  # type: ignore[union-attr]
    for rate in (0.2, 0.1):  # some values are clipped then, and all have offsets
        layer.weight()
        layer.leaf.grad = toward_narrower(layer, weight) + 1e-30 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2))
        layer.update(rate, rate)
    offsets, factors = layer.state()
    assert factors is not None
    assert factors.unique().tolist() == pytest.approx([0.7])
    direction = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))  # the loss is ⟨direction, Q⟩
    layer.weight().grad = direction
    layer.update(1e-3, 1e-3)
    moved, rescaled = layer.state()
    wt, g = weight.t().double(), direction.t().double()
    nearest = (wt / spread(scale)).round().clamp(-8, 7)
    onward = nearest + (wt / spread(scale) - nearest).sign()
    distance = ((onward >= -8) & (onward <= 7)).double()  # in scales: at the ends of the grid there is no next value
    in_codes, at = offsets.double() * distance, factors.double()
    codes = wt / spread(at * scale) + in_codes / spread(at)
    residue, clipped = codes.round() - codes, (codes.round() < -8) | (codes.round() > 7)
    q = surrogate(wt, scale, in_codes, at, at, residue)
    assert torch.allclose(q.float(), layer_weight(quantized, layer, (offsets, factors)), atol=1e-5), "the surrogate is this layer"
    assert int(clipped.sum()) == COLUMNS // GROUP * ROWS, "the large value of each group, and that by more than a step"
    h = 1e-6
    for group, row in ((group, row) for group in range(COLUMNS // GROUP) for row in range(ROWS)):
        step = torch.zeros_like(at)
        step[group, row] = h
        ahead, behind = (surrogate(wt, scale, in_codes, at + sign * step, at, residue) for sign in (1, -1))
        slope = float((g * (ahead - behind)).sum()) / (2 * h)
        change = float(rescaled[group, row] - factors[group, row])  # type: ignore[index]
        assert change == pytest.approx(-1e-3 if slope > 0 else 1e-3, rel=1e-3)
    inside = ~clipped & (distance > 0) & (offsets.abs() < 0.499)
    assert torch.equal((moved - offsets).sign()[inside], -g.sign().float()[inside])
    assert bool((moved == offsets)[clipped].all()), "what is clipped has no gradient by its offset"


def layer_weight(quantized: QuantizedLayer, layer: OffsetLayer, state: tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the weight of the layer in a state, ``[K, N]``."""
    layer.write(state)
    return quantized.weight.detach().t()


def test_without_factors_ranges_stay_and_offsets_are_bounded_by_a_half() -> None:
    layer, quantized, _ = offset_layer(enable_minmax_tuning=False)
    before = quantized.weight_quantizer.scale.clone()  # type: ignore[union-attr]
    direction = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4))
    for _ in range(3):
        layer.weight().grad = direction
        layer.update(0.4, 0.4)
    offsets, factors = layer.state()
    assert factors is None
    assert float(offsets.abs().max()) == 0.5
    changed = layer.write((offsets, factors))
    assert changed > 0
    assert torch.equal(quantized.weight_quantizer.scale, before)  # type: ignore[union-attr]


def test_ranges_are_not_narrowed_below_half_of_themselves_nor_widened() -> None:
    layer, _, weight = offset_layer()
    for sign, bound in ((1.0, 0.5), (-1.0, 1.0)):
        for _ in range(4):
            layer.weight()
            layer.leaf.grad = sign * toward_narrower(layer, weight)
            layer.update(0.0, 0.4)
        factors = layer.state()[1]
        assert factors is not None
        assert factors.unique().tolist() == [bound]
