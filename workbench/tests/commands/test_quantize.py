"""``quark quantize``: the run that its options ask for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from quark_tiny_model import tiny_model_dir
from quark_workbench.cli.main import program


@pytest.mark.parametrize("options", [(), ("--deterministic",)])
def test_the_sums_of_a_run_are_deterministic_where_that_is_asked_for(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    def quantized(*_: Any, ranks: Any, **__: Any) -> Any:
        found.append(ranks.is_deterministic)
        return SimpleNamespace(quantized=())

    monkeypatch.setattr("quark.runs.quantize_checkpoint", quantized)
    arguments = ["quantize", str(tiny_model_dir()), str(tmp_path), "--scheme", "mxfp4", *options]
    CliRunner().invoke(program(), arguments, catch_exceptions=False)
    assert found == [bool(options)]
