"""Flags: each is raised by what it is about, at its threshold and not before."""

from __future__ import annotations

from typing import Any

import pytest

from quark_workbench.report import flags_of
from quark_workbench.report.flags import THRESHOLDS


def report(*layers: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """A report of twenty layers without a flag, and of others."""
    plain = [
        {"name": f"layers.{i}.up_proj", "snr_db": 20.0, "algorithm": "acme", "columns": 100, "input_quantized": True} for i in range(20)
    ]
    rest = {"transforms": [], "depth": {"blocks": []}, "experts": {"tokens": {}}, "settings": {"warnings": []}}
    return {"layers": [*plain, *({"name": f"bad.{i}", **layer} for i, layer in enumerate(layers))], **rest, **parts}


def codes(given: dict[str, Any]) -> list[tuple[str, str]]:
    return [(flag["level"], flag["code"]) for flag in flags_of(given)]


def test_a_run_without_fault_has_no_flag() -> None:
    assert codes(report()) == []


RAISED = [
    ({"snr_db": 15.01}, []),
    ({"snr_db": 14.99}, [("amber", "low_snr_db")]),
    ({"snr_db": 9.99, "algorithm": None}, [("red", "low_snr_db")]),
    ({"snr_db": 9.0, "output_snr_db": 20.0}, []),  # weights were moved for the sake of outputs
    ({"output_snr_db": 14.0}, [("amber", "low_output_snr_db")]),
    ({"output_snr_db": 4.0}, [("red", "low_output_snr_db")]),
    ({"unreached": True}, [("red", "unreached")]),
    ({"to_nearest_because": "worse", "held_out_error": 1.4, "algorithm": "acme"}, [("amber", "given_up")]),
    ({"attempts": 3, "damping": 1.0}, [("amber", "damping")]),
    ({"attempts": 1, "damping": 1.0}, []),
    ({"dead": 1, "columns": 100}, []),
    ({"dead": 2, "columns": 100}, [("amber", "dead")]),
    ({"dead": 11, "columns": 100}, [("red", "dead")]),
    ({"peak_to_rms": 41.0}, [("amber", "weight_outliers")]),
    ({"scale_ratio": 65.0}, [("amber", "scale_outliers")]),
    ({"input_peak_to_rms": 101.0, "input_quantized": True}, [("amber", "input_outliers")]),
    ({"input_peak_to_rms": 101.0, "input_quantized": False}, []),
    ({"few_tokens": True}, [("amber", "few_tokens")]),
]


@pytest.mark.parametrize(("layer", "expected"), RAISED)
def test_a_layer_raises_its_flag(layer: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    found = [flag for flag in flags_of(report(layer)) if flag["code"] != "dominant"]
    assert [(flag["level"], flag["code"]) for flag in found] == expected
    assert all(flag["layers"] == ["bad.0"] and flag["advice"] and "1 of" in flag["title"] for flag in found)


def test_few_layers_with_most_of_the_error_are_named() -> None:
    (flag,) = (f for f in flags_of(report({"snr_db": 5.0})) if f["code"] == "dominant")
    assert flag["layers"] == ["bad.0"]
    share = 10**-0.5 / (10**-0.5 + 20 * 0.01)
    assert f"{share:.0%}" in flag["title"]
    assert not [f for f in flags_of(report({"snr_db": 19.0})) if f["code"] == "dominant"]


@pytest.mark.parametrize(("count", "bad", "named"), [(20, 1, 1), (19, 1, 0), (40, 2, 2), (40, 5, 0)])
def test_as_many_as_a_twentieth_of_the_layers_are_few(count: int, bad: int, named: int) -> None:
    given = report()
    given["layers"] = [{**given["layers"][0], "name": f"layers.{i}", "snr_db": 0.0 if i < bad else 20.0} for i in range(count)]
    chosen = [layer for flag in flags_of(given) if flag["code"] == "dominant" for layer in flag["layers"]]
    assert len(chosen) == named


@pytest.mark.parametrize(("ratio", "level"), [(2.9, ["red"]), (9.9, ["amber"]), (10.1, [])])
def test_hidden_states_raise_a_flag(ratio: float, level: list[str]) -> None:
    blocks = [{"block": "layers.0", "snr_db": 30.0}, {"block": "layers.1", "snr_db": ratio}, {"block": "layers.2", "snr_db": None}]
    assert [flag["level"] for flag in flags_of(report(depth={"blocks": blocks}))] == level


def test_experts_without_tokens_are_red_and_starved_ones_amber() -> None:
    tokens = {"experts.0.up": 0, "experts.1.up": 1, **{f"experts.{i}.up": 100 for i in range(2, 10)}}
    flags = flags_of(report(experts={"tokens": tokens}))
    assert [(flag["level"], flag["layers"]) for flag in flags] == [("red", ["experts.0.up"]), ("amber", ["experts.1.up"])]


def test_an_algorithm_that_is_given_up_in_most_layers_is_red() -> None:
    given = report()
    for layer in given["layers"][:11]:
        layer["to_nearest_because"] = "worse"
    assert codes(given) == [("red", "given_up")]


def test_transforms_that_were_left_out_and_plans_that_warn_are_amber() -> None:
    transforms = [{"name": "layers.0", "applied": False, "reason": "no gain"}, {"name": "layers.1", "applied": True, "held_out": False}]
    found = codes(report(transforms=transforms, settings={"warnings": ["matches nothing"]}))
    assert found == [("amber", "transform_left_out"), ("amber", "not_held_out"), ("amber", "plan")]


def test_red_flags_come_first() -> None:
    levels = [flag["level"] for flag in flags_of(report({"few_tokens": True}, {"unreached": True}))]
    assert levels == ["red", "amber"]


def test_each_threshold_is_listed() -> None:
    import quark_workbench.report.flags as flags

    constants = {name for name, value in vars(flags).items() if name.isupper() and isinstance(value, float)}
    assert constants == {name.upper() for name in THRESHOLDS}


def test_the_share_of_layers_given_up_is_that_of_layers_with_an_algorithm() -> None:
    given = report({"to_nearest_because": "worse", "algorithm": "acme"}, {"algorithm": "acme"})
    for layer in given["layers"][:20]:
        layer["algorithm"] = None
    assert codes(given) == [("amber", "given_up")]
    given["layers"][-1]["to_nearest_because"] = "failed"
    (flag,) = flags_of(given)
    assert (flag["level"], flag["layers"]) == ("red", ["bad.0", "bad.1"])
    assert "2 of 2 layers" in flag["title"]


def test_a_model_that_is_worse_than_rounded_to_nearest_is_the_first_finding() -> None:
    figures = {"error": 0.3, "nearest_error": 0.2, "standard_error": 0.01, "tokens": 64}
    found = flags_of(report({"output_snr_db": 4.0}, model_error={**figures, "does_harm": True}))
    assert (found[0]["level"], found[0]["code"]) == ("red", "harm")
    assert "0.3 instead of 0.2" in found[0]["title"]
    for unharmed in (None, {**figures, "does_harm": False}):
        assert codes(report(model_error=unharmed)) == []
