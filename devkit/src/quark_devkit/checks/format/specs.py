"""Checks of a format's own description, and of its answers to specs."""

from __future__ import annotations

import math

import torch

from quark.config.layer import levels
from quark.config.tensor import QTensorConfig
from quark.errors import QuarkError
from quark.numbers import NumberFormat, Packing, number_format
from quark.numbers.from_spec import observer_class
from quark_devkit.check import NotApplicableError, assume, check, complaining, require
from quark_devkit.checks.format.cases import Case, cases, scaled_weight_cases, weight_cases
from quark_devkit.example_specs import example_specs, odd_specs
from quark_devkit.subject import Subject

_WIDTHS = (64, 100, 4096, 17)
"""Columns of a weight; many group sizes do not divide the second and the last."""


@check("format")
def is_what_its_record_says(subject: Subject) -> None:
    """The record points at an instance of `quark.numbers.NumberFormat`. The instance has the record's name
    and bits, a torch storage dtype, a packing and a known observer."""
    record, value = subject.record, subject.load("format")
    require(isinstance(value, NumberFormat), f"is {value!r}, not a NumberFormat value")
    require(value.name in (record.name, *record.aliases), f"is named '{value.name}', but its record is named '{record.name}'")
    require(value.bits == record.bits, f"has bits={value.bits}, but its record says {record.bits}")
    require(isinstance(value.storage_dtype, torch.dtype), f"has storage_dtype={value.storage_dtype!r}, not a torch dtype")
    require(isinstance(value.is_cast, bool), f"has is_cast={value.is_cast!r}, not True or False")
    require(isinstance(value.packing, Packing), f"has packing={value.packing!r}, not a Packing")
    with complaining("has a default_observer that does not exist", QuarkError):
        observer_class(QTensorConfig(dtype=subject.name))


@check("format")
def serves_a_spec(subject: Subject) -> None:
    """The format accepts at least one spec of a registered scheme, or one spec with a usual granularity."""
    try:
        cases(subject)
    except NotApplicableError:
        require(False, "accepts no spec: no spec of a registered scheme, and no plain spec per tensor, channel, group or block")


@check("format")
def answers_odd_specs(subject: Subject) -> None:
    """``spec_error`` returns None or a text for any spec of the format, and never raises."""
    value = subject.load("format")
    for spec in (*odd_specs([subject.name]), *example_specs(subject.name)):
        answer = value.spec_error(spec)
        require(answer is None or (isinstance(answer, str) and answer), f"answers {answer!r}, not None or a reason ({spec})")


@check("format", each=weight_cases)
def refuses_unknown_scales(case: Case) -> None:
    """Unknown scale formats and unknown scale calculation modes are refused, not ignored."""
    assume(not case.quantizer.is_float, "the format casts and has no scales")
    for field in ("scale_format", "scale_calculation_mode"):
        spec = case.spec.set(**{field: "no_such_thing"})
        answer = case.format.spec_error(spec)
        require(isinstance(answer, str) and answer, f"accepts {field}='no_such_thing'")


@check("format")
def canonicalizes_once(subject: Subject) -> None:
    """``canonicalize`` is idempotent and does not change its argument."""
    value = subject.load("format")
    for spec in example_specs(subject.name):
        before = spec.copied()
        try:
            canonical = value.canonicalize(spec)
        except QuarkError:
            continue
        require(spec == before, f"changes its argument ({before})")
        is_spec = all(isinstance(one, QTensorConfig) for one in (canonical if isinstance(canonical, tuple | list) else (canonical,)))
        require(is_spec, f"returns {canonical!r} for a spec, not one or more of QTensorConfig ({before})")
        for level in levels(canonical):
            again = number_format(level.dtype).canonicalize(level)
            require(again == level, f"changes a spec that is canonical already: {level} becomes {again}")


@check("format", each=scaled_weight_cases, since=2)
def has_a_granularity_that_inverts(case: Case) -> None:
    """For each width that the format's granularity accepts, `restore` inverts `rows`, and `reduce_scale`
    inverts `expand_scale`."""
    granularity = case.quantizer.granularity
    for columns in _WIDTHS:
        shape = (3, columns)
        if case.quantizer.shape_error(shape) is not None or granularity.shape_error(shape) is not None:
            continue
        x = torch.arange(3.0 * columns, dtype=torch.float32).view(shape)
        require(torch.equal(granularity.restore(granularity.rows(x), shape), x), f"does not restore rows of {columns} columns")
        wanted = granularity.scale_shape(shape)
        scale = torch.arange(1.0, 1 + math.prod(wanted), dtype=torch.float32).view(wanted)
        reduced = granularity.reduce_scale(granularity.expand_scale(scale, shape), shape)
        require(torch.equal(reduced, scale), f"does not restore scales that it has expanded to {columns} columns")
