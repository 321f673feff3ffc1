"""The plugins beside which a record is checked: those of the distributions that its own requires."""

from __future__ import annotations

from pathlib import Path

import importlib_metadata
import pytest

from quark.plugins.catalog import catalog
from quark_devkit.own_catalog import among_its_own


def install(folder: Path, name: str, requirement: str) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requirement}\n", encoding="utf-8")


def test_they_are_those_that_it_requires_and_those_that_these_require(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "needs-more", "needs-codebooks")
    install(tmp_path, "needs-codebooks", "quark-vq>=1")
    monkeypatch.syspath_prepend(tmp_path)
    assert "quark-vq" in among_its_own(catalog(), "needs-more").distributions


def test_of_an_unknown_distribution_they_are_the_built_in_ones_until_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires = importlib_metadata.requires  # the core's extra "all" names every distribution
    monkeypatch.setattr(importlib_metadata, "requires", lambda name: () if name == "quark-core" else requires(name))
    monkeypatch.syspath_prepend(tmp_path / "others")  # nothing has been read with this path
    assert "quark-vq" not in among_its_own(catalog(), "comes-later").distributions
    install(tmp_path, "comes-later", "quark-vq")
    monkeypatch.syspath_prepend(tmp_path)
    assert "quark-vq" in among_its_own(catalog(), "comes-later").distributions


def test_the_requirements_of_a_distribution_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # nothing has been read with this path
    read, requires = [], importlib_metadata.requires
    monkeypatch.setattr(importlib_metadata, "requires", lambda name: read.append(name) or requires(name))
    for _ in range(2):
        among_its_own(catalog(), "quark-schemes")
    assert len(read) == len(set(read)) > 1
