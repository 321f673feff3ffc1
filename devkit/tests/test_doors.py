"""The command line and pytest's option run the same checks, with the author's expected failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quark.errors import ConfigError
from quark.plugins import Catalog, ObserverRecord, Source, hookimpl, using
from quark.plugins.discovery import discover
from quark_devkit import checks
from quark_devkit.catalogue import checks_of
from quark_devkit.extent import LAWS, is_thorough
from quark_devkit.subject import KINDS
from quark_workbench.cli.main import program

pytest_plugins = ("pytester",)
PYTEST = ("--quark-conformance", "acme-quant", "--quark-conformance-kind", "observer", "-q", "-p", "no:xdist")
NAMES = [check.name for check in checks_of("observer")]
TABLE = '[project]\nname = "acme-quant"\n[tool.quark.conformance.expected-failures]\n'


class Acme:
    """Registers one observer of quark-schemes under another name, and one that is not there."""

    @hookimpl
    def quark_register_observers(self) -> list[ObserverRecord]:
        good = "quark_schemes.observers.percentile:PerTensorPercentileObserver"
        return [
            ObserverRecord(name="acme_good", class_name="PerTensorPercentileObserver", observer=good),
            ObserverRecord(name="acme_lost", class_name="Lost", observer="quark_schemes.observers.percentile:Lost"),
        ]


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    catalog = Catalog(discover())
    catalog.add(Acme(), Source("acme-quant", "0.1", entry_point="acme"))
    with using(catalog):
        yield catalog


def quark(*arguments: str) -> int:
    try:
        program()(["check", "acme-quant", *arguments], standalone_mode=False)
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def test_the_command_prints_a_line_for_each_subject_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert quark("--kind", "observer", "--name", "acme_lost") == 1
    out = capsys.readouterr().out
    assert out.startswith("FAILED  observer 'acme_lost' of acme-quant 0.1: ")
    assert out.count("PluginError") == 1, "what cannot be loaded is said once, whatever number of checks it fails"
    assert len(out.splitlines()) == 3
    assert out.splitlines()[-1].startswith("not conformant: ")


def test_quick_leaves_out_what_takes_long_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert quark("--kind", "observer", "--name", "acme_good", "--quick", "--verbose") == 0
    out = capsys.readouterr().out
    assert "extremes_are_extremes" in out
    assert not any(name in out for name in LAWS)
    assert out.splitlines()[-1].endswith("(--quick leaves out checks that make whole runs)")
    with pytest.raises(ConfigError, match="--quick leaves checks out, but --badge reports on all checks"):
        quark("--quick", "--badge")


def test_all_is_thorough_while_checks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("quark_devkit.runner.run_checks", lambda *_: seen.append(is_thorough()) or [])
    assert quark("--kind", "observer", "--name", "acme_good", "--all") == 1
    assert (seen, is_thorough()) == ([True], False)


def test_json_and_junit_hold_every_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert quark("--kind", "observer", "--name", "acme_good", "--json", "--junit", str(tmp_path / "j.xml")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["conformant"]
    assert [result["check"] for result in data["results"]] == NAMES
    assert len(ElementTree.parse(tmp_path / "j.xml").getroot().findall("testcase")) == len(NAMES)


def test_the_badge_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert quark("--kind", "observer", "--name", "acme_good", "--badge") == 0
    assert capsys.readouterr().out.startswith("acme-quant 0.1: conformant with quark plugin API ")


def test_expected_failures_are_read_from_the_authors_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [
        f'"observer:acme_lost:{name}" = "its module is not written yet"\n' for name in NAMES[:-1]
    ]  # the last asks only whether another is applicable
    (tmp_path / "pyproject.toml").write_text(TABLE + "".join(lines), encoding="utf-8")
    assert quark("--kind", "observer", "--name", "acme_lost") == 0
    assert f"{len(NAMES) - 1} expected" in capsys.readouterr().out
    (tmp_path / "pyproject.toml").write_text(TABLE + f'"observer:acme_good:{NAMES[0]}" = "it works"\n', encoding="utf-8")
    assert quark("--kind", "observer", "--name", "acme_good") == 1
    assert "is declared as an expected failure (it works)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "observe"), "'observe' is not a kind of subject"),
        (("--name", "nobody"), "registers nothing named 'nobody'"),
        (("--kind", "template"), "registers nothing of the kind template"),
    ],
)
def test_what_is_not_there_is_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quark(*arguments)


def test_an_entry_that_names_no_check_stops_the_command(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(TABLE + '"observer:acme_good:nothing" = "x"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="names no check"):
        quark("--name", "acme_good")


def test_pytest_runs_the_checks_and_nothing_else(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_other="def test_other(): raise AssertionError")
    result = pytester.runpytest_inprocess(*PYTEST)
    outcomes = result.parseoutcomes()
    assert outcomes.get("failed", 0) + outcomes.get("passed", 0) + outcomes.get("skipped", 0) == 2 * len(NAMES)
    assert outcomes["failed"] >= 1
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*observer 'acme_lost' of acme-quant 0.1: raises PluginError*"])


def test_a_suite_of_which_checks_were_left_out_fails(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(*PYTEST, "-k", f"acme_good and {NAMES[0]}")
    assert result.parseoutcomes()["passed"] == 1
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"quark conformance is incomplete: {2 * len(NAMES) - 1} checks were deselected*"])


def test_an_unknown_distribution_is_an_error_of_use(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--quark-conformance", "acme-quand", "-p", "no:xdist")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no installed distribution 'acme-quand'*did you mean 'acme-quant'*"])


def test_pytest_loads_no_torch_before_the_option_is_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\n\ndef test_it():\n    assert 'torch' not in sys.modules and 'pluggy' in sys.modules")
    assert pytester.runpytest_subprocess("-q").ret == 0


def test_there_is_a_module_of_checks_for_every_kind() -> None:
    assert {path.stem for path in Path(checks.__path__[0]).iterdir()} >= set(KINDS)
