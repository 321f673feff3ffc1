"""Templates in JSON files: facts as data; an error names the file and the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from typer.testing import CliRunner

from quark.config.templates import LLMTemplate
from quark.errors import ConfigError, QuarkError
from quark.models.plan.family import architecture_of
from quark.plugins import templates
from quark_tiny_model import tiny_model, tiny_model_dir
from quark_workbench.cli.main import program
from quark_workbench.template_file import read_template_file, register_template_file

AMD = {
    "model_type": "zenith_net",
    "kv_layers_name": ["*k_proj", "*v_proj"],
    "q_layer_name": "*q_proj",
    "gate_up_layers_name": ["w1", "w3"],
    "exclude_layers_name": ["lm_head"],
    "algorithm_configs": {"gptq": {"name": "gptq", "damp_percent": 0.02}, "smoothquant": {"name": "smooth", "scaling_layers": []}},
}


@pytest.fixture(autouse=True)
def templates_of_this_test() -> Iterator[None]:
    """Unregister what a test has registered."""
    yield
    for name in templates().run_time_names():
        templates().unregister(name)


def file_of(directory: Path, data: Any) -> Path:
    path = directory / "family.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_the_form_of_amd_quark_is_read(tmp_path: Path) -> None:
    template = register_template_file(file_of(tmp_path, AMD))
    assert LLMTemplate.get("zenith_net") is template
    names = ("kv_layers_name", "q_layer_name", "gate_up_layers_name", "exclude_layers_name")
    assert {name: getattr(template, name) for name in names} == {name: AMD[name] for name in names}
    assert template.algo_config["gptq"].damp_percent == 0.02  # type: ignore[union-attr]
    assert template.get_config("fp8", "gptq", kv_cache_scheme="fp8").exclude == ["lm_head"]


def test_a_family_is_a_base_and_what_differs(tmp_path: Path) -> None:
    inner = [["self_attn.norm", ["self_attn.o_proj"]]]
    data = {"model_type": "zenith_net", "base": "llama", "head": "out", "attention_inner_norms": inner, "norm_has_unit_offset": True}
    template = read_template_file(file_of(tmp_path, data))
    expected = attrs.evolve(
        templates().load_architecture("llama"),
        model_type="zenith_net",
        head="out",
        attention_inner_norms=(("self_attn.norm", ("self_attn.o_proj",)),),
        norm_has_unit_offset=True,
    )
    assert template.architecture == expected
    assert template.algo_config["gptq"] is not None, "algorithms derive their settings from the facts"
    assert "zenith_net" not in templates(), "reading is not registering"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{", "is not JSON"),
        ([], "it holds a list: write one object"),
        ({}, "its field 'model_type' is missing or is not a text"),
        ({"heads": "out"}, "an unknown field 'heads'; did you mean 'head'?"),
        ({"head": ["out"]}, r"its field 'head' is \['out'\]: give a text or null"),
        ({"norm_has_weight": 1}, "its field 'norm_has_weight' is 1: give true or false"),
        ({"attention_value_rows": "first"}, '\'first\': give "all" or "last" or "last_of_each_head"'),
        ({"attention_inner_norms": [["a", ["b", 3]]]}, r"its field 'attention_inner_norms\[0\]\[1\]\[1\]' is 3: give a text"),
        ({"base": "lama"}, "there is no template 'lama'. Did you mean 'llama'?"),
        ({"algorithm_configs": {"gptq": {"name": "awq"}}}, "'algorithm_configs.gptq' has settings of 'awq'"),
        ({"algorithm_configs": {"gptq": {"name": "gptq", "dampp": 1}}}, "'algorithm_configs.gptq' cannot be read: .*dampp"),
        ({"algorithm_configs": {"nonsense": {"name": "gptq"}}}, "'algorithm_configs.nonsense' cannot be read"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_field(data: Any, says: str, tmp_path: Path) -> None:
    whole = {"model_type": "zenith_net", **data} if isinstance(data, dict) and data else data
    path = file_of(tmp_path, whole)
    with pytest.raises(ConfigError, match=says) as caught:
        register_template_file(path)
    assert f"the template file '{path}'" in str(caught.value)
    assert "zenith_net" not in templates()


def test_a_file_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match=r"the template file '/nowhere\.json' cannot be read: No such file"):
        read_template_file("/nowhere.json")


def test_the_command_line_takes_it(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"model_type": "llama", "base": "llama", "exclude_layers_name": ["*down_proj"]})
    common = ["plan", str(tiny_model_dir()), "--scheme", "int4_wo_64", "--no-probe", "--json", "--template-file"]
    result = CliRunner().invoke(program(), [*common, str(path)])
    assert result.exit_code == 0, result.output
    linear = {row["name"]: row["config"] for row in json.loads(result.stdout)["rows"] if row["layer_type"] == "linear"}
    floats = {name for name, config in linear.items() if config is None}
    assert floats
    assert floats == {name for name in linear if name.endswith("down_proj")}, "what the installed template leaves float is quantized"
    with pytest.raises(QuarkError, match="describes the model type 'zenith_net', but this model has the type 'llama'"):
        CliRunner().invoke(program(), [*common, str(file_of(tmp_path, AMD))], catch_exceptions=False)


def test_a_run_is_resumed_with_the_same_facts_alone(tmp_path: Path) -> None:
    register_template_file(file_of(tmp_path, {"model_type": "llama", "base": "llama"}))
    facts = architecture_of(tiny_model())
    register_template_file(file_of(tmp_path, {"model_type": "llama", "base": "llama"}))
    assert architecture_of(tiny_model()) == facts
    register_template_file(file_of(tmp_path, {"model_type": "llama", "base": "llama", "mlp_value": None}))
    assert repr(architecture_of(tiny_model())) != repr(facts), "the identity of a run names them"


def test_a_file_nested_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text('{"model_type": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ConfigError, match=r"template\.json' is nested too deeply"):
        read_template_file(path)
