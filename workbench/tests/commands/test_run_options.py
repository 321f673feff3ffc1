"""Options of several commands: a report has the command line, and every option says what it is for.

A command that takes calibration data takes all options of the data.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import attrs
import pytest

from quark.plugins.catalog import recorded_catalog
from quark_workbench.cli.commands import typer_command
from quark_workbench.commands.run_options import CalibrationChoices, WritingChoices


def test_a_report_has_the_command_as_it_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/lib/python/quark/__main__.py", "quantize", "my model", "out"])
    assert WritingChoices().arguments(0.0, None)["report"].command == "quark quantize 'my model' out"
    assert WritingChoices(no_report=True).arguments(0.0, None)["report"] is None


@pytest.mark.parametrize("name", ["quantize", "plan", "evaluate", "report", "inspect"])
def test_every_option_says_what_it_is_for(name: str) -> None:
    helps = {param.opts[0]: getattr(param, "help", None) for param in typer_command(name).params}
    assert len(helps) > 1
    assert [option for option, text in helps.items() if not text] == []


def test_a_command_that_takes_calibration_data_takes_all_their_options() -> None:
    every = {"--" + field.name.replace("_", "-") for field in attrs.fields(CalibrationChoices)}
    options = {name: {flag for param in typer_command(name).params for flag in param.opts} for name in recorded_catalog().commands.names()}
    takes = {name: sorted(every - given) for name, given in options.items() if any(flag in given for flag in every if "calib" in flag)}
    assert takes == {"plan": [], "quantize": [], "report": []}


def test_each_source_gives_the_same_number_of_samples(tmp_path: Path) -> None:
    for name in "ab":
        rows = (json.dumps({"say": f"{name}{number}"}) + "\n" for number in range(5))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    data = CalibrationChoices(calib=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], calib_option=["column=say"])
    assert data.samples(3) == ["a0", "a1", "b0"]
    drawn = [[f"{name}{number}" for number in range(5)] for name in "ab"]
    for samples in drawn:
        random.Random(7).shuffle(samples)
    assert attrs.evolve(data, calib_seed=7).samples(4) == drawn[0][:2] + drawn[1][:2]
