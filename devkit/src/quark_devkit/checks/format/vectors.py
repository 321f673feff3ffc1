"""Checks of formats whose elements are rounded together, and of tables that are learned for a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from quark_devkit.check import assume, check, complaining, require
from quark_devkit.checks.format.cases import COLUMNS, Case, one_case, one_weight_case, scaled_weight_cases
from quark_devkit.example_specs import SHAPE

_COUNT = 4096
_SLACK = 1e-4
"""Slack of a distance, because formats may compare squares of distances in float32."""


def _vectors(case: Case) -> Tensor:
    """Return random numbers about as large as weights, in rows of `COLUMNS`."""
    vector = case.format.vector
    assume(vector > 1, "elements are rounded one by one")
    require(COLUMNS % vector == 0, f"rounds {vector} elements together, but {COLUMNS} columns are no multiple of that")
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_COUNT * vector // COLUMNS, COLUMNS, generator=generator) * case.max_magnitude


@check("format", each=one_case, since=2)
def rounds_each_vector_by_itself(case: Case) -> None:
    """The rounding of a vector does not depend on its place or on the vectors beside it."""
    t = _vectors(case)
    rounded = case.format.round_(t.clone()).view(-1, case.format.vector)
    order = torch.randperm(len(rounded), generator=torch.Generator().manual_seed(1))
    moved = t.view(-1, case.format.vector)[order].view(t.shape).contiguous()
    same = torch.equal(case.format.round_(moved).view(-1, case.format.vector), rounded[order])
    require(same, f"rounds a vector of {case.format.vector} elements to other values at another place")


@check("format", each=one_case, since=2)
def rounds_to_the_nearest_vector(case: Case) -> None:
    """The distance to the chosen value exceeds the distance to the nearest value by at most the record's
    ``error_bound``. The format has at most as many values as codes."""
    vectors = _vectors(case).view(-1, case.format.vector)
    rounded = case.format.round_(vectors.clone().view(-1, COLUMNS)).view(vectors.shape)
    known = rounded.unique(dim=0)
    codes = 2 ** (case.format.bits * case.format.vector)
    require(len(known) <= codes, f"has {len(known)} vectors, but {case.format.bits:g} bits for each element give only {codes:g} codes")
    chosen = (vectors.double() - rounded.double()).norm(dim=1)
    nearest = torch.cdist(vectors.double(), known.double()).amin(1)
    worse = float((chosen - nearest).max())
    allowed = _SLACK * case.max_magnitude + (case.error_bound or 0.0)
    require(worse <= allowed, f"rounds a vector to a value that is {worse:.3g} farther away than its nearest value")


@check("format", each=one_case, since=2)
def rounds_in_a_metric(case: Case) -> None:
    """``round_in_`` rounds its argument, in place, to values of the format. The mean error of these values,
    measured in the metric, is no larger than the mean error of the nearest values."""
    t = _vectors(case).view(-1, case.format.vector)
    mixing = torch.randn(2 * t.shape[1], t.shape[1], generator=torch.Generator().manual_seed(3))
    metric, given = mixing.t() @ mixing, t.clone()
    rounded = case.format.round_in_(given, metric.clone())
    require(rounded.data_ptr() == given.data_ptr(), "does not round in place in `round_in_`")
    on_grid = case.format.round_(rounded.clone().view(-1, COLUMNS)).view(t.shape)
    require(torch.equal(on_grid, rounded), "returns values from `round_in_` that it does not have")
    nearest = case.format.round_(t.clone().view(-1, COLUMNS)).view(t.shape)
    error, of_nearest = (float((((one - t) @ metric) * (one - t)).sum()) for one in (rounded, nearest))
    require(error <= 1.001 * of_nearest, f"has {error / max(of_nearest, 1e-30):.3g} times the error of the nearest values in a metric")


@check("format", each=one_weight_case, since=2)
def learns_a_table_of_any_weight(case: Case) -> None:
    """The format learns a table from weights with few elements and from zeros. The table has its own memory
    and no autograd graph. The arguments stay unchanged."""
    number_format = case.quantizer.stored_level.format
    assume(number_format.table_shape is not None, "the format has no table")
    for columns in (number_format.vector, 4 * number_format.vector):
        for t in (torch.zeros(1, columns), _vectors_of(columns), _vectors_of(columns).expand(3, -1).contiguous()):
            importance = torch.linspace(0.5, 1, t.numel(), dtype=torch.float32).view(t.shape)
            before = t.clone(), importance.clone()
            with complaining(f"cannot learn a table from a weight {list(t.shape)}", Exception):
                table = number_format.learned_table(t, importance)
            require(torch.equal(t, before[0]) and torch.equal(importance, before[1]), "changes the arguments from which it learns a table")
            require(not table.requires_grad, "learns a table that requires gradients")
            is_view = table.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
            require(not is_view, "learns a table that is a view of the weight, which changes later")
            require(bool(table.isfinite().all()), f"learns a table that is not finite from a weight {list(t.shape)}")


def _vectors_of(columns: int) -> Tensor:
    return torch.randn(1, columns, generator=torch.Generator().manual_seed(4), dtype=torch.float32)


@check("format", each=scaled_weight_cases, since=2)
def learns_the_same_table(case: Case) -> None:
    """The table of a weight is the same each time. It has the declared shape and is finite float32, and
    learning does not change the weight."""
    shape = case.quantizer.stored_level.format.table_shape
    assume(shape is not None, "the format has no table")
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    before = weight.clone()
    tables = [case.quantizer.find_qparams(weight).table for _ in range(2)]
    require(torch.equal(weight, before), "changes the weight from which it learns a table")
    for table in tables:
        require(table is not None and tuple(table.shape) == shape, f"does not learn a table of its table_shape {list(shape or ())}")
        require(
            table is not None and table.dtype is torch.float32 and bool(table.isfinite().all()), "learns a table that is not finite float32"
        )
    require(torch.equal(*tables), "learns another table from the same weight the next time")  # type: ignore[arg-type]
