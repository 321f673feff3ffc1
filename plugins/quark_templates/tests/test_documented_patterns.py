"""The patterns of every documented model type equal AMD Quark's template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quark.config.templates import LLMTemplate

from .readme_table import DOCUMENTED

TEMPLATES = json.loads((Path(__file__).parent / "documented_templates.json").read_text(encoding="utf-8"))


def test_every_documented_type_is_here() -> None:
    assert set(DOCUMENTED) <= set(TEMPLATES)


@pytest.mark.parametrize("model_type", TEMPLATES)
def test_patterns_are_those_of_amd_quarks_template(model_type: str) -> None:
    template, documented = LLMTemplate.get(model_type), TEMPLATES[model_type]
    queries = template.q_layer_name
    assert template.kv_layers_name == documented["kv_layers"]
    assert ([queries] if isinstance(queries, str) else queries) == documented["q_layers"]
    assert template.exclude_layers_name == documented["exclude"]
    assert template.gate_up_layers_name == documented["gate_up"]
