"""The plan: the spec of each layer with its reason, and all errors of a configuration at once."""

import attrs
import pytest
import torch
from torch import nn

from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.models.plan.plan_text import plan_lines
from quark.models.plan.quant_plan import make_plan
from quark.models.plan.rules import layer_config_for
from quark.plugins import schemes


def int4(group: int = 32) -> QTensorConfig:
    return QTensorConfig(
        dtype="int4",
        observer_cls="PerGroupMinMaxObserver",
        qscheme="per_group",
        ch_axis=-1,
        group_size=group,
        symmetric=True,
        is_dynamic=False,
        round_method="half_even",
        scale_type="float",
    )


def fp8() -> QTensorConfig:
    return QTensorConfig(dtype="fp8_e4m3", observer_cls="PerTensorMinMaxObserver", qscheme="per_tensor", symmetric=True, is_dynamic=False)


def model() -> nn.Module:
    """Two blocks, each with q, k, v; an embedding; a head. On meta: a plan needs no weights."""
    with torch.device("meta"):
        blocks = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(64, 32) for n in ("q_proj", "k_proj", "v_proj")} | {"norm": nn.LayerNorm(64)}) for _ in range(2)
        )
        return nn.ModuleDict({"embed": nn.Embedding(10, 64), "layers": blocks, "lm_head": nn.Linear(64, 10)})


GLOBAL = QLayerConfig(weight=int4())


def weights(plan: object) -> dict[str, object]:
    return {r.name: r.config and r.config.weight for r in plan.rows}


def test_global_reaches_linear_layers_but_no_embedding() -> None:
    found = weights(make_plan(model(), QConfig(GLOBAL)))
    assert found["embed"] is None
    assert found["layers.0.q_proj"] == int4()
    assert found["lm_head"] == int4()


def test_precedence_is_exclude_then_pattern_then_type_then_global() -> None:
    config = QConfig(
        GLOBAL,
        exclude=["lm_head"],
        layer_quant_config={
            "*layers.0.*": QLayerConfig(weight=fp8()),
            "*q_proj": QLayerConfig(weight=int4(64)),
            "lm_head": QLayerConfig(weight=fp8()),
        },
        layer_type_quant_config={nn.Linear: QLayerConfig(weight=int4(16))},
    )
    found = weights(make_plan(model(), config))
    assert found["lm_head"] is None
    assert found["layers.0.q_proj"] == fp8(), "the first matching pattern wins"
    assert found["layers.1.q_proj"] == int4(64)
    assert found["layers.1.k_proj"] == int4(16)


def test_a_cache_pattern_adds_outputs_and_leaves_the_rest_of_each_layer_alone() -> None:
    config = QConfig(GLOBAL, exclude=["layers.0.k_proj"], kv_cache_quant_config={"*k_proj": QLayerConfig(output_tensors=fp8())})
    rows = {r.name: r for r in make_plan(model(), config).rows}
    assert rows["layers.0.k_proj"].config == QLayerConfig(output_tensors=fp8()), "excluded: only its output"
    assert rows["layers.1.k_proj"].config == QLayerConfig(weight=int4(), output_tensors=fp8()), "not hurt by the other layer's exclusion"
    assert "layers.0.k_proj" in make_plan(model(), config).excluded


def test_the_output_of_a_layer_that_feeds_the_cache_is_that_of_the_cache_patterns() -> None:
    # Configurations that follow AMD Quark's documentation say it in both places; a change of one reaches the
    # layer only there.
    entry, other = QLayerConfig(weight=int4(), output_tensors=fp8()), attrs.evolve(fp8(), dtype="fp8_e5m2")
    config = QConfig(GLOBAL, layer_quant_config={"*k_proj": entry}, kv_cache_quant_config={"*k_proj": QLayerConfig(output_tensors=other)})
    assert layer_config_for(config, "layers.0.k_proj", nn.Linear).config == QLayerConfig(weight=int4(), output_tensors=other)
    bare = attrs.evolve(config, layer_quant_config={"*k_proj": QLayerConfig(weight=int4())})
    assert layer_config_for(bare, "layers.0.k_proj", nn.Linear).config == QLayerConfig(weight=int4(), output_tensors=other)


def test_a_layer_type_may_be_given_by_name_as_in_json() -> None:
    config = QConfig(GLOBAL, layer_type_quant_config={"Linear": QLayerConfig(weight=fp8())})
    assert layer_config_for(config, "x", nn.Linear).config == QLayerConfig(weight=fp8())


