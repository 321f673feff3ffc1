"""AMD Quark's example scripts find their import paths; without this distribution, a message names it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quark.errors import MissingPluginError
from quark_amd.absent import NotOfferedError

SOURCES = Path(__file__).parents[1] / "src"
PATHS = {
    "quark.torch.utils": ["TPDeviceManager", "setattr_recursive"],
    "quark.torch.utils.device": ["TPDeviceManager"],
    "quark.torch.utils.llm": [
        "check_compatibility_before_quantization",
        "get_calib_dataloader",
        "get_model",
        "get_pile10k_dataloader",
        "get_tokenizer",
        "maybe_save_preprocessors",
        "prepare_for_moe_quant",
        "preprocess_for_quantization",
        "revert_model_patching",
    ],
    "quark.torch.utils.llm.data_preparation": ["get_calib_dataloader"],
    "quark.torch.utils.llm.model_preparation": ["get_model", "get_model_type", "get_tokenizer"],
    "quark.contrib.llm_eval": ["eval_model", "ppl_eval", "ppl_eval_for_kv_cache", "task_eval"],
    "quark.contrib.llm_eval.evaluation": ["ppl_eval"],
    "quark.common.profiler": ["CheckpointMetric", "GlobalProfiler", "ProfileStep", "SummaryMetric", "profile_scope"],
    "quark.common.utils.import_utils": [
        "export_for_training",
        "is_accelerate_available",
        "is_gguf_available_and_minimum_version",
        "is_transformers_version_higher_or_equal",
    ],
    "quark.shares.utils.import_utils": ["is_transformers_version_higher_or_equal"],
    "quark.common.utils.log": ["ScreenLogger", "log_errors"],
    "quark.shares.utils.log": ["ScreenLogger"],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PATHS.items() for name in names])
def test_a_name_is_importable_from_the_path_that_scripts_know(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None
    assert name in dir(importlib.import_module(module))
    assert name in importlib.import_module(module).__all__


def test_a_name_that_does_not_come_says_so() -> None:
    with pytest.raises(NotOfferedError, match=r"of AMD Quark is not here: .*docs/how-to/from-amd-quark\.md"):
        from quark.torch.utils.llm import get_loader  # type: ignore[import-not-found]  # noqa: F401


def test_an_unknown_name_is_a_plain_attribute_error() -> None:
    assert not hasattr(importlib.import_module("quark.torch.utils.llm"), "nonsense")


def test_a_path_says_what_to_install_where_the_distribution_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "amd_quark_scripts" else find_spec(name))
    with pytest.raises(MissingPluginError, match=r"quark\.common\.profiler is .*pip install examples/from_amd_quark"):
        importlib.import_module("quark.common.profiler").no_name_that_was_loaded_before


def test_the_script_is_a_program_by_its_public_name() -> None:
    paths = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "quark.scripts.quantize_quark", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.stdout.startswith("usage: python -m quark.scripts.quantize_quark")


def test_errors_are_logged_and_raised(caplog: pytest.LogCaptureFixture) -> None:
    from quark.shares.utils.log import log_errors

    @log_errors
    def fails(value: int) -> float:
        return 1 / value

    assert fails(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        fails(0)
    assert [record.message for record in caplog.records] == ["division by zero"]


def test_packages_are_asked_for() -> None:
    from quark.common.utils import import_utils

    assert import_utils.is_torch_available()
    assert not import_utils.is_flydsl_available()
    assert import_utils.is_package_lower_or_equal("torch", "1000.1")
    assert not import_utils.is_gguf_available_and_minimum_version("1000.1")
    module = import_utils.export_for_training(__import__("torch").nn.Linear(2, 2), (__import__("torch").ones(1, 2),)).module()
    assert module(__import__("torch").ones(1, 2)).shape == (1, 2)
