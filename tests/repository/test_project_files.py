"""The files around the code agree with it: workflow, pre-commit hooks, changelog, links."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.matrix.cells import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def targets_run(workflow: dict[Any, Any]) -> set[str]:
    """Make targets of all jobs, with the values of ``matrix.versions`` put in."""
    found = set()
    for job in workflow["jobs"].values():
        values = [entry.get("versions") for entry in job.get("strategy", {}).get("matrix", {}).get("include", [])]
        for step in job["steps"]:
            for word in re.findall(r"make (.*)", step.get("run", "")):
                found |= set(values) if "matrix.versions" in word else {target for target in word.split() if "=" not in target}
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_a_workflow_may_only_read_and_pins_its_actions(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps(workflow) if "uses" in step)
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_the_workflow_runs_everything_on_every_supported_python() -> None:
    workflow = read(ROOT / ".github/workflows/ci.yml")
    classifiers = tomllib.loads((ROOT / "core/pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    supported = [m.group(1) for c in classifiers if (m := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", c))]
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == supported
    run = targets_run(workflow)
    assert run >= {"lint", "types", "imports", "test", "coverage", "docs", "lowest", "newest", "wheels", "slow"}
    assert all(re.search(rf"^[\w ]*\b{target}\b[\w ]*:", MAKEFILE, flags=re.MULTILINE) for target in run)


def test_every_extra_that_is_named_is_offered() -> None:
    """An install command in a message or a page names an extra that its distribution has."""
    folders = [ROOT / package for package in PACKAGES]
    projects = [tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"] for folder in folders]
    offered = {f"{project['name']}[{extra}]" for project in projects for extra in project.get("optional-dependencies", {})}
    pages = [
        *(path for folder in folders for path in (folder / "src").glob("**/*.py")),
        *(ROOT / "docs").glob("**/*.md"),
        *ROOT.glob("*.md"),
    ]
    named = {(path.name, name) for path in pages for name in re.findall(r"quark-[a-z-]+\[[a-z-]+\]", path.read_text(encoding="utf-8"))}
    assert ("extras.py", "quark-workbench[lm-eval]") in named
    assert [one for one in named if one[1] not in offered] == []


def test_the_workflow_checks_at_least_what_make_check_does() -> None:
    check = re.search(r"^check: ([\w ]+)", MAKEFILE, flags=re.MULTILINE)
    assert check is not None
    workflow = ROOT / ".github/workflows/ci.yml"
    whole = {"numeric"} if "make test OTHER_CPU=1 ALL=1" in workflow.read_text(encoding="utf-8") else set()
    assert set(check.group(1).split()) <= targets_run(read(workflow)) | whole


def test_make_check_builds_the_documentation_and_checks_the_examples() -> None:
    assert "make check" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    check = re.search(r"^check: ([\w ]+)", MAKEFILE, flags=re.MULTILINE)
    assert check is not None
    assert {"lint", "types", "imports", "test"} <= {*check[1].split()}
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]["testpaths"]
    for test in ("tests/repository/test_docs_site.py", "examples/acme_quant/tests/test_conformance.py"):
        assert (ROOT / test).is_file()
        assert any((ROOT / test).is_relative_to(ROOT / path) for path in paths)


def test_pre_commit_runs_the_linters_of_this_repository() -> None:
    hooks = {hook["id"]: hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}
    assert {"ruff", "ruff-format", "end-of-file-fixer", "check-yaml", "check-toml"} <= hooks.keys()
    assert all("language" in hook and "entry" in hook for hook in hooks.values())
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for hook in (hooks["ruff"], hooks["ruff-format"]):
        assert set(hook["additional_dependencies"]) <= set(pins)
    needing_an_environment = [name for name, hook in hooks.items() if ".venv" in hook["entry"] and "manual" not in hook.get("stages", [])]
    assert needing_an_environment == []


def test_the_coverage_floor_is_90_percent_of_the_core_and_the_workbench() -> None:
    coverage = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["coverage"]
    assert coverage["run"]["source"] == ["core/src/quark", "workbench/src/quark_workbench"]
    assert coverage["report"]["fail_under"] >= 90


def test_the_changelog_has_a_section_for_this_version_first() -> None:
    from quark.base.version import VERSION

    sections = re.findall(
        r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert sections[0][0] == VERSION
    assert [state for _, state in sections[1:] if state == "unreleased"] == []


def test_links_between_documents_lead_somewhere() -> None:
    documents = [
        p
        for p in ROOT.rglob("*.md")
        if not any((part.startswith(".") and part != ".github") or part == "node_modules" for part in p.relative_to(ROOT).parts)
    ]
    broken = []
    for document in documents:
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)\s#]+)", text):
            if not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []


def test_development_versions_are_pinned_where_they_decide_what_is_an_error() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"torch", "transformers", "ruff", "mypy", "import-linter"} <= pins.keys()
    tools = re.findall(r"^([\w-]+)", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    dependencies = tomllib.loads((ROOT / "core/pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert pins.keys() <= {*tools, *(re.split(r"[<>=]", line)[0] for line in dependencies)}