def test_each_row_says_which_rule_decided() -> None:
    config = QConfig(GLOBAL, exclude=["*v_proj"], layer_quant_config={"lm_head": QLayerConfig(weight=fp8())})
    reasons = {r.name: r.reason for r in make_plan(model(), config).rows}
    assert reasons["layers.0.v_proj"] == "excluded: *v_proj"
    assert reasons["lm_head"] == "pattern: lm_head"
    assert reasons["layers.0.q_proj"] == "global"


def test_groups_that_do_not_divide_are_all_listed_with_schemes_that_fit() -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(model(), QConfig(QLayerConfig(weight=int4(48))))
    text = str(error.value)
    assert "7 layer(s)" in text
    assert "layers.{0-1}.q_proj, layers.{0-1}.k_proj, layers.{0-1}.v_proj, lm_head" in text
    assert "48" in text
    assert "int4_wo_64" in text
    assert "int4_wo_128" not in text.split("fit:")[1]


def test_one_misfit_of_weight_and_input_is_told_once_and_no_refused_scheme_is_named_as_one_that_fits() -> None:
    asked = schemes().load_config("mx6")(block_size=48)
    with pytest.raises(ConfigError) as error:
        make_plan(model(), QConfig(asked, scheme="mx6"))
    text = str(error.value)
    assert text.count("cannot be quantized as asked") == 1
    assert "input_tensors and weight: " in text
    assert "fit:" not in text
    assert "The scheme 'mx6' fits with its default options" in text


def test_a_scheme_whose_weight_fits_and_whose_input_does_not_is_not_named_as_one_that_fits() -> None:
    # 32 divides 96 and 64 does not: int4_wa_64 quantizes both, and a spec of weights alone is refused here.
    with torch.device("meta"):
        layer = nn.ModuleDict({"layer": nn.Linear(96, 64)})
    config = QConfig(QLayerConfig(input_tensors=attrs.evolve(int4(64), is_dynamic=True), weight=int4(32)))
    with pytest.raises(ConfigError) as error:
        make_plan(layer, config)
    named = str(error.value).split("fit: ")[1].rstrip(".").split(", ")
    assert {"int4_wo_32", "int4_wo_per_channel"} == set(named)


@pytest.mark.parametrize("field", ["exclude", "layer_quant_config", "kv_cache_quant_config"])
def test_a_pattern_that_matches_nothing_is_told_of_and_an_error_only_on_request(field: str) -> None:
    value = ["*qproj"] if field == "exclude" else {"*qproj": QLayerConfig(output_tensors=fp8())}
    (warning,) = make_plan(model(), QConfig(GLOBAL, **{field: value})).warnings
    assert f"the pattern '*qproj' in {field} matches no layer" in warning
    assert "did you mean '*q_proj'?" in warning
    with pytest.raises(ConfigError, match=rf"'\*qproj' in {field} matches no layer"):
        make_plan(model(), QConfig(GLOBAL, **{field: value}, strict=True))


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("lm_haed", "did you mean 'lm_head'?"),
        ("layers.0.qproj", "did you mean 'layers.0.q_proj'?"),
        ("*.1.vproj", "did you mean '*1.v_proj'?"),
        ("*", None),
        ("*.###", "a layer of this model is 'lm_head'"),
    ],
)
def test_the_closest_name_is_offered_for_a_pattern_that_matches_nothing(pattern: str, hint: str | None) -> None:
    warnings = make_plan(model(), QConfig(GLOBAL, exclude=[pattern])).warnings
    assert [hint in warning for warning in warnings] == ([] if hint is None else [True])


FP8 = QLayerConfig(weight=fp8())


@pytest.mark.parametrize(
    ("exclude", "patterns", "others"),
    [
        (["*q_proj"], ["*0.q_proj"], "exclude '*q_proj'"),
        ([], ["*_proj", "*.q_proj"], "the pattern '*_proj' before it"),
        (["*0.q_proj"], ["*1*", "*.q_proj"], "exclude '*0.q_proj' and the pattern '*1*' before it"),
    ],
)
def test_a_pattern_that_other_rules_leave_nothing_is_told_of_and_an_error_on_request(
    exclude: list[str], patterns: list[str], others: str
) -> None:
    config = QConfig(GLOBAL, exclude=exclude, layer_quant_config=dict.fromkeys(patterns, FP8))
    (warning,) = make_plan(model(), config).warnings
    start = f"the pattern '{patterns[-1]}' in layer_quant_config has no effect"
    assert warning.startswith(f"{start}, because other rules decide for all layers that it matches")
    assert f"): {others}. " in warning
    with pytest.raises(ConfigError, match="has no effect, because other rules decide for all layers that it matches"):
        make_plan(model(), attrs.evolve(config, strict=True))


