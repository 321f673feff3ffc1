"""Recipes: what each preset fills in, and that what is set by hand counts before it."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from quark_algos.gptq.config import BEST_DAMPING, BEST_SHARE, GPTAQConfig, GPTQConfig, QronosConfig, recipe_of

qronos = partial(QronosConfig, inside_layer_modules=[], model_decoder_layers="")
KINDS = [GPTQConfig, GPTAQConfig, qronos]


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_preset_is_careful_and_searches_scales(kind: Any) -> None:
    plain, best = recipe_of(kind(preset="reference")), recipe_of(kind(preset="best"))
    assert (plain.is_careful, best.is_careful) == (False, True)
    assert (plain.scales, best.scales) == ("minmax", "hessian")
    assert best.percdamp == BEST_DAMPING
    assert recipe_of(kind(preset="best", scale_search="mse")).scales == "mse"
    assert recipe_of(kind(block_size=64)).block == 64


@pytest.mark.parametrize("kind", [GPTQConfig, GPTAQConfig])
def test_a_damping_that_is_given_counts_whatever_the_preset_also_if_it_is_the_default(kind: Any) -> None:
    for preset, damping in product(("reference", "best"), (0.01, 0.02, 0.3)):
        assert recipe_of(kind(preset=preset, damp_percent=damping)).percdamp == damping
    assert recipe_of(kind(preset="reference")).percdamp == 0.01


def test_the_strength_of_the_correction_is_that_of_the_algorithm() -> None:
    assert recipe_of(GPTQConfig(preset="reference")).share == 0.0
    assert recipe_of(GPTAQConfig(preset="reference", alpha=0.25)).share == 0.25
    assert [recipe_of(qronos(preset=name)).share for name in ("reference", "best")] == [1.0, BEST_SHARE]
    assert recipe_of(qronos(preset="best", correction_share=0.0)).share == 0.0
    assert recipe_of(qronos(preset="reference")).percdamp is None
    for preset, alpha in product(("reference", "best"), (1e-3, 1e-4)):
        recipe = recipe_of(qronos(preset=preset, alpha=alpha))
        assert (recipe.percdamp, recipe.eigen_damping) == (None, alpha)
    assert [recipe_of(GPTAQConfig(preset=name)).is_causal for name in ("reference", "best")] == [True, False]
