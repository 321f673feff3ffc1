"""AMD Quark's clock of steps, and its questions about transformers."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from quark.common.profiler import GlobalProfiler, ProfileStep
from quark.common.utils.import_utils import is_transformers_version_higher_or_equal, is_transformers_version_lower


def test_steps_are_written_where_the_environment_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARK_PROFILING", "1")
    profiler = GlobalProfiler(tmp_path / "new" / "profile.yaml")
    with profiler.scope(ProfileStep.MODEL_LOADING), profiler.scope(ProfileStep.USER_DEFINED, user_msg='a "step"'):
        pass
    lines = (tmp_path / "new" / "profile.yaml").read_text().splitlines()
    assert [json.loads(line.removeprefix("- "))["step"] for line in lines] == ['a "step"', "Model Loading"]


def test_nothing_is_written_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARK_PROFILING", raising=False)
    with GlobalProfiler(tmp_path / "profile.yaml").scope(ProfileStep.MODEL_LOADING):
        pass
    assert list(tmp_path.iterdir()) == []


def test_versions_of_transformers_are_compared_as_versions() -> None:
    installed = version("transformers")
    assert is_transformers_version_higher_or_equal(installed)
    assert is_transformers_version_higher_or_equal("4.9")
    assert is_transformers_version_lower("1000.1")