def test_a_pattern_that_decides_for_one_layer_is_not_told_of() -> None:
    config = QConfig(GLOBAL, exclude=["*1.q_proj"], layer_quant_config={"*k_proj": FP8, "*.q_proj": FP8, "*1.*": FP8})
    assert not make_plan(model(), config).warnings


def test_the_plan_counts_what_every_rule_matches() -> None:
    fine = QLayerConfig(weight=int4(16))
    config = QConfig(
        GLOBAL,
        exclude=["lm_head", "*norm", "*.gate"],
        layer_quant_config={"*layers.0*": fine},
        layer_type_quant_config={nn.Linear: fine, nn.LayerNorm: fine},
    )
    plan = make_plan(model(), config)
    assert [(r.field, r.rule, r.layers) for r in plan.rules] == [
        ("exclude", "lm_head", 1),
        ("exclude", "*norm", 2),
        ("exclude", "*.gate", 0),
        ("layer_quant_config", "*layers.0*", 3),
        ("layer_type_quant_config", "Linear", 7),
        ("layer_type_quant_config", "LayerNorm", 0),
    ]
    assert "  exclude matches: lm_head 1, *norm 2, *.gate 0" in plan_lines(plan)
    assert plan.to_dict()["rules"][2]["layers"] == 0


def test_an_excluded_pattern_may_match_a_module_that_is_never_quantized() -> None:
    assert not make_plan(model(), QConfig(GLOBAL, exclude=["*norm"], strict=True)).warnings


def test_the_templates_own_patterns_may_match_nothing() -> None:
    family = Architecture(model_type="acme", exclude_layers_name=("lm_head", "*.gate.linear"))
    assert not make_plan(model(), QConfig(GLOBAL, exclude=["lm_head", "*.gate.linear"], strict=True), family).warnings


@pytest.mark.parametrize("key", [nn.LayerNorm, "LayerNorm"])
def test_layers_of_a_type_that_cannot_be_quantized_stay_float_and_are_named(key: type | str) -> None:
    config = QConfig(GLOBAL, layer_type_quant_config={key: QLayerConfig(weight=fp8())})
    plan = make_plan(model(), config)
    assert plan.rows == make_plan(model(), QConfig(GLOBAL)).rows
    (warning,) = plan.warnings
    assert "LayerNorm" in warning
    assert "2 layer(s) stay float: layers.{0-1}.norm." in warning
    config.strict = True
    with pytest.raises(ConfigError, match=r"LayerNorm.*Supported types are .*Linear"):
        make_plan(model(), config)


def test_a_layer_type_of_which_the_model_has_none_is_told_of() -> None:
    (warning,) = make_plan(model(), QConfig(GLOBAL, layer_type_quant_config={nn.Conv2d: QLayerConfig(weight=fp8())})).warnings
    assert "Conv2d, but this model has no layer of that type" in warning


def test_everything_wrong_is_told_at_once() -> None:
    types = {nn.LayerNorm: GLOBAL}
    with pytest.raises(ConfigError) as error:
        make_plan(model(), QConfig(QLayerConfig(weight=int4(48)), exclude=["nothing"], layer_type_quant_config=types, strict=True))
    assert len(str(error.value).splitlines()) == 3


def test_a_tied_head_that_is_to_be_quantized_is_noted() -> None:
    tied = model()
    tied["lm_head"].weight = tied["embed"].weight
    plan = make_plan(tied, QConfig(GLOBAL))
    assert [r.tied_to for r in plan.rows if r.name == "lm_head"] == ["embed"]
    assert any("'embed' stays float" in note for note in plan.notes)
    assert not make_plan(tied, QConfig(GLOBAL, exclude=["lm_head"])).notes


def test_the_text_gathers_layers_that_differ_only_in_their_block() -> None:
    lines = plan_lines(make_plan(model(), QConfig(GLOBAL, exclude=["lm_head"])))
    assert lines[0] == "Plan: 6 of 8 layers get a quantized weight"
    assert any("layers.{0-1}.q_proj" in line and "int4/group 32" in line for line in lines)
    assert sum("q_proj" in line for line in lines) == 1


def test_printing_the_plan_shows_the_text() -> None:
    plan = make_plan(model(), QConfig(GLOBAL, exclude=["lm_head"]))
    assert str(plan).splitlines() == plan_lines(plan)


def test_the_plan_is_json() -> None:
    import json

    data = json.loads(json.dumps(make_plan(model(), QConfig(GLOBAL)).to_dict()))
    assert data["rows"][1]["config"]["weight"]["dtype"] == "int4"


def test_only_static_activations_need_calibration() -> None:
    static = QLayerConfig(weight=fp8(), input_tensors=fp8())
    assert len(make_plan(model(), QConfig(static)).calibrated) == 7
    assert not make_plan(model(), QConfig(GLOBAL)).calibrated
