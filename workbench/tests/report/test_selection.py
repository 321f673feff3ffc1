"""The section on a selection: curve, choice, additivity and each group's scheme, as in the JSON."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest

from quark.runs import quantize_checkpoint
from quark_tiny_model import calibration_batches, tiny_model_dir
from quark_workbench.mixed_precision import Budget, SelectionResult, select_schemes
from quark_workbench.report import ReportOptions, page
from quark_workbench.report.files import violations
from quark_workbench.report.selection_plots import curve_svg

from .reports import contents
from .test_page import EVIL, Parsed


@cache
def chosen() -> SelectionResult:
    options = {"points": 6, "measured": 3, "measured_tokens": 64}
    data = calibration_batches(2, 64)
    return select_schemes(tiny_model_dir(), ["fp8", "mxfp4", "bf16"], Budget(bits=6), data, selector_options=options)


def report() -> dict[str, Any]:
    return copy.deepcopy(contents("int4_wo_64")) | {"selection": copy.deepcopy(chosen().to_dict())}


def marks(parsed: Parsed, class_: str) -> int:
    """How many shapes of a class are in plots, legends aside."""
    return sum(a.get("class") == class_ and "div" in around and "ul" not in around for _, a, around in parsed.elements)


def test_a_run_has_its_selection_in_the_json_and_on_the_page(tmp_path: Any) -> None:
    data = calibration_batches(2, 64)
    quantize_checkpoint(tiny_model_dir(), tmp_path / "out", chosen().config, data, report=ReportOptions(selection=chosen().to_dict()))
    from quark_workbench.report import read_report

    written = read_report(tmp_path / "out")
    assert written is not None
    assert written["selection"]["choices"] == dict(chosen().selection.choices)
    text = (tmp_path / "out" / "quark_report.html").read_text(encoding="utf-8")
    assert {"plot-pareto", "plot-additivity", "plot-choices"} <= {str(a.get("id")) for a in Parsed(text).named("svg")}


def test_every_point_every_measurement_and_every_group_is_drawn() -> None:
    selection = chosen().to_dict()
    parsed = Parsed(page(report()))
    curve = [point for point in selection["curve"] if point["loss"] > 1e-9]
    measured = [point for point in curve if point["measured_kl"]]
    assert marks(parsed, "dot measured") == 2 * len(measured)  # on the curve, and against the predictions
    assert marks(parsed, "ring") == 2
    cells = [a for tag, a, around in parsed.elements if tag == "rect" and re.fullmatch(r"h\d", a.get("class") or "") and "ul" not in around]
    other = Parsed(page(contents("int4_wo_64")))
    before = [a for tag, a, around in other.elements if tag == "rect" and re.fullmatch(r"h\d", a.get("class") or "") and "ul" not in around]
    assert len(cells) - len(before) == len(selection["choices"])
    titles = [text for tag, text in parsed.text if tag == "title"]
    for group, name in selection["choices"].items():
        assert any(text.startswith(f"{group}: {name}, ") for text in titles)


def test_the_schema_knows_it_and_a_report_without_one_has_no_section() -> None:
    assert list(violations(report())) == []
    assert list(violations(report() | {"selection": None})) == []
    old = {key: value for key, value in report().items() if key != "selection"}
    assert list(violations(old)) == []
    assert "plot-pareto" not in page(old)
    broken = report()
    del broken["selection"]["curve"]
    assert list(violations(broken))


@pytest.mark.parametrize("change", [{"curve": [], "losses": {}, "loss": None}, {"unit": "squared output error per token"}])
def test_a_selector_that_predicts_no_divergence_has_no_plot_of_additivity(change: dict[str, Any]) -> None:
    altered = report()
    altered["selection"] |= change
    text = page(altered)
    Parsed(text)
    assert "plot-additivity" not in text
    assert "plot-choices" in text
    assert ("plot-pareto" in text) == bool(altered["selection"]["curve"])


def test_powers_of_ten_are_written_out_where_they_are_short() -> None:
    altered = report()
    curve = altered["selection"]["curve"]
    for power, point in enumerate(curve, -5):
        point["loss"] = 3 * 10.0**power
    labels = {text for tag, text in Parsed(page(altered)).text if tag == "text"}
    assert len(curve) >= 4
    assert {"1e-5", "0.001"} <= labels
    assert "1e-3" not in labels


def test_names_are_text_and_never_markup() -> None:
    altered = report()
    selection = altered["selection"]
    selection["selector"], selection["unit"], selection["notes"] = EVIL, f"nats {EVIL}", [EVIL]
    for key in ("choices", "layers", "sizes", "losses"):
        name = next(iter(selection[key]))
        selection[key] = {f"{name}{EVIL}" if k == name else k: v for k, v in selection[key].items()}
    assert "<script" not in page(altered)


def test_the_picture_of_a_file_is_that_of_the_page() -> None:
    root = ElementTree.fromstring(curve_svg(chosen().to_dict()))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    classes = [element.get("class") for element in root.iter()]
    assert classes.count("ring") == 1
    assert classes.count("line") == 1
