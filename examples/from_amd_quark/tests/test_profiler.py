"""AMD Quark's timer of steps, and its checks of the installed transformers."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from amd_quark_scripts import profiler as module
from amd_quark_scripts.installed_packages import is_transformers_version_higher_or_equal, is_transformers_version_lower
from amd_quark_scripts.profiler import CheckpointMetric, GlobalProfiler, MetricContext, ProfileStep, SummaryMetric, profile_scope

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def _a_new_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GlobalProfiler, "_instance", None)


def test_steps_are_written_where_the_environment_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARK_PROFILING", "1")
    path = tmp_path / "new" / "profile.yaml"
    profiler = GlobalProfiler(path)
    assert GlobalProfiler("elsewhere.yaml") is profiler

    @profile_scope(ProfileStep.FREEZE_MODEL)
    def frozen(value: int) -> int:
        return value + 1

    with profiler.scope(ProfileStep.MODEL_LOADING), profiler.scope(ProfileStep.USER_DEFINED, user_msg='a "step"'):
        assert frozen(1) == 2
    with pytest.raises(ZeroDivisionError), profiler.scope(ProfileStep.EXPORT_GGUF):
        raise ZeroDivisionError
    profiler.stop()
    written = yaml.safe_load(path.read_text())
    names = ["Model Loading Start", 'a "step" Start', "Freeze Model Start", "Freeze Model End", 'a "step" End', "Model Loading End"]
    assert [entry["step"] for entry in written["memory_usage"]] == ["Start", *names, "Export GGUF Start", "Export GGUF End", "End"]
    times = [entry["timestamp"] for entry in written["memory_usage"]]
    assert times == sorted(times)
    assert all(entry["cpu_memory_mb"] > 1 for entry in written["memory_usage"])
    assert 0 <= written["total_quantization_time_seconds"] < 60
    assert written["peak_memory_mb"] >= max(entry["cpu_memory_mb"] for entry in written["memory_usage"]) * 0.9
    before = path.read_text()
    profiler.stop()
    assert path.read_text() == before, "the summary is written once"


def test_a_program_may_add_metrics_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Length(CheckpointMetric):
        name = "length"

        def get_definition(self) -> str:
            return "Letters of the step."

        def collect(self, context: MetricContext) -> int:
            return len(context.step_name or "")

    class Nothing(SummaryMetric):
        name = "nothing"

        def get_definition(self) -> str:
            return "Nothing."

        def collect(self, context: MetricContext) -> None:
            assert context.end_time is not None

    monkeypatch.setenv("QUARK_PROFILING", "1")
    profiler = GlobalProfiler(tmp_path / "profile.yaml")
    profiler.checkpoint_metrics.append(Length())
    profiler.summary_metrics.append(Nothing())
    profiler.stop()
    written = yaml.safe_load((tmp_path / "profile.yaml").read_text())
    assert written["memory_usage"][-1]["length"] == len("End")
    assert "nothing" not in written
    assert "# length: Letters of the step." in (tmp_path / "profile.yaml").read_text()


def test_the_summary_is_written_when_the_program_ends(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(module.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = f"from amd_quark_scripts.profiler import GlobalProfiler; GlobalProfiler('{tmp_path}/p')"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"QUARK_PROFILING": "1", "PYTHONPATH": paths})
    assert "total_quantization_time_seconds" in yaml.safe_load((tmp_path / "p").read_text())


def test_nothing_is_written_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARK_PROFILING", raising=False)
    with GlobalProfiler(tmp_path / "profile.yaml").scope(ProfileStep.MODEL_LOADING):
        pass
    assert list(tmp_path.iterdir()) == []


def test_every_name_of_the_documented_page_is_there() -> None:
    assert all(hasattr(module, name) for name in module.__all__)
    steps = [name for name in vars(ProfileStep) if name.isupper()]
    assert {"START", "END", "MODEL_LOADED", "CALIBRATION", "FREEZE_MODEL", "MODEL_PREPARATION", "ADVANCED_ALGORITHMS"} <= set(steps)


def test_versions_of_transformers_are_compared_as_versions() -> None:
    installed = version("transformers")
    assert is_transformers_version_higher_or_equal(installed)
    assert is_transformers_version_higher_or_equal("4.9")
    assert is_transformers_version_lower("1000.1")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A directory of packages with this distribution's metadata."""
    directory = tmp_path / "site" / "amd_quark_scripts-1.dist-info"
    directory.mkdir(parents=True)
    entries = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-quark-scripts\nVersion: 1\n")
    (directory / "entry_points.txt").write_text("[quark]\n" + "".join(f"{name} = {value}\n" for name, value in entries["quark"].items()))
    return directory.parent


_RUNS = """
import sys
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark_tiny_model import tiny_model, tiny_model_dir, tiny_template
config = tiny_template().get_config("fp8")
try:
    ModelQuantizer(config).quantize_model(tiny_model())
except ValueError:
    pass
else:
    sys.exit("static scales without data")
config = tiny_template().get_config("int4_wo_32")
ModelQuantizer(config).quantize_model(tiny_model())
quantize_checkpoint(tiny_model_dir(), "out", config)
"""


@pytest.mark.parametrize("asked", ["1", "0"])
def test_every_run_that_quantizes_is_in_the_profile_if_the_environment_asks_for_it(asked: str, installed: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(installed), str(Path(module.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"QUARK_PROFILING": asked, "PYTHONPATH": paths, "QUARK_STRICT_PLUGINS": "1"}
    subprocess.run([sys.executable, "-c", _RUNS], check=True, env=environment, cwd=tmp_path)
    profile = tmp_path / "quark_profile.yaml"
    assert profile.exists() is (asked == "1")
    if asked == "1":
        steps = [entry["step"] for entry in yaml.safe_load(profile.read_text())["memory_usage"]]
        in_memory, from_disk = ([f"{name} Quantization Start", f"{name} Quantization End"] for name in ("Model", "File-to-File"))
        assert steps == ["Start", *in_memory, *in_memory, *from_disk, "End"]
