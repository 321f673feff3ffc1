"""Tuning runs on blocks of other kinds than Llama's.

Mixtures of experts, several inputs, states that are no attention.
"""

import pytest
import torch

import quark
from quark.plugins.catalog import catalog
from quark.torch import ModelQuantizer
from quark_algos.tuning.config import TuningConfig
from quark_devkit.check import NotApplicableError
from quark_devkit.example_models import IDS, coarse_config, example_of
from quark_devkit.subject import find_subject

QUICK = ("llama4_text", "mllama", "olmoe")
"""A block that autocast cannot run, one with cross-attention, and one with experts."""


@pytest.mark.parametrize("family", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in quark.templates().names()])
def test_blocks_of_a_family_are_tuned(family: str) -> None:
    subject = find_subject(catalog(), "template", family)
    try:
        model, config = example_of(subject), coarse_config(subject)
    except NotApplicableError as reason:
        pytest.skip(str(reason))
    config.algo_config = [TuningConfig(epochs=1)]
    model = ModelQuantizer(config).quantize_model(model, list(IDS.split(1)))
    assert model.quark_report.tuned
    with torch.no_grad():
        assert model(input_ids=IDS).logits.isfinite().all()
