"""``to_dict`` equals the ``quantization_config`` of AMD Quark 0.13, key for key (see tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quark.config.model import QConfig
from quark.torch import LLMTemplate

GOLDEN = Path(__file__).parents[1] / "golden"
SCHEMES = sorted(path.parent.name for path in GOLDEN.glob("*/quantization_config.json"))
OURS_ALONE = {"export", "version"}
"""The exporter adds ``export``; ``version`` is whoever's wrote it."""


def recorded(scheme: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / scheme / "quantization_config.json").read_text(encoding="utf-8"))
    return found


def request(scheme: str) -> QConfig:
    cache = "fp8" if recorded(scheme)["kv_cache_quant_config"] else None
    return LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme=cache, kv_cache_post_rope=False)


def test_the_schemes_of_this_version_are_recorded() -> None:
    assert len(SCHEMES) >= 23


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_writes_what_the_reference_wrote(scheme: str) -> None:
    ours, theirs = json.loads(json.dumps(request(scheme).to_dict())), recorded(scheme)
    assert {k: v for k, v in ours.items() if k not in OURS_ALONE} == {k: v for k, v in theirs.items() if k not in OURS_ALONE}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_the_reference_wrote_is_read_as_the_same_configuration(scheme: str) -> None:
    read, made = QConfig.from_dict(recorded(scheme)), request(scheme)
    assert read.to_dict() | {"version": ""} == made.to_dict() | {"version": ""}
    assert read.kv_cache_group == recorded(scheme)["export"]["kv_cache_group"]
