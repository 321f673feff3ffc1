"""AMD Quark's functions for settings of algorithms: of a file, and of a model family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quark.errors import ConfigError
from quark.torch.quantization import load_quant_algo_config_from_file
from quark.torch.quantization.config.algo_configs import get_algo_config, get_supported_algorithm_types


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "algorithm.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("as_text", [True, False])
def test_settings_are_read_from_a_file(tmp_path: Path, as_text: bool) -> None:
    path = written(tmp_path, {"name": "gptq", "damp_percent": 0.02})
    assert load_quant_algo_config_from_file(str(path) if as_text else path).damp_percent == 0.02  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "words"),
    [({"name": "gptk"}, "Unknown algorithm name 'gptk'"), ([1], "contains a list"), ("{", "is not JSON")],
)
def test_a_file_that_says_nothing_sensible_is_refused(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_quant_algo_config_from_file(written(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json' cannot be read"):
        load_quant_algo_config_from_file(tmp_path / "nowhere.json")


def test_settings_that_an_algorithm_derives_for_a_family_are_found() -> None:
    assert "gptq" in get_supported_algorithm_types()
    assert get_algo_config("GPTQ", "llama") == get_algo_config("gptq", "llama") is not None
    assert get_algo_config("gptq", "no_such_family") is None
    with pytest.raises(ValueError, match="Unsupported algorithm: nonsense"):
        get_algo_config("nonsense", "llama")
