"""A tiny randomly initialised model of each dense family, from transformers, with its `Architecture`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import quark
from quark.config.architecture import Architecture
from quark_templates.examples import config_of
from quark_templates.plugin import DENSE

from .lacking_families import IN_TRANSFORMERS, why_lacking


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of families that the installed transformers does not have, or cannot compute."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        subject = getattr(getattr(item, "cls", None), "subject", None)
        for name in {value for value in (*parameters, subject) if isinstance(value, str)} & IN_TRANSFORMERS:
            if lacking := why_lacking(name):
                item.add_marker(pytest.mark.skip(reason=lacking))


@cache
def tiny_model(model_type: str) -> nn.Module:
    """A float32 model in evaluation mode, the same object each time; tests that change it take a copy."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type), dtype=torch.float32).eval()
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.ndim == 1):
            vector.normal_(mean=1.0, std=0.1)  # fresh norms are all alike: which of them feeds what would not show
    return model


@pytest.fixture(params=sorted(DENSE))
def family(request: pytest.FixtureRequest) -> tuple[nn.Module, Architecture]:
    return tiny_model(request.param), quark.templates().load_architecture(request.param)
