"""Names of AMD Quark that do not come: importing one is an error that says so, and names the page."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from quark.errors import MissingPluginError
from quark_amd import absent
from quark_amd.absent import NotOfferedError

STATEMENTS = [
    "from quark.torch import ModelPruner",
    "from quark.torch.pruning.config import Config",
    "from quark.torch.algorithm import ALGORITHM_REGISTRY",
    "from quark.torch.algorithm.svdquant.svdquant import SVDQuantProcessor",
    "from quark.torch.algorithm.rotation.training import RotationLinear",
    "from quark.torch.quantization import LSQObserver",
    "from quark.torch.quantization.config.config import SVDQuantConfig",
    "from quark.torch.quantization.observer import TQTObserver",
    "from quark.torch.quantization.observer.tqt_observer import TQTObserver",
    "from quark.torch.quantization.observer.lsq_observer import LSQObserver",
    "from quark.experimental.torch.mix_precision import anything",
    "from quark.integrations.diffusers import anything",
    "from quark.contrib.mince import anything",
    "import quark.online_quantization.vllm",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_importing_what_does_not_come_says_so_and_names_the_page(statement: str) -> None:
    with pytest.raises(NotOfferedError, match=r"of AMD Quark is not here: .*docs/how-to/from-amd-quark\.md") as caught:
        exec(statement)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("statement", ["import quark.testing", "from quark.testing import SchemeConformance", "import quark.testing.tiny"])
def test_what_has_left_the_core_says_where_it_is(statement: str) -> None:
    with pytest.raises(MissingPluginError, match="pip install quark-devkit, and import quark_devkit"):
        exec(statement)


def test_it_is_said_in_a_fresh_process_too() -> None:
    code = "try:\n    import quark.experimental.cli\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "quark quantize --template-file" in done.stdout


def test_what_nobody_has_is_not_found_as_ever() -> None:
    for name in ("quark.nonsense", "quark.torch.nonsense", "quark.experimental_not"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_the_page_has_a_line_for_every_reason() -> None:
    page = (Path(__file__).parents[3] / absent.PAGE).read_text(encoding="utf-8").lower()
    for word in ("pruning", "quantization-aware training", "svdquant", "diffus", "learned rotations", "algorithm_registry", "brevitas",
                 "mince", "twobitscalar", "onnx models", "online_quantization"):  # fmt: skip
        assert word in page, word


@pytest.mark.parametrize("name", ["TQTSpec", "LSQObserver", "RotationLinear"])
def test_whether_a_module_has_such_a_name_is_answered(name: str) -> None:
    module = importlib.import_module("quark.torch.quantization.config.config")
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None
    with pytest.raises(AttributeError, match="of AMD Quark is not here: "):
        getattr(module, name)
