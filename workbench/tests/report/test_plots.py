"""Plots: larger values are drawn further along, with the colours and words of their values."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from quark_workbench.report.heat_map import Cell, _step, expert_cells, heat_map, ratio_cells
from quark_workbench.report.markup import nice_ticks
from quark_workbench.report.plots import block_errors, gains, histogram_plot
from quark_workbench.report.selection_plots import additivity, candidates_in_order, choice_map, chosen_point


def circles(plot: str, class_: str) -> list[tuple[float, float]]:
    """Centres of the circles of a class."""
    found = [tag for tag in re.findall(r"<circle[^>]*>", plot) if f'class="{class_}"' in tag]
    return [(float(re.search(r'cx="([^"]+)"', tag)[1]), float(re.search(r'cy="([^"]+)"', tag)[1])) for tag in found]  # type: ignore[index]


def paths(plot: str, class_: str) -> list[list[tuple[float, float]]]:
    """Points of the paths of a class."""
    found = [tag for tag in re.findall(r"<path[^>]*>", plot) if f'class="{class_}"' in tag]
    return [[(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+)[ ,](-?[\d.]+)", tag)] for tag in found]


@pytest.mark.parametrize(("low", "high"), [(0, 23), (0.1, 0.9), (-7, 12), (1000, 1001), (10, 40), (2, 2)])
def test_ticks_are_round_and_cover_what_is_drawn(low: float, high: float) -> None:
    ticks = nice_ticks(low, high, 5)
    steps = {round(b - a, 9) for a, b in pairwise(ticks)}
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert len(ticks) <= 7
    if high > low:
        assert len(steps) == 1
        assert ticks[1] > low
        assert ticks[-2] < high


@pytest.mark.parametrize(("value", "step"), [(10.0, 0), (0.0, 8), (5.0, 4), (12.0, 0), (-3.0, 8)])
def test_the_lowest_value_has_the_strongest_colour(value: float, step: int) -> None:
    assert _step(value, 0.0, 10.0) == step
    assert _step(value, 7.0, 7.0) == 1


def test_a_heat_map_has_a_cell_for_each_place_in_its_row_and_column() -> None:
    rows = {"up": [Cell(1.0, "1", "first"), None], "down": [Cell(20.0, "20", "second"), Cell(None, "", "third")]}
    plot = heat_map("a", "b", "c", rows, lambda value: f"{value:g} dB", "block", least_range=1.0)
    tags = [tag for tag in re.findall(r"<rect[^>]*>", plot) if 'height="26' in tag]
    cells = [tuple(re.search(rf' {name}="([^"]+)"', tag)[1] for name in ("x", "y", "class")) for tag in tags]  # type: ignore[index]
    (first, empty, second, unknown) = cells
    (left, right), (up, down) = (first[0], empty[0]), (first[1], second[1])
    assert ((second[0], unknown[0]), (empty[1], unknown[1])) == ((left, right), (up, down))
    assert float(left) < float(right)
    assert float(up) < float(down)
    assert (empty[2], unknown[2]) == ("hn", "hn")
    graded = heat_map("a", "b", "c", {"up": [Cell(float(i), "", "") for i in range(21)]}, str, "block", least_range=1.0)
    steps = [int(step) for step in re.findall(r'class="h(\d)"', graded)][:21]
    assert steps == sorted(steps, reverse=True)
    assert (steps[0], steps[-3:]) == (8, [0, 0, 0]), "the best tenth does not make the others look bad"
    assert "first" in plot
    assert "third" not in plot


def test_cells_are_those_of_the_worst_layer_of_a_kind_in_a_block() -> None:
    layers = [
        {"name": f"{block}.up.{i}", "block": block, "kind": "up", "snr": snr}
        for i, (block, snr) in enumerate([("a", 20.0), ("a", 12.0), ("c", 30.0)])
    ]
    found = ratio_cells([*layers, {"name": "head", "block": None, "kind": "head", "snr": 1.0}], ["a", "b", "c"], "snr")
    assert list(found) == ["up"]
    worst, missing, single = found["up"]
    assert worst is not None
    assert single is not None
    assert missing is None
    assert (worst.value, worst.label) == (12.0, "12.0")
    assert worst.title.startswith("a.up.1")
    assert "the lowest of 2" in worst.title
    assert "lowest" not in single.title


def test_experts_have_the_fewest_tokens_of_their_layers() -> None:
    found = expert_cells({"mlp.experts.0.up": 5, "mlp.experts.0.down": 3, "mlp.experts.1.up": 7})
    (row,) = found.values()
    assert [cell and (cell.value, cell.label) for cell in row] == [(2.0, "3"), (3.0, "7")]  # log2 of one more


def test_gains_are_distances_in_decibels_and_losses_are_marked() -> None:
    plot = gains([("up", 10.6, 14.6, 3), ("down", 12.6, 11.6, 2)])
    before, after = circles(plot, "dot before"), circles(plot, "dot after")
    lines = [x for ((x, _), *_) in paths(plot, "grid")]
    assert all(min(lines) < x < max(lines) for x, _ in before + after)
    scale = (after[0][0] - before[0][0]) / 4
    assert scale > 0
    assert after[1][0] - before[1][0] == pytest.approx(-scale, rel=0.02)
    assert before[1][0] - before[0][0] == pytest.approx(2 * scale, rel=0.02)
    assert before[0][1] == after[0][1] < before[1][1]
    assert re.findall(r'class="(gain[^"]*)"', plot) == ["gain", "gain loss"]
    assert "+4.0 dB" in plot
    assert "-1.0 dB" in plot
    assert "min-width:620px" in plot


def test_counts_are_drawn_on_a_logarithmic_axis() -> None:
    plot = histogram_plot("a", "b", {"float": [0, 9, 99, 999], "rounded": [0, 0, 99, 0], "low": -2.0, "high": 2.0})
    (area,) = paths(plot, "float-area")
    heights = [area[1 + 2 * i][1] for i in range(4)]
    floor = area[0][1]
    assert heights[0] == floor
    assert [floor - height for height in heights] == pytest.approx([0, *((floor - heights[1]) * i for i in (1, 2, 3))], abs=0.2)
    assert heights[3] > 0, "within the drawing"


def test_better_blocks_are_higher_and_places_go_to_the_right() -> None:
    rows = [
        {"name": f"block {i}", "snr_after_db": after, "snr_before_db": before}
        for i, (after, before) in enumerate([(20.0, 10.0), (30.0, None)])
    ]
    plot = block_errors("a", "transforms", "rounded", rows)
    after, before = circles(plot, "dot"), circles(plot, "dot before")
    assert len(before) == 1
    assert after[0][0] == before[0][0] < after[1][0]
    assert after[1][1] < after[0][1] < before[0][1]
    assert before[0][1] - after[0][1] == pytest.approx(after[0][1] - after[1][1], rel=0.02)
    assert "block 1, after" in plot


def selection(**changes: Any) -> dict[str, Any]:
    points = [(4.0, 0.1, 0.1), (6.0, 0.01, 0.001), (8.0, 0.001, 0.01), (9.0, 1e-12, 0.5), (10.0, 0.5, None)]
    curve = [{"bits": bits, "loss": loss, "measured_kl": kl, "total_bytes": int(bits * 100)} for bits, loss, kl in points]
    choices = {"layers.0.qkv": "fp8", "layers.1.qkv": "int4", "layers.1": "int4", "head": "fp8"}
    sizes = {group: {"fp8": 8, "int4": 4} for group in choices}
    return {
        "curve": curve, "total_bytes": 600, "candidates": ["fp8", "int4"], "choices": choices, "sizes": sizes,
        "losses": {"layers.0.qkv": {"fp8": 0.25}},
    } | changes  # fmt: skip


def test_predicted_and_measured_divergences_have_one_scale_and_what_is_nothing_is_not_drawn() -> None:
    plot = additivity(selection())  # type: ignore[arg-type]
    equal, more, less = circles(plot, "dot measured")
    step = equal[0] - more[0]
    assert step > 0
    assert (more[0] - less[0], more[1] - less[1], less[1] - equal[1]) == pytest.approx((step, step, step), rel=0.02)
    ((start, end),) = paths(plot, "limit")
    assert (equal[1] - start[1]) / (equal[0] - start[0]) == pytest.approx((end[1] - start[1]) / (end[0] - start[0]), rel=0.02)
    assert circles(plot, "ring") == [more], "the choice"
    assert circles(additivity(selection(total_bytes=1)), "ring") == []  # type: ignore[arg-type]


def test_each_group_of_a_block_has_the_colour_of_its_candidate() -> None:
    found = selection()
    assert candidates_in_order(found) == ["int4", "fp8"]  # type: ignore[arg-type]
    assert chosen_point(found) is found["curve"][1]  # type: ignore[arg-type]
    plot = choice_map(found, ["layers.0", "layers.1"])  # type: ignore[arg-type]
    hints = re.findall(r"<title>(layers[^<]*)</title>", plot)
    assert [hint.partition(":")[0] for hint in hints] == ["layers.0.qkv", "layers.1.qkv", "layers.1"]
    assert "predicted loss 0.25" in hints[0]
    assert "predicted" not in hints[1]
    assert ">qkv<" in plot
    assert ">whole block<" in plot
    classes = re.findall(r'<rect[^>]*class="([^"]+)"', plot)
    assert classes[1] == classes[2] != classes[0]
