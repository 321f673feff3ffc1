"""A selection: the problem that a model poses, and the configuration that choices lead to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quark.config.model import QConfig
from quark.errors import CalibrationError, ConfigError, PluginError
from quark.models.plan.quant_plan import plan_rows
from quark.torch import ModelQuantizer, export_safetensors
from quark_devkit.small_models import batches, run_config, small_model
from quark_tiny_model import calibration_batches, tiny_model, tiny_model_dir, tiny_template
from quark_workbench.mixed_precision import FLOAT, Budget, Selection, SelectionProblem, SelectionResult, select_schemes
from quark_workbench.mixed_precision.select import base_scheme
from quark_workbench.report.selection_plots import curve_svg

DATA = calibration_batches(2, 64)


class Chooses:
    """Chooses by a function of the problem and a group's name."""

    def __init__(self, choose: Callable[[SelectionProblem, str], str]) -> None:
        self.choose = choose

    def select(self, problem: SelectionProblem) -> Selection:
        return Selection({group.name: self.choose(problem, group.name) for group in problem.groups})


def selected(choose: Callable[[SelectionProblem, str], str], *names: str, **more: Any) -> SelectionResult:
    budget = more.pop("budget", Budget(kl=1.0))
    return select_schemes(tiny_model(torch.bfloat16), names or ("fp8", "mxfp4", "bf16"), budget, DATA, selector=Chooses(choose), **more)


def schemes_of(config: QConfig) -> dict[str, Any]:
    """The scheme of each layer of the tiny model under a configuration."""
    return {row.name: row.config for row in plan_rows(tiny_model(), config) if row.is_linear}


def by_block(problem: SelectionProblem, group: str) -> str:
    return "fp8" if ".0." in group else FLOAT if ".1." in group else "mxfp4"


def test_every_layer_gets_what_was_chosen_for_its_group() -> None:
    result = selected(by_block)
    found = schemes_of(result.config)
    offered = {**result.problem.candidates}
    for group in result.problem.groups:
        wanted = offered[result.selection.choices[group.name]].config
        for layer in group.layers:
            assert (found[layer] is None) == (wanted.weight is None)
            assert found[layer] is None or found[layer] == wanted
    assert found["lm_head"] is None


def test_one_scheme_for_a_kind_of_layer_is_one_pattern() -> None:
    result = selected(lambda _, group: "fp8" if group.endswith("down_proj") else "mxfp4")
    assert list(result.config.layer_quant_config) == ["model.layers.*.mlp.down_proj"]
    assert result.config.scheme == "mxfp4"
    floats = selected(lambda _, group: FLOAT if group.endswith("o_proj") else "mxfp4")
    assert floats.config.exclude == ["lm_head", "model.layers.*.self_attn.o_proj"]


@pytest.mark.parametrize("choose", [by_block, lambda _, __: "mxfp4", lambda _, __: FLOAT], ids=["by block", "mxfp4", "float"])
def test_the_checkpoint_has_the_size_that_was_planned(choose: Callable[[SelectionProblem, str], str], tmp_path: Path) -> None:
    result = selected(choose)
    model = ModelQuantizer(result.config).quantize_model(tiny_model(torch.bfloat16), DATA)
    export_safetensors(model, tmp_path / "out")
    written = sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert result.total_bytes == written


def test_outputs_of_a_quantized_cache_stay() -> None:
    base = tiny_template().get_config(scheme="fp8", kv_cache_scheme="fp8")
    found = schemes_of(selected(by_block, base=base).config)
    for block in range(3):
        assert found[f"model.layers.{block}.self_attn.k_proj"].output_tensors is not None
        assert found[f"model.layers.{block}.self_attn.o_proj"] is None or (
            found[f"model.layers.{block}.self_attn.o_proj"].output_tensors is None
        )
    assert found["model.layers.1.self_attn.k_proj"].weight is None


def test_fixed_and_excluded_layers_are_not_chosen_for() -> None:
    base = tiny_template().get_config(
        scheme="mxfp4", layer_config={"*.down_proj": "fp8", "*.o_proj": "mxfp4"}, exclude_layers=["lm_head", "*.v_proj"]
    )
    result = selected(lambda *_: FLOAT, "mxfp4", "bf16", base=base, fixed=["*.down_proj", "*.o_proj"])
    chosen = {layer for group in result.problem.groups for layer in group.layers}
    assert {name.rpartition(".")[2] for name in chosen} == {"q_proj", "k_proj", "gate_proj", "up_proj"}
    found = schemes_of(result.config)
    assert found["model.layers.0.mlp.down_proj"] == base.layer_quant_config["*.down_proj"]
    assert found["model.layers.0.self_attn.o_proj"] == base.layer_quant_config["*.o_proj"]
    assert found["model.layers.0.self_attn.q_proj"] is None


