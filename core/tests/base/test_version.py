"""A version of transformers outside the supported range is refused by name, before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import importlib_metadata
import pytest
from torch import nn

from quark.base.version import TRANSFORMERS, VERSION, refuse_unfit_environment, transformers_version
from quark.checkpoint import import_model_from_safetensors, map_to_quark, register_layouts
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import EnvironmentConflictError
from quark.models.hf.loading import load_model
from quark.models.hf.skeleton import meta_model
from quark.runs import ModelQuantizer
from quark_tiny_model import tiny_model_dir

DOORS: dict[str, Callable[[], object]] = {
    "quantize": lambda: ModelQuantizer(QConfig(QLayerConfig())),
    "load": lambda: load_model(tiny_model_dir()),
    "plan": lambda: meta_model(tiny_model_dir()),
    "reload": lambda: import_model_from_safetensors(None, Path("export")),
    "reload by transformers": lambda: map_to_quark(nn.Linear(2, 2), QConfig(QLayerConfig())),
    "register": register_layouts,
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Simulate another installed version of transformers."""
    real = importlib_metadata.version

    def install(version: str) -> None:
        monkeypatch.setattr(importlib_metadata, "version", lambda name: version if name == "transformers" else real(name))

    return install


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("version", ["4.57.6", "5.3.0", "6.0.0"])
def test_every_door_names_the_version_and_the_range(door: str, version: str, installed: Callable[[str], None]) -> None:
    installed(version)
    expected = rf"transformers {version} is installed, but quark-core {VERSION} needs transformers{TRANSFORMERS}\. Run: pip install"
    with pytest.raises(EnvironmentConflictError, match=expected):
        DOORS[door]()


@pytest.mark.parametrize("version", ["5.4.0", "5.19.0", "5.24.0.dev0", "5.99"])
def test_versions_in_the_range_pass(version: str, installed: Callable[[str], None]) -> None:
    installed(version)
    refuse_unfit_environment()
    assert transformers_version() == version
