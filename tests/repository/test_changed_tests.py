"""`make quick` runs the tests that are nearest to what changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import changed_tests
from tools.changed_tests import MOST, changed_files, imports_of_tests, nearest_tests

IMPORTS = {
    "core/tests/config/test_tensor.py": {"quark.config.tensor", "quark.config"},
    "core/tests/runs/test_run.py": {"quark.config.tensor", "quark.config"},
    "plugins/quark_algos/tests/test_a.py": {"quark.config.tensor", "quark.config"},
    "workbench/tests/test_b.py": {"pathlib"},
}


def test_of_a_module_its_own_tests_come_first_and_then_those_that_import_it_the_nearest_first() -> None:
    assert nearest_tests(["core/src/quark/config/tensor.py"], IMPORTS) == [name for name in IMPORTS if "test_b" not in name]
    reversed_imports = dict(reversed(IMPORTS.items()))
    assert nearest_tests(["core/src/quark/config/tensor.py"], reversed_imports)[-1] == "plugins/quark_algos/tests/test_a.py"


def test_a_package_is_imported_by_its_own_name() -> None:
    assert "core/tests/runs/test_run.py" in nearest_tests(["core/src/quark/config/__init__.py"], IMPORTS)


def test_a_changed_test_is_run_and_one_that_is_gone_is_not() -> None:
    assert nearest_tests(["workbench/tests/test_b.py", "workbench/tests/test_gone.py", "README.md"], IMPORTS) == [
        "workbench/tests/test_b.py"
    ]


def test_of_a_module_that_everybody_imports_a_few_tests_are_run() -> None:
    many = {f"core/tests/test_{number:02}.py": {"quark.errors"} for number in range(30)}
    assert nearest_tests(["core/src/quark/errors.py"], many) == list(many)[:MOST]


def test_imports_are_read_from_the_tests_of_the_repository() -> None:
    own = imports_of_tests()["tests/repository/test_changed_tests.py"]
    assert {"pytest", "tools.changed_tests", "tools.changed_tests.MOST"} <= own


def test_files_differ_from_where_the_work_left_the_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).write_text("", "utf-8")
        git("add", name)
        git("commit", "-m", name)

    git("init", "-b", "main")
    commit("a.py")
    git("checkout", "-b", "work")
    commit("b.py")
    git("checkout", "main")
    commit("c.py")
    git("checkout", "work")
    (tmp_path / "a.py").write_text("changed", "utf-8")
    (tmp_path / "d.py").touch()
    plain = changed_tests._git
    monkeypatch.setattr(changed_tests, "_git", lambda *arguments: plain(*arguments, cwd=tmp_path))
    assert changed_files("main") == ["a.py", "b.py", "d.py"]
