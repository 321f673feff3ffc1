"""The page of a report in headless Chromium: it loads without a message, every plot is drawn, the keyboard reaches everything.

``make browser`` makes an environment with playwright and runs this. ``QUARK_BROWSER_PYTHON`` is its
interpreter, ``CHROMIUM`` the browser (Debian's package ``chromium``), ``AXE`` the file ``axe.min.js`` of
npm's axe-core; without that, accessibility rules are not checked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_tiny_model import calibration_batches, tiny_model_dir
from quark_workbench.mixed_precision import Budget, select_schemes
from quark_workbench.report import ReportOptions

pytestmark = pytest.mark.browser

PYTHON = os.environ.get("QUARK_BROWSER_PYTHON", "")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
AXE = os.environ.get("AXE", "")


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The browser's findings in the page of a run with everything in it."""
    if not PYTHON or not CHROMIUM:
        pytest.skip("QUARK_BROWSER_PYTHON and CHROMIUM are not set: run make browser")
    out = tmp_path_factory.mktemp("report") / "out"
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm=["awq", "gptq"])
    selection = select_schemes(tiny_model_dir(), ["fp8", "mxfp4", "bf16"], Budget(bits=6), calibration_batches(2, 64)).to_dict()
    options = ReportOptions("full", selection=selection)
    quantize_checkpoint(tiny_model_dir(), out, config, calibration_batches(4, 128), report=options)
    look = Path(__file__).with_name("look.py")
    command = [PYTHON, str(look), str(out / "quark_report.html"), CHROMIUM, *([AXE] if AXE else [])]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


VIEWS = ("light", "dark", "narrow")


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_loads_without_a_message_or_a_request(views: dict[str, dict[str, Any]], view: str) -> None:
    assert views[view]["messages"] == []
    assert len(views[view]["requests"]) == 1  # the page itself
    assert views[view]["title"]


@pytest.mark.parametrize("view", VIEWS)
def test_every_plot_is_drawn(views: dict[str, dict[str, Any]], view: str) -> None:
    plots = {plot["id"]: plot for plot in views[view]["plots"]}
    wanted = {"plot-weights", "plot-outputs", "plot-gain", "plot-depth", "plot-sizes", "plot-time", "plot-weight-0", "plot-input-0"}
    wanted |= {"plot-pareto", "plot-additivity", "plot-choices"}
    assert wanted <= plots.keys()
    for plot in plots.values():
        assert plot["width"] > 200, plot
        assert plot["height"] > 60, plot
        assert plot["shapes"] >= 3, plot


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_is_not_wider_than_the_window(views: dict[str, dict[str, Any]], view: str) -> None:
    assert views[view]["overflow"] == 0


@pytest.mark.parametrize("view", VIEWS)
def test_the_keyboard_reaches_plots_tables_and_folds(views: dict[str, dict[str, Any]], view: str) -> None:
    reached = views[view]["reached"]
    assert reached[0] == "A|Skip to the findings"
    assert sum(place.startswith("DIV|Plot: ") for place in reached) == len(views[view]["plots"])
    assert any(place.startswith("SUMMARY|Table of all layers") for place in reached)
    assert views[view]["opened"] is True


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_breaks_no_rule_of_accessibility(views: dict[str, dict[str, Any]], view: str) -> None:
    if not AXE:
        pytest.skip("AXE is not set")
    assert views[view]["violations"] == []
