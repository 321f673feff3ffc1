"""Records: what a field may hold, and what is refused when a record is made."""

from __future__ import annotations

from typing import Any

import pytest

from quark.plugins import AlgorithmRecord, algorithms


def transform(**more: Any) -> AlgorithmRecord:
    """A transform named ``acme``."""
    return AlgorithmRecord(**({"name": "acme", "kind": "transform", "config": "acme_quant.algorithm:AcmeConfig"} | more))


def test_a_transform_says_what_it_does_and_where_it_goes() -> None:
    record = transform(role="equalization", before=["gptq"], after=("rotation",))
    assert (record.role, record.before, record.after) == ("equalization", ("gptq",), ("rotation",))
    assert (transform().role, transform().before, transform().after) == (None, (), ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "Two words"}, "role 'Two words' is not a name"),
        ({"before": ("Two words",)}, "before 'Two words' is not a name"),
        ({"after": (3,)}, "after 3 is not a name"),
        ({"before": "rotation"}, r"'rotation' is one string where several belong: write \('rotation',\)"),
        ({"kind": "rounding", "role": "equalization"}, "'acme' is a rounding: leave them out"),
        ({"kind": "rounding", "after": ("rotation",)}, "'acme' is a rounding: leave them out"),
        ({"before": ("acme",)}, "cannot go before or after 'acme'"),
        ({"aliases": ("ac",), "after": ("ac",)}, "cannot go before or after 'ac'"),
        ({"role": "rotation", "after": ("rotation",)}, "cannot go before or after 'rotation'"),
        ({"before": ("rotation",), "after": ("rotation",)}, "cannot go both before and after 'rotation'"),
    ],
)
def test_a_place_in_the_order_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transform(**fields)


def test_the_built_in_transforms_declare_what_a_run_orders_them_by() -> None:
    by_name = {record.name: record for record in algorithms()}
    assert (by_name["rotation"].role, by_name["rotation"].before) == ("rotation", ("equalization",))
    assert {name for name, record in by_name.items() if record.role == "equalization"} >= {"awq", "smoothquant", "autosmoothquant"}
    assert by_name["gptq"].role is None
