"""Algorithm settings by name and from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quark.config.templates import get_algo_config, get_supported_algorithm_types, load_quant_algo_config_from_file
from quark.errors import ConfigError


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "algorithm.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("as_text", [True, False])
def test_settings_are_read_from_a_file(tmp_path: Path, as_text: bool) -> None:
    path = written(tmp_path, {"name": "acme_runs", "strength": 0.5})
    config = load_quant_algo_config_from_file(str(path) if as_text else path)
    assert config.to_dict() == {"name": "acme_runs", "blocks": None, "strength": 0.5}


def test_keys_that_the_model_has_made_needless_are_dropped(tmp_path: Path) -> None:
    path = written(tmp_path, {"name": "acme_runs", "num_attention_heads": 32, "num_key_value_heads": 8})
    assert load_quant_algo_config_from_file(path).name == "acme_runs"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"name": "acme_run"}, "Unknown algorithm name 'acme_run'.*Did you mean 'acme_runs'"),
        ({"strength": 1}, "needs the key 'name'"),
        ({"name": "acme_runs", "strenght": 1}, r"unknown keys \['strenght'\].*strength"),
        ([1], "holds a list"),
        ("{", "is not JSON"),
    ],
)
def test_a_file_that_says_nothing_sensible_is_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_quant_algo_config_from_file(written(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json' cannot be read"):
        load_quant_algo_config_from_file(tmp_path / "nowhere.json")


def test_settings_that_an_algorithm_derives_for_a_family_are_found() -> None:
    assert "acme_runs" in get_supported_algorithm_types()
    assert get_algo_config("acme_runs", "acme_net").blocks == "net.blocks"  # type: ignore[union-attr]
    assert get_algo_config("acme_bare", "acme_net") is None
    plain = get_algo_config("acme_plain", "acme_net")
    assert plain is not None
    assert plain.to_dict() == {"name": "acme_plain", "strength": 0.5}, "without a method of its own it has its defaults for every family"
    assert get_algo_config("acme_runs", "no_such_family") is None
    with pytest.raises(ValueError, match="Unsupported algorithm: nonsense"):
        get_algo_config("nonsense", "acme_net")