def test_a_choice_goes_before_a_pattern_that_says_the_global_scheme() -> None:
    base = tiny_template().get_config(scheme="mxfp4", layer_config={"model.layers.*.mlp.down_proj": "mxfp4", "*.o_proj": "mxfp4"})
    result = selected(lambda _, group: "fp8" if group.endswith(("down_proj", "o_proj")) else "mxfp4", base=base)
    found, offered = schemes_of(result.config), result.problem.candidates
    for block in range(3):
        for name, scheme in (("mlp.down_proj", "fp8"), ("self_attn.o_proj", "fp8"), ("mlp.up_proj", "mxfp4")):
            assert found[f"model.layers.{block}.{name}"] == offered[scheme].config


def test_of_two_patterns_of_the_configuration_the_first_one_still_decides() -> None:
    base = tiny_template().get_config(scheme="mxfp4", layer_config={"*.1.mlp.down_proj": "fp8", "*.down_proj": "int4_wo_32"})
    found = schemes_of(selected(lambda *_: FLOAT, "mxfp4", "bf16", base=base, fixed=["*.down_proj"]).config)
    for block, pattern in enumerate(("*.down_proj", "*.1.mlp.down_proj", "*.down_proj")):
        assert found[f"model.layers.{block}.mlp.down_proj"] == base.layer_quant_config[pattern]


def test_a_candidate_that_does_not_fit_a_group_is_not_offered_for_it() -> None:
    chooses = Chooses(lambda problem, group: min(problem.sizes[group], key=lambda one: problem.sizes[group][one]))
    budget, base = Budget(kl=1.0), run_config("fp8")
    result = select_schemes(small_model(), ["fp8", "int4_wo_128"], budget, batches(1), base=base, selector=chooses)
    fitting = {name.rpartition(".")[2]: set(sizes) for name, sizes in result.problem.sizes.items()}
    assert fitting["down_proj"] == {"fp8", "int4_wo_128"}  # 128 input channels, the others 64
    assert fitting["o_proj"] == {"fp8"}
    with pytest.raises(ConfigError, match=r"no candidate fits 'model\.layers\.0\.self_attn\.q_proj/k_proj/v_proj' \(.*128.*\): add"):
        select_schemes(small_model(), ["uint4_wo_128", "int4_wo_128"], budget, batches(1), base=base, selector=chooses)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(bits=3), r"a budget of 3 bits per weight cannot be met with fp8, mxfp4: they reach 4\.25 to 8\.0\d* bits per weight over"),
        (Budget(bits=9), r"Give a smaller budget, or a larger candidate"),
        (Budget(size=1000), r"they reach 1,\d{3},\d{3} to 2,\d{3},\d{3} bytes .* Give a larger budget, or a smaller candidate"),
    ],
)
def test_a_budget_out_of_reach_is_refused_with_the_range(budget: Budget, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        selected(lambda *_: "fp8", "fp8", "mxfp4", budget=budget)


def test_what_a_selector_must_not_do_is_named() -> None:
    with pytest.raises(
        PluginError, match=r"the selector Chooses chooses 'fp4' for 'model\.layers\.0\..*', whose candidates are fp8, mxfp4"
    ):
        selected(lambda *_: "fp4", "fp8", "mxfp4")
    with pytest.raises(PluginError, match=r"chooses schemes of [\d,]+ bytes, but the budget allows"):
        selected(lambda *_: "fp8", "fp8", "mxfp4", budget=Budget(bits=5))


def test_data_are_asked_for() -> None:
    with pytest.raises(CalibrationError, match="needed by a selection of schemes"):
        select_schemes(tiny_model(), ["fp8", "mxfp4"], Budget(bits=5), None, selector=Chooses(lambda *_: "fp8"))


def test_from_disk_and_in_memory_the_problem_is_the_same() -> None:
    found: list[SelectionProblem] = []
    chooses = Chooses(lambda problem, group: (found.append(problem), "mxfp4")[1])
    for model in (tiny_model_dir(), tiny_model(torch.bfloat16)):
        select_schemes(model, ["fp8", "mxfp4"], Budget(bits=5), DATA, selector=chooses)
    first, last = found[0], found[-1]
    assert first is not last
    assert (first.groups, first.sizes, first.other_bytes) == (last.groups, last.sizes, last.other_bytes)


def test_the_json_form_and_the_picture_say_what_was_chosen() -> None:
    result = selected(by_block)
    facts = json.loads(json.dumps(result.to_dict()))
    assert facts["choices"] == dict(result.selection.choices)
    assert facts["total_bytes"] == result.total_bytes
    assert QConfig.from_dict(json.loads(json.dumps(result.config.to_dict()))).layer_quant_config == result.config.layer_quant_config
    assert curve_svg(result.to_dict()).startswith("<svg ")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mxfp4", "fp8"], "mxfp4"),
        (["bf16", "fp8"], "fp8"),
        (["fp8", "nvfp4"], "nvfp4"),
        (["bf16", "int4_wo_32", "nvfp4", "fp8"], "nvfp4"),
    ],
)
def test_a_selection_starts_from_a_scheme_that_shares_global_scales_if_there_is_one(names: list[str], expected: str) -> None:
    assert base_scheme(names) == expected
