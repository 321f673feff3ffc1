"""Algorithm settings by name: from their JSON form, and derived from a family's facts."""

from __future__ import annotations

from typing import Any

import pytest

from quark.config.templates.algorithms import algo_config_from_dict, canonical_algorithm, derived_config
from quark.plugins import templates


def test_settings_are_made_of_their_json_form() -> None:
    config = algo_config_from_dict({"name": "acme_runs", "strength": 0.5})
    assert config.to_dict() == {"name": "acme_runs", "blocks": None, "strength": 0.5}


def test_keys_that_the_model_has_made_needless_are_dropped() -> None:
    assert algo_config_from_dict({"name": "acme_runs", "num_attention_heads": 32, "num_key_value_heads": 8}).name == "acme_runs"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"name": "acme_run"}, "Unknown algorithm name 'acme_run'.*Did you mean 'acme_runs'"),
        ({"strength": 1}, "has no key 'name'"),
        ({"name": "acme_runs", "strenght": 1}, r"unknown keys \['strenght'\].*strength"),
        ({"name": "acme_bare"}, "lacks the keys layers"),
    ],
)
def test_settings_that_say_nothing_sensible_are_refused(content: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        algo_config_from_dict(content)


def test_settings_that_an_algorithm_derives_for_a_family_are_found() -> None:
    family = templates().load_architecture("acme_net")
    assert derived_config("acme_runs", family).blocks == "net.blocks"  # type: ignore[union-attr]
    assert derived_config("acme_bare", family) is None
    plain = derived_config("acme_plain", family)
    assert plain is not None
    assert plain.to_dict() == {"name": "acme_plain", "strength": 0.5}, "without a method of its own it has its defaults for every family"
    with pytest.raises(ValueError, match="Unsupported algorithm: nonsense"):
        canonical_algorithm("nonsense")
