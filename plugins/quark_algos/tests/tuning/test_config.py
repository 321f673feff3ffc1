"""Settings of tunings: what is no size, no step or no name is refused before any work."""

from __future__ import annotations

from typing import Any

import pytest

from quark_algos.tuning.config import AutoRoundConfig, TuningConfig

POSITIVE = {
    TuningConfig: ("epochs", "batch_size", "lr", "scale_lr", "norm_lr", "patience"),
    AutoRoundConfig: ("iters", "lr", "minmax_lr", "batch_size"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in POSITIVE.items() for name in names])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_are_positive(kind: Any, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        kind(**{name: value})
    assert getattr(kind(**{name: 1}), name) == 1


@pytest.mark.parametrize(("name", "value"), [("margin", -0.1), ("margin", 0.6), ("target", "layer"), ("compute_dtype", "int8")])
def test_what_is_none_of_the_values_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        TuningConfig(**{name: value})


@pytest.mark.parametrize("margin", [0, 0.5])
def test_a_margin_may_be_at_its_bounds(margin: float) -> None:
    assert TuningConfig(margin=margin).margin == margin
