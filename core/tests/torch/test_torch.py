"""`quark.torch` imports the distribution that registers its paths, or an error says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ACME = """
from importlib.machinery import ModuleSpec

def load(module, name):
    if name == "__all__":
        return ["Thing"]
    if name != "Thing":
        raise AttributeError(name)
    return f"{module} of acme"

def public_names(module):
    return ["Thing"]

class Loader:
    def create_module(self, spec): ...
    def exec_module(self, module):
        module.Thing = f"{module.__name__} of acme"

def find_spec(name):
    return ModuleSpec(name, Loader()) if name in ("quark.torch.things", "quark.contrib") else None
"""
WITHOUT = {"QUARK_DISABLED_PLUGINS": "quark-amd"}


@pytest.fixture
def acme(tmp_path: Path) -> dict[str, str]:
    """An environment in which another project's distribution also registers import paths."""
    (tmp_path / "acme_paths.py").write_text(ACME)
    info = tmp_path / "acme_paths-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-paths\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quark.import_paths]\nacme = acme_paths\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}


def output_of(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def error_of(statement: str, **environment: str) -> str:
    return output_of(f"try:\n    {statement}\nexcept ImportError as error:\n    print(type(error).__name__, error)", **environment)


def test_import_paths_are_looked_for_when_one_is_asked_for() -> None:
    code = "import sys, quark.torch; print({m.partition('.')[0] for m in sys.modules} & {'quark_amd', 'pluggy', 'torch', 'attr'})"
    assert output_of(code) == "set()"


@pytest.mark.parametrize(
    "statement",
    [
        "from quark.torch import ModelQuantizer",
        "from quark.torch import *",
        "import quark.torch; quark.torch.LLMTemplate",
        "import quark.torch.quantization.config.config as c",
        "import quark.torch; dir(quark.torch)",
    ],
)
def test_without_such_a_distribution_every_path_says_what_to_install(statement: str) -> None:
    message = error_of(statement, **WITHOUT)
    assert message.startswith("MissingPluginError quark.torch is not active. Run: pip install quark-amd, or")


def test_without_such_a_distribution_other_modules_are_not_found_as_ever() -> None:
    assert error_of("import quark.nonsense", **WITHOUT) == "ModuleNotFoundError No module named 'quark.nonsense'"
    assert output_of("import quark.torch; print(hasattr(quark.torch, '__wrapped__'))", **WITHOUT) == "False"


def test_a_distribution_of_another_project_may_have_the_paths(acme: dict[str, str]) -> None:
    assert output_of("from quark.torch import *; print(Thing)", **acme, **WITHOUT) == "quark.torch of acme"
    code = "import quark.contrib; from quark.torch import things; print(quark.contrib.Thing, things.Thing, dir(quark.torch))"
    assert output_of(code, **acme, **WITHOUT) == "quark.contrib of acme quark.torch.things of acme ['Thing']"
    assert error_of("import quark.torch.nothing", **acme, **WITHOUT).startswith("ModuleNotFoundError")


def test_two_such_distributions_are_an_error_that_names_both(acme: dict[str, str]) -> None:
    message = error_of("from quark.torch import ModelQuantizer", **acme)
    assert "plugin 'acme' of acme-paths 1.0 (acme_paths) and by plugin 'amd' of quark-amd" in message
    assert "leave one out with QUARK_DISABLED_PLUGINS" in message


def test_a_distribution_whose_import_fails_is_named(acme: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "acme_paths.py").write_text("import no_such_module")
    message = error_of("from quark.torch import ModelQuantizer", **acme, **WITHOUT)
    assert message.startswith(
        "MissingPluginError quark.torch comes with plugin 'acme' of acme-paths 1.0 (acme_paths), whose import fails: No"
    )
