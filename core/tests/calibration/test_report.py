"""A calibration report folds the names of layers, however many there are, and warns of defects."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

from quark.base.finite import refuse_non_finite, state_of
from quark.base.ranks import Ranks
from quark.calibration.report import CalibrationReport
from quark.errors import NonFiniteError
from quark_devkit.threads import in_threads

EVERY = [f"model.layers.{i}.mlp.up_proj" for i in range(180)]


def test_layers_with_few_tokens_and_with_none_are_folded() -> None:
    report = CalibrationReport(layers={name: {"tokens": 7 + i, "few_tokens": True} for i, name in enumerate(EVERY)})
    report.unreached += EVERY[:3]
    few, none = report.lines()
    assert "180 of 180 layers" in few
    assert "(the fewest: 7): model.layers.{0-179}.mlp.up_proj." in few
    assert "3 layer(s): model.layers.{0-2}.mlp.up_proj." in none


def test_of_experts_with_few_tokens_the_one_with_the_fewest_is_named() -> None:
    tokens = {"experts.0.up_proj": 4, "experts.1.up_proj": 2} | {f"experts.{i}.up_proj": 1000 for i in range(2, 10)}
    (line,) = CalibrationReport(tokens=tokens).lines()
    assert line.startswith("2 of 10 layers of experts got less than ")
    assert "'experts.1.up_proj' got fewest, 2." in line


def test_reports_of_ranks_join_to_one_of_all_blocks_in_their_order() -> None:
    names = ["model.layers.0", "model.layers.1"]

    def joined(ranks: Ranks) -> CalibrationReport:
        own, at = names[ranks.rank], ranks.rank
        found: dict[str, dict[str, Any]] = {own: {"of": at}}
        report = CalibrationReport(blocks=dict(found), weights=dict(found), applied={at})
        report.layers |= found
        report.transformed |= found
        report.applied.add(at)
        report.tuned |= found
        report.tokens[own] = 5 + at
        report.unreached += [own, "shared"]
        report.join_with(ranks, names[::-1])
        return report

    for report in in_threads(joined, 2):
        for of_both in (report.layers, report.transformed, report.tuned, report.weights, report.blocks):
            assert of_both == {names[0]: {"of": 0}, names[1]: {"of": 1}}
        assert list(report.blocks) == names[::-1]
        assert report.tokens == {names[0]: 5, names[1]: 6}
        assert (report.applied, sorted(report.unreached)) == ({0, 1}, [*names, "shared"])


def test_tensors_that_are_not_finite_are_folded() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    for layer in model:
        layer.weight.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"12 tensor\(s\): \{0-11\}\.weight\.") as error:
        refuse_non_finite(state_of(model), (), lambda _: "")
    assert error.value.tensor == "0.weight"


def test_that_all_is_well_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    report = CalibrationReport(tokens={"experts.0.up_proj": 212, "experts.1.up_proj": 279})
    with caplog.at_level(logging.INFO):
        report.log()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.message == "Calibration reached 2 layers of experts with 212 to 279 tokens, 246 on average."


def test_layers_with_few_tokens_are_one() -> None:
    report = CalibrationReport(tokens={"experts.0.up_proj": 1, **{f"experts.{i}.up_proj": 100 for i in range(1, 9)}})
    (line,) = report.lines()
    assert line.startswith("1 of 9 layers of experts got less than 5% of the average of 89 tokens; 'experts.0.up_proj' got fewest, 1.")


def test_where_tokens_are_few_none_is_said_to_be_none() -> None:
    report = CalibrationReport(tokens={f"experts.{i}.up_proj": int(i == 1) for i in range(4)})
    assert list(report.remarks()) == ["Calibration reached 1 of 4 layers of experts with 1 token, 0.25 on average."]
    (line,) = report.lines()
    assert line.startswith("3 of 4 layers of experts got no token, such as 'experts.0.up_proj'. Use more data")


def test_unreached_layers_are_one() -> None:
    report = CalibrationReport()
    report.unreached += ["a", "b"]
    (line,) = report.lines()
    assert line.startswith("No calibration token reached 2 layer(s): a, b.")


def test_reports_of_blocks_add_up_to_that_of_the_run_through_json_too() -> None:
    blocks = [
        CalibrationReport(
            layers={f"{i}.up": {"tokens": 8, "damping": 0.1 + i}},
            tokens={f"{i}.expert": 3 + i},
            unreached=[f"{i}.down"],
            transformed={str(i): {"applied": True}},
            applied={i, 2},
        )
        for i in range(2)
    ]
    run, resumed = CalibrationReport(), CalibrationReport()
    for block in blocks:
        run.extend(block)
        resumed.extend(CalibrationReport.from_dict(json.loads(json.dumps(block.to_dict()))))
    assert resumed.to_dict() == run.to_dict()
    assert run.applied == {0, 1, 2}
    assert run.unreached == ["0.down", "1.down"]
    assert list(run.layers) == ["0.up", "1.up"]
    assert run.tokens == {"0.expert": 3, "1.expert": 4}
