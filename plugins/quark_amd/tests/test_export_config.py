"""AMD Quark's configurations of exports."""

from __future__ import annotations

import dataclasses
from typing import Any

import attrs
import pytest

from quark.errors import ConfigError
from quark_amd.export_config import ExporterConfig, JsonExporterConfig, OnnxExporterConfig


@pytest.mark.parametrize("config", [ExporterConfig(), JsonExporterConfig(), OnnxExporterConfig()], ids=lambda c: type(c).__name__)
def test_dataclass_functions_work_on_every_configuration_class(config: Any) -> None:
    assert dataclasses.is_dataclass(config)
    assert dataclasses.replace(config) == config == attrs.evolve(config)
    assert [f.name for f in dataclasses.fields(config)] == [a.name for a in attrs.fields(type(config))]


@pytest.mark.parametrize("options", [{"pack_method": "shuffle"}, {"weight_format": "packed"}], ids=str)
def test_bad_values_are_refused_with_the_cure(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="use one of re"):
        JsonExporterConfig(**options)


def test_the_export_block_can_be_changed_after_construction() -> None:
    config = ExporterConfig(json_export_config=JsonExporterConfig())
    config.json_export_config.kv_cache_group = ["*k_proj", "*v_proj"]
    assert config.json_export_config.to_dict() == {
        "weight_merge_groups": None,
        "kv_cache_group": ["*k_proj", "*v_proj"],
        "min_kv_scale": 0.0,
        "weight_format": "real_quantized",
        "pack_method": "reorder",
    }


def test_keys_that_a_later_version_may_add_to_the_export_block_are_taken() -> None:
    config = JsonExporterConfig(pack_method="order", new_key=3)
    assert config.extra == {"new_key": 3}
    assert "new_key" not in config.to_dict()
