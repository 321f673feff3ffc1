"""``quark evaluate``: arguments that cannot be met are refused before a model is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quark.errors import UnknownNameError
from quark_tiny_model import tiny_model_dir
from quark_workbench.cli.main import program


@pytest.mark.parametrize("options", [(), ("--by-block",)])
def test_an_unknown_metric_is_refused_before_weights_are_read(options: tuple[str, ...], tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model_dir(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UnknownNameError, match="no_such_metric"):
        CliRunner().invoke(program(), ["evaluate", str(model), "--metric", "no_such_metric", *options], catch_exceptions=False)
