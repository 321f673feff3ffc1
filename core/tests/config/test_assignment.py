"""Fields of configurations can be assigned: each is checked at once, and all are checked together on use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.config.algorithm import AlgoConfig
from quark.config.enums import Dtype, QSchemeType
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers import quantizer_for


def int4(group: int = 128) -> QTensorConfig:
    return QTensorConfig("int4", "PerGroupMinMaxObserver", False, "per_group", ch_axis=-1, group_size=group, symmetric=True)


def test_fields_are_assigned_in_the_documented_ways() -> None:
    config = QConfig(global_quant_config=QLayerConfig(weight=int4()))
    config.global_quant_config.weight.group_size = 64
    assert config.global_quant_config.weight == int4(64)
    config.global_quant_config.weight.set_group_size(32)
    assert config.global_quant_config.weight == int4(32)
    config.global_quant_config.weight = int4(16)
    assert config.global_quant_config == QLayerConfig(weight=int4(16))
    config.global_quant_config = QLayerConfig()
    assert config == QConfig(global_quant_config=QLayerConfig())


def test_names_become_members_on_assignment_too() -> None:
    spec = int4()
    spec.dtype, spec.qscheme = "fp8_e4m3", "per_tensor"  # type: ignore[assignment]
    assert (spec.dtype, spec.qscheme) == (Dtype.fp8_e4m3, QSchemeType.per_tensor)


def test_stages_are_the_documented_list() -> None:
    two = [int4(), int4()]
    assert QLayerConfig(weight=two).weight == QLayerConfig(weight=tuple(two)).weight == two
    assert isinstance(QLayerConfig.from_dict(QLayerConfig(weight=two).to_dict()).weight, list)


SPEC, LAYER, MODEL = int4(), QLayerConfig(weight=int4()), QConfig(global_quant_config=QLayerConfig())
REFUSED: dict[str, tuple[Any, str, Any, str]] = {
    "group size": (SPEC, "group_size", -5, "group_size=-5 is not a size"),
    "group size as text": (SPEC, "group_size", "64", "group_size='64' is not a size"),
    "group size as bool": (SPEC, "group_size", True, "group_size=True is not a size"),
    "dtype": (SPEC, "dtype", 8, "expected a Dtype"),
    "block size": (SPEC, "block_size", [1], "two positive whole numbers"),
    "scale format": (SPEC, "scale_format", "E 1", "scale_format='E 1' is not the name"),
    "weight": (LAYER, "weight", "int8", "must be a QTensorConfig"),
    "static groups": (LAYER, "input_tensors", int4(), "input_tensors cannot be static with a scale per group"),
    "global": (MODEL, "global_quant_config", None, "global_quant_config must be a QLayerConfig"),
    "exclude": (MODEL, "exclude", "lm_head", "must be a list"),
    "floor": (MODEL, "min_kv_scale", -1.0, "min_kv_scale=-1.0 is negative"),
}


@pytest.mark.parametrize(("owner", "field", "value", "words"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_a_field_cannot_have_is_refused_at_once_and_the_old_one_stays(owner: Any, field: str, value: Any, words: str) -> None:
    before = getattr(owner, field)
    with pytest.raises(ConfigError, match=words):
        setattr(owner, field, value)
    assert getattr(owner, field) == before


@pytest.mark.parametrize("size", [None, 0, 1.5, "32"])
def test_set_group_size_wants_a_size(size: Any) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        int4().set_group_size(size)


def test_fields_that_do_not_exist_cannot_be_assigned() -> None:
    for owner in (int4(), QLayerConfig(), MODEL):
        with pytest.raises(AttributeError):
            owner.grop_size = 3  # type: ignore[union-attr]


def test_several_fields_may_be_assigned_in_any_order_and_must_agree_in_the_end() -> None:
    spec = QTensorConfig(dtype="int4", is_dynamic=False, symmetric=True)
    spec.qscheme = "per_group"  # type: ignore[assignment]
    config = QConfig(global_quant_config=QLayerConfig(weight=spec))
    with pytest.raises(ConfigError, match="per_group needs ch_axis and group_size"):
        config.copied()
    spec.ch_axis, spec.group_size = -1, 32
    assert config.copied() == config


@given(st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 64]))
def test_a_quantizer_stays_what_it_was_made_as(first: int, second: int) -> None:
    """Equal specs share a quantizer; a spec that changes afterwards no longer shares it."""
    spec = int4(first)
    made = quantizer_for(spec, activation=False)
    spec.group_size = second
    assert made.spec == int4(first)
    assert quantizer_for(spec, activation=False).spec == int4(second)
    assert quantizer_for(int4(first), activation=False).spec == int4(first)


def _config_of_every_field() -> QConfig:
    return QConfig(
        global_quant_config=QLayerConfig(weight=[int4(), int4()]),
        exclude=["a"],
        algo_config=[AlgoConfig(name="x")],
        layer_quant_config={"b": QLayerConfig(weight=int4())},
        layer_type_quant_config={"Linear": QLayerConfig(weight=int4())},
        kv_cache_quant_config={"c": QLayerConfig(weight=int4())},
        shared_scale_groups=[["q", "k"]],
        softmax_quant_spec=int4(),
    )


def _changeable(value: Any) -> Iterator[Any]:
    """Yield every object inside a value that can be changed."""
    if isinstance(value, dict | list) or attrs.has(type(value)):
        yield value
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else attrs.astuple(value, recurse=False)
        for one in inner:
            yield from _changeable(one)


def test_a_copy_shares_nothing_that_can_be_changed() -> None:
    config = _config_of_every_field()
    copy = config.copied()
    assert copy == config == _config_of_every_field()
    of_copy = {id(one) for one in _changeable(copy)}
    assert len(of_copy) > 15
    assert [one for one in _changeable(config) if id(one) in of_copy] == []
    for layer in (config.global_quant_config, *config.layer_quant_config.values(), *config.layer_type_quant_config.values()):
        layer.input_tensors = QTensorConfig(dtype="int8", is_dynamic=True)
    config.global_quant_config.weight[0].group_size = 7
    config.kv_cache_quant_config["c"].weight = None
    config.softmax_quant_spec.group_size = 7
    config.shared_scale_groups[0].append("v")
    config.exclude.append("d")
    config.algo_config[0].name = "y"
    assert copy == _config_of_every_field()


def test_layer_types_come_back_from_json_as_equal() -> None:
    class Linear:
        """A stand-in for torch's class, since a class is stored by its name."""

    config = QConfig(global_quant_config=QLayerConfig(), layer_type_quant_config={Linear: QLayerConfig(weight=int4())})
    assert QConfig.from_dict(config.to_dict()) == config
    assert config != QConfig(global_quant_config=QLayerConfig(), layer_type_quant_config={"Conv2d": QLayerConfig(weight=int4())})
