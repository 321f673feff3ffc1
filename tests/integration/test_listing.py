"""The listings of the records of this repository's own plugins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

import quark
from quark.plugins import registries
from quark_workbench.cli.main import main

KINDS = [
    "formats",
    "observers",
    "schemes",
    "algorithms",
    "templates",
    "exporters",
    "selectors",
    "layer_types",
    "datasets",
    "metrics",
    "quant_modes",
    "graph_ops",
    "commands",
]


def listed(*arguments: str) -> tuple[Any, set[str]]:
    """The JSON that ``quark …`` prints, and the modules that were imported for it."""
    code = (
        "import sys\nfrom quark_workbench.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *arguments, "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout), set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_listed_without_torch(kind: str) -> None:
    report, loaded = listed(kind)
    assert [row["name"] for row in report[kind]] == getattr(quark, kind)().names()
    assert report[kind]
    assert report["failures"] == []
    assert report["conflicts"] == {}
    assert all(row["summary"] and row["source"]["version"] == quark.__version__ for row in report[kind])
    assert not any("error" in row for row in report[kind])
    assert not loaded & {"torch", "transformers", "numpy"}


OTHERS = {
    "commands": {"quark-devkit", "quark-tiny-model"},
    "formats": {"quark-vq"},
    "observers": {"quark-vq"},
    "schemes": {"quark-vq"},
}
"""Distributions that have records of a kind beside the one that messages name."""


def test_each_kind_comes_from_the_distribution_that_messages_say_to_install() -> None:
    for kind in registries.KINDS:
        registry = getattr(quark, kind.plural)()
        others = OTHERS.get(kind.plural, set())
        assert {registry.source(name).distribution for name in registry.names()} == {kind.distribution, *others}


def test_plugins_are_listed_with_what_they_provide() -> None:
    report, loaded = listed("plugins")
    assert {row["distribution"]: row["status"] for row in report["plugins"]} == dict.fromkeys(
        [
            "quark-algos",
            "quark-core",
            "quark-devkit",
            "quark-exporters",
            "quark-graph",
            "quark-schemes",
            "quark-templates",
            "quark-tiny-model",
            "quark-vq",
            "quark-workbench",
        ],
        "active",
    )
    provided = Counter[str]()
    for row in report["plugins"]:
        provided.update(row["provides"])
    assert provided.pop("listeners") == 1  # the display of runs: listeners are no records
    assert provided.pop("measuring") == 1  # the figures of reports
    assert provided == {kind: len(getattr(quark, kind)()) for kind in KINDS}
    assert "torch" not in loaded


@pytest.mark.parametrize(("kind", "name", "option"), [("schemes", "mx6", "block_size"), ("algorithms", "gptq", "damp_percent")])
def test_options_are_shown_without_torch(kind: str, name: str, option: str) -> None:
    report, loaded = listed(kind, name)
    shown = {row["name"]: row for row in report["options"]}
    assert shown[option]["help"]
    assert not loaded & {"torch", "transformers", "numpy"}


def test_options_of_an_exporter_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quark", "exporters", "safetensors", "--json"])
    main()
    options = json.loads(capsys.readouterr().out)["options"]
    assert all(row["help"] for row in options)
    assert {"pack_method", "max_shard_bytes"} <= {row["name"] for row in options}


def test_names_of_a_record_are_joined_in_its_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quark", "exporters"])
    main()
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " fp8, fbgemm_fp8 " in rows["fp8"]
    assert rows["safetensors"].endswith(" quark")
