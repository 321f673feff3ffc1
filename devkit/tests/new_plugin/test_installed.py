"""A new distribution installs by pip into an environment of its own, passes its tests and `quark check`."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from quark_devkit.new_plugin import new_distribution

from .conftest import KINDS, PLUGINS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NAME = "lumen-quant"


class Environment:
    """A new environment that sees the packages of this one."""

    def __init__(self, path: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
        self.python = path / "bin" / "python"
        purelib = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", where=path).strip()
        theirs = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
        lines = [f"import site; site.addsitedir({directory!r})" for directory in sorted(theirs)]
        (Path(purelib) / "packages_of_the_tests.pth").write_text("\n".join(lines), encoding="utf-8")

    def run(self, *arguments: str, where: Path) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
        done = subprocess.run([str(self.python), *arguments], check=False, cwd=where, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, environment: Environment) -> Path:
    """The source of the distribution, which is installed."""
    directory = new_distribution(NAME, KINDS, tmp_path_factory.mktemp("new") / NAME)
    environment.run("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", str(directory), where=directory)
    return directory


def test_quark_finds_it(environment: Environment, directory: Path, tmp_path: Path) -> None:
    code = "from quark_workbench.cli.main import main; main()"
    report: Any = json.loads(environment.run("-c", code, "plugins", "--json", where=tmp_path))
    (row,) = (row for row in report["plugins"] if row["distribution"] == NAME)
    assert row["status"] == "active"
    assert sum(row["provides"].values()) == len(PLUGINS)


def test_its_own_tests_pass(environment: Environment, directory: Path) -> None:
    output = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", where=directory)
    assert " passed" in output


def test_quark_check_finds_nothing_wrong(environment: Environment, directory: Path) -> None:
    code = "from quark_workbench.cli.main import main; main()"
    report: Any = json.loads(environment.run("-c", code, "check", NAME, "--json", where=directory))
    assert report["conformant"]
    assert {"failed", "unexpected", "expected"} & set(report["counts"]) == set()
    names = {(result["kind"], result["name"]) for result in report["results"] if result["kind"] != "distribution"}
    assert names <= {(kind.subject, f"lumen_{kind.ending}") for kind in PLUGINS}
    wheel = {result["check"]: result["outcome"] for result in report["results"] if "wheel" in result["check"]}
    assert wheel
    assert set(wheel.values()) == {"passed"}
