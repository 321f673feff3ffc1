"""`quark.models.plan.mixtures.ExpertNames`; separation of experts is tested with the families that have them."""

from __future__ import annotations

import pytest

from quark.config.architecture import Architecture
from quark.models.plan.mixtures import ExpertNames


@pytest.mark.parametrize(
    ("architecture", "holder"),
    [
        (Architecture(model_type="acme", experts="moe.specialists"), "moe.specialists"),
        (Architecture(model_type="acme", experts="experts"), "experts"),
        (None, "experts"),
    ],
)
def test_layers_of_experts_are_found_by_the_module_that_holds_them(architecture: Architecture | None, holder: str) -> None:
    names = ExpertNames(architecture)
    layer = f"layers.0.{holder}.12.up_proj"
    assert names.expert(layer) == f"layers.0.{holder}.12"
    assert names.projection(layer) == f"layers.0.{holder}.*.up_proj"
    others = [f"layers.0.{holder}_3.up_proj", f"layers.0.{holder}.gate.up_proj", f"layers.0.x{holder}.3.up_proj", "layers.0.up_proj"]
    assert names.among([layer, *others]) == [layer]
    assert [names.expert(name) for name in others] == others
    assert [names.projection(name) for name in others] == [None] * 4


def test_a_family_without_experts_has_no_layers_of_experts() -> None:
    assert ExpertNames(Architecture(model_type="acme")).among(["layers.0.mlp.experts.1.up_proj"]) == []
