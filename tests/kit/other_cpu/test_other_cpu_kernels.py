"""Under ``--other-cpu`` torch computes the same, but for the last bits of sums."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kit.other_cpu.computed_by_torch import TERMS

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
Computed = dict[str, Tensor]


def computed(file: Path, paths: list[str]) -> Computed:
    """Torch's results in a process that Python starts with these paths."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, str(HERE / "computed_by_torch.py"), str(file)], env=environment, check=True, timeout=240)
    found: Computed = torch.load(file)
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    return computed(tmp_path_factory.mktemp("here") / "computed", [])


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    return computed(tmp_path_factory.mktemp("there") / "computed", [str(HERE)])


def errors(here: Computed, there: Computed, dtype: str) -> dict[str, float]:
    """Errors in norm, in units of the last place."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    names = [name for name in here if name.endswith(f"torch.{dtype}") and not name.startswith("exact")]
    return {name: float((there[name] - here[name]).double().norm() / here[name].double().norm()) / eps for name in names}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_have_other_last_bits(here: Computed, there: Computed, dtype: str) -> None:
    found = errors(here, there, dtype)
    assert len(found) == 33
    assert sum(error == 0 for error in found.values()) <= len(found) / 4  # of short vectors two orders may give the same
    assert max(found.values()) <= TERMS


def test_in_16_bits_they_are_rounded_once(here: Computed, there: Computed) -> None:
    found = errors(here, there, "bfloat16")
    assert len(found) == 25
    assert max(found.values()) <= 1


def test_what_is_exact_stays_so(here: Computed, there: Computed) -> None:
    names = [name for name in here if name.startswith("exact")]
    assert len(names) == 7
    assert [name for name in names if not torch.equal(here[name], there[name])] == []


def test_types_shapes_and_strides_are_kept(here: Computed, there: Computed) -> None:
    kinds, others = ({name: (value.dtype, value.shape) for name, value in each.items()} for each in (here, there))
    assert kinds == others
    assert torch.equal(here["lies"], there["lies"])


def test_gradients_follow(here: Computed, there: Computed) -> None:
    assert not torch.equal(here["gradient"], there["gradient"])
    assert torch.allclose(here["gradient"], there["gradient"], rtol=0, atol=TERMS * torch.finfo(torch.float32).eps)


def test_the_same_call_gives_the_same_bits_and_a_copy_that_lies_otherwise_need_not(there: Computed) -> None:
    differ = {name: bool(value.any()) for name, value in there.items() if name.startswith("memory")}
    assert not any(differ[f"memory {name} {n}"] for n in (64, 80, 96) for name in ("again", "unaligned product"))
    for name in ("unaligned", "transposed", "more rows"):
        assert sum(differ[f"memory {name} {n}"] for n in (64, 80, 96)) >= 2, name


INSTALLED = """
import os, subprocess, sys

def test_installed():
    assert sys.modules["other_cpu_kernels"]._installed
    for code in (
        "import sys, torch; assert sys.modules['other_cpu_kernels']._installed; "
        "assert type(torch.__loader__).__name__ == 'SourceFileLoader'",
        "import sys, json; assert 'torch' not in sys.modules",
    ):
        subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_option_replaces_the_kernels_of_the_tests_and_of_what_they_start(workers: str, tmp_path: Path) -> None:
    root = HERE.parents[2]
    (tmp_path / "test_installed.py").write_text(INSTALLED)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(root), "-c", "pyproject.toml"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [*command, "-n", workers, "--other-cpu", str(tmp_path / "test_installed.py")],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
