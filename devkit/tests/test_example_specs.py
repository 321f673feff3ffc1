"""Example specs: found for every registered format, up to date with the registry, valid for their tensor."""

from __future__ import annotations

import pytest

from quark.config.tensor import QTensorConfig
from quark.errors import QuarkError
from quark.numbers import quantizer_for
from quark.plugins import Catalog, using
from quark.plugins.discovery import discover
from quark_devkit.example_specs import SHAPE, example_specs, examples, odd_specs, registered_formats


@pytest.mark.parametrize("dtype", registered_formats())
def test_every_registered_format_has_examples_that_it_accepts(dtype: str) -> None:
    found = examples([dtype])
    assert found
    assert [str(example) for example in found if example.quantizer.shape_error(SHAPE) is not None] == []


def test_formats_of_elements_have_examples_of_every_granularity_and_symmetry_once() -> None:
    found = examples(["int4"])
    kinds = [(example.quantizer.granularity, example.quantizer.stored_level.spec.symmetric) for example in found]
    assert len(kinds) == len(set(kinds))
    assert {type(granularity).__name__ for granularity, _ in kinds} == {"PerTensor", "PerChannel", "PerGroup", "PerBlock"}
    assert {symmetric for _, symmetric in kinds} == {True, False}
    assert not any(example.spec.is_scale_quant for example in found)


def test_formats_of_scales_have_an_example_as_scales() -> None:
    assert [example.spec.is_scale_quant for example in examples(["fp8_e8m0"])] == [True]


def test_an_observer_gets_the_specs_that_it_accepts() -> None:
    found = examples(registered_formats(), "PerGroupMinMaxObserver")
    assert {type(example.quantizer.granularity).__name__ for example in found} == {"PerGroup", "PerGroupOfRows", "PerPaddedGroup"}
    assert {example.quantizer.stored_level.observer_class.__name__ for example in found} == {"PerGroupMinMaxObserver"}


def test_examples_are_those_of_the_plugins_in_use() -> None:
    assert examples(["int4"])
    without = Catalog(candidate for candidate in discover() if candidate.source.distribution != "quark-schemes")
    with using(without):
        assert examples(["int4"]) == ()


def test_specs_of_schemes_are_tried_first() -> None:
    spec = next(example_specs("mx6"))
    assert (spec.group_size, spec.round_method is None) == (16, False)


def test_odd_specs_are_mostly_refused() -> None:
    refused = [spec for spec in odd_specs(["int4"]) if not _is_accepted(spec)]
    assert len(refused) > len(list(odd_specs(["int4"]))) / 2


def _is_accepted(spec: QTensorConfig) -> bool:
    try:
        return quantizer_for(spec, activation=False).shape_error(SHAPE) is None
    except QuarkError:
        return False
