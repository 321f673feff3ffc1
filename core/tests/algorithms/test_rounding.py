"""RoundingTask: ranks share the rows of the weights, and each gets all results; threads share the layers."""

from __future__ import annotations

from threading import Barrier, get_ident

import pytest
import torch
from torch import nn

import quark
from quark.algorithms import RoundingTask, RoundToNearest
from quark.base.parallel import SMALL
from quark.models.layers import QuantizedLayer, quantized_class
from quark.numbers.single_level import SingleLevelQuantizer
from quark_devkit.threads import in_threads


@pytest.mark.parametrize(
    ("size", "rows", "is_deterministic", "expected"),
    [
        pytest.param(1, 5, False, [(0, 5, 0)], id="one rank has all rows"),
        pytest.param(2, 5, False, [(0, 3, 0), (3, 5, 1)], id="each rank has a slice"),
        pytest.param(2, 600, True, [(0, 200, 0), (200, 400, 1), (400, 600, 1)], id="slices do not depend on the number of ranks"),
    ],
)
def test_by_rows_gives_the_results_of_all_slices_in_order_on_every_rank(
    size: int, rows: int, is_deterministic: bool, expected: list[tuple[int, int, int]]
) -> None:
    results = in_threads(
        lambda ranks: RoundingTask({}, ranks=ranks).by_rows(lambda part: (part.start, part.stop, ranks.rank), rows),
        size,
        is_deterministic=is_deterministic,
    )
    assert results == [expected] * size


def test_layers_that_share_a_scale_are_observed_together() -> None:
    config = quark.schemes().load_config("fp8")()
    floats = {name: nn.Linear(8, 4, bias=False) for name in ("small", "large")}
    nn.init.constant_(floats["small"].weight, 1.0)
    nn.init.constant_(floats["large"].weight, -3.0)
    layers = {name: quantized_class(layer).from_float(layer, config) for name, layer in floats.items()}
    observer = RoundingTask(layers, shares_scale=True).shared_observer()
    assert observer is not None
    assert [float(end) for end in observer.range()] == [-3.0, 1.0]
    assert RoundingTask(layers).shared_observer() is None


@pytest.mark.parametrize(
    ("columns", "sizes", "are_shared"),
    [
        pytest.param(64, (2, 8), True, id="small layers"),
        pytest.param(64, (8,), False, id="a small layer alone"),
        pytest.param(SMALL // 4, (2, 8), False, id="large layers"),
    ],
)
def test_threads_round_small_layers_and_share_the_parts_of_others(
    columns: int, sizes: tuple[int, ...], are_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, before, at_once = quark.schemes().load_config("int4_wo_32")(), torch.get_num_threads(), Barrier(2)
    rounded_by: set[tuple[int, int]] = set()

    def layers() -> dict[str, QuantizedLayer]:
        torch.manual_seed(0)
        floats = {f"layer{rows}": nn.Linear(columns, rows, bias=False) for rows in sizes}
        return {name: quantized_class(layer).from_float(layer, config) for name, layer in floats.items()}

    def recorded(self: SingleLevelQuantizer, x: torch.Tensor) -> object:
        if len(tasks) == 2:
            rounded_by.add((get_ident(), torch.get_num_threads()))
            if are_shared:
                at_once.wait(60)  # the other layer is rounded at the same time
        return original(self, x)

    original = SingleLevelQuantizer.round_to_nearest
    monkeypatch.setattr(SingleLevelQuantizer, "round_to_nearest", recorded)
    tasks: list[RoundingTask] = []
    for threads in (1, 2):
        tasks.append(RoundingTask(layers()))
        try:
            torch.set_num_threads(threads)
            RoundToNearest().round(tasks[-1])
        finally:
            torch.set_num_threads(before)
    one, other = ([layer.weight for layer in task.layers.values()] for task in tasks)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))  # type: ignore[arg-type]
    assert [threads for _, threads in rounded_by] == ([1, 1] if are_shared else [2])
