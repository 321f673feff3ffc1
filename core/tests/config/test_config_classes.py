"""Configuration classes: JSON round trips, copies, both ways of changing a field, and refused values."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.base.version import VERSION
from quark.config.algorithm import AlgoConfig
from quark.config.enums import DeviceType, Dtype, QSchemeType, QuantizationMode, RoundType, ScaleType, ZeroPointType
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError

DTYPES = st.sampled_from(list(Dtype))
NAMES = st.text("abc.*_01", min_size=1, max_size=12)


@st.composite
def tensor_configs(draw: st.DrawFn, *, static_groups: bool = True) -> QTensorConfig:
    qscheme = draw(st.sampled_from([None, *QSchemeType]))
    grouped = qscheme is QSchemeType.per_group
    return QTensorConfig(
        dtype=draw(DTYPES),
        observer_cls=draw(st.sampled_from([None, "PerTensorMinMaxObserver", "AcmeObserver"])),
        is_dynamic=draw(st.sampled_from([None, True]) if grouped and not static_groups else st.sampled_from([None, True, False])),
        qscheme=qscheme,
        ch_axis=draw(st.integers(-2, 2)),
        group_size=draw(st.sampled_from([-1, 16, 128]) if grouped else st.sampled_from([None, 32])),
        block_size=draw(st.just([4, 8]) if qscheme is QSchemeType.per_block else st.none()),
        symmetric=draw(st.sampled_from([None, True, False])),
        round_method=draw(st.sampled_from([None, *RoundType])),
        scale_type=draw(st.sampled_from([None, *ScaleType])),
        scale_format=draw(st.sampled_from([None, "float32", "e8m0", "e4m3", "e5m3"])),
        scale_calculation_mode=draw(st.sampled_from([None, "even", "floor", "ceil"])),
        mx_element_dtype=draw(st.none() | DTYPES),
        zero_point_type=draw(st.sampled_from(ZeroPointType)),
        is_scale_quant=draw(st.booleans()),
    )


def slots(*, static_groups: bool) -> st.SearchStrategy[Any]:
    one = tensor_configs(static_groups=static_groups)
    return st.none() | one | st.lists(one, min_size=1, max_size=2)


def layer_configs() -> st.SearchStrategy[QLayerConfig]:
    weights, activations = slots(static_groups=True), slots(static_groups=False)
    return st.builds(
        QLayerConfig,
        input_tensors=activations,
        output_tensors=activations,
        weight=weights,
        bias=weights,
        target_device=st.none() | st.sampled_from(DeviceType),
    )


MODEL_CONFIGS = st.builds(
    QConfig,
    global_quant_config=layer_configs(),
    exclude=st.lists(NAMES, max_size=3),
    layer_type_quant_config=st.dictionaries(st.sampled_from(["Linear", "Conv2d"]), layer_configs(), max_size=2),
    layer_quant_config=st.dictionaries(NAMES, layer_configs(), max_size=2),
    kv_cache_quant_config=st.dictionaries(NAMES, layer_configs(), max_size=2),
    kv_cache_post_rope=st.booleans(),
    softmax_quant_spec=st.none() | tensor_configs(),
    quant_mode=st.sampled_from(QuantizationMode),
)


@given(tensor_configs())
def test_a_tensor_config_is_read_back_from_json_as_it_was(config: QTensorConfig) -> None:
    assert QTensorConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(layer_configs())
def test_a_layer_config_is_read_back_from_json_as_it_was(config: QLayerConfig) -> None:
    assert QLayerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(MODEL_CONFIGS)
def test_a_model_config_is_read_back_from_json_as_it_was(config: QConfig) -> None:
    assert QConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(MODEL_CONFIGS, st.lists(NAMES, max_size=2))
def test_both_ways_of_changing_a_field_agree_and_leave_the_original_alone(config: QConfig, exclude: list[str]) -> None:
    before = config.to_dict()
    assert dataclasses.replace(config, exclude=exclude) == attrs.evolve(config, exclude=exclude)
    assert dataclasses.replace(config, exclude=exclude).exclude == exclude
    assert config.to_dict() == before


@pytest.mark.parametrize(
    "config",
    [
        QTensorConfig(dtype="int8"),
        QLayerConfig(),
        QConfig(global_quant_config=QLayerConfig()),
        AlgoConfig(name="x"),
    ],
    ids=lambda c: type(c).__name__,
)
def test_dataclass_functions_work_on_every_configuration_class(config: Any) -> None:
    assert dataclasses.is_dataclass(config)
    assert dataclasses.replace(config) == config == attrs.evolve(config)
    assert [f.name for f in dataclasses.fields(config)] == [a.name for a in attrs.fields(type(config))]


def test_lists_and_dicts_given_to_a_model_config_are_not_shared_with_it() -> None:
    exclude, layers = ["lm_head"], {"a": QLayerConfig()}
    first = QConfig(global_quant_config=QLayerConfig(), exclude=exclude, layer_quant_config=layers)
    second = dataclasses.replace(first)
    first.exclude.append("x")
    first.layer_quant_config["b"] = QLayerConfig()
    assert exclude == second.exclude == ["lm_head"]
    assert list(layers) == list(second.layer_quant_config) == ["a"]


def test_a_single_algorithm_object_is_a_list_of_one() -> None:
    algorithm = AlgoConfig(name="x")
    assert QConfig(global_quant_config=QLayerConfig(), algo_config=algorithm).algo_config == [algorithm]


def test_the_pre_quantization_option_of_old_configurations_goes_first() -> None:
    first, second = AlgoConfig(name="a"), AlgoConfig(name="b")
    config = QConfig(global_quant_config=QLayerConfig(), pre_quant_opt_config=first, algo_config=second)
    assert config.algo_config == [first, second]
    assert dataclasses.replace(config) == config


def test_the_format_of_a_plugin_is_a_dtype_like_any_other() -> None:
    spec = QTensorConfig(dtype="acme_nf3")
    assert QTensorConfig.from_dict(spec.to_dict()) == spec
    assert spec.dtype == Dtype("acme_nf3")


def test_older_json_keys_of_a_tensor_are_understood() -> None:
    spec = QTensorConfig.from_dict({"dtype": "INT8", "dynamic": True, "axis": 1, "qscheme": "per_channel"})
    assert (spec.is_dynamic, spec.ch_axis, spec.dtype) == (True, 1, Dtype.int8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QTensorConfig.from_dict({"dtype": "int8", "grup_size": 3}), "unknown keys"),
        (lambda: QTensorConfig.from_dict({}), "'dtype' is missing"),
        (lambda: QTensorConfig(dtype="int4", qscheme="per_group", ch_axis=-1), "per_group needs"),
        (lambda: QTensorConfig(dtype="int4", qscheme="per_channel"), "per_channel needs"),
        (lambda: QTensorConfig(dtype="int4", qscheme="per_block"), "per_block needs"),
        (lambda: QTensorConfig(dtype="int4", block_size=[1]), "two positive whole numbers"),
        (lambda: QTensorConfig(dtype="int4", group_size=0), "not a size"),
        (lambda: QTensorConfig(dtype="int4", scale_format="E1 M6"), "scale_format='E1 M6'"),
        (lambda: QTensorConfig(dtype=8), "expected a Dtype"),
        (lambda: QLayerConfig(weight="int8"), "must be a QTensorConfig"),
        (lambda: QConfig(global_quant_config=None), "must be a QLayerConfig"),
        (lambda: QConfig(global_quant_config=QLayerConfig(), exclude="lm_head"), "must be a list"),
        (lambda: QConfig(global_quant_config=QLayerConfig(), min_kv_scale=-5), "negative"),
        (lambda: QConfig.from_dict({}), "no 'global_quant_config'"),
    ],
)
def test_bad_values_are_refused_with_the_cure(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_static_activations_with_a_scale_per_group_are_refused() -> None:
    spec = QTensorConfig(dtype="int4", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=False)
    assert QLayerConfig(weight=spec).weight == spec
    with pytest.raises(ConfigError, match="cannot be static"):
        QLayerConfig(input_tensors=spec)


def test_as_many_patterns_as_are_read_are_read_and_names_in_full_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.config.model._MOST_PATTERNS", 2)
    stored = QConfig(global_quant_config=QLayerConfig(), exclude=["a.*", "b.*", "c", "d"]).to_dict()
    assert QConfig.from_dict(stored).exclude == ["a.*", "b.*", "c", "d"]
    with pytest.raises(ConfigError, match="'exclude' has 3 patterns with wildcards, and at most 2 are read"):
        QConfig.from_dict(stored | {"exclude": ["a.*", "b.*", "c.*"]})


def test_a_stored_configuration_keeps_the_version_that_wrote_it() -> None:
    stored = QConfig(global_quant_config=QLayerConfig()).to_dict()
    assert QConfig.from_dict(stored | {"version": "0.8.2"}).version == "0.8.2"
    assert QConfig.from_dict({name: value for name, value in stored.items() if name != "version"}).version == VERSION
