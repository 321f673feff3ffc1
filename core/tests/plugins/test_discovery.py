"""Discovery finds plugins, and leaves out denied plugins before it imports them."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import quark.plugins.catalog as process
from quark.errors import UnknownNameError
from quark.plugins import Catalog
from quark.plugins.discovery import Settings, Source, discover

SCHEME = "@hookimpl\ndef quark_register_schemes():\n    yield scheme('{}')\n"


@pytest.fixture
def crowded(site: Any) -> Any:
    """Two more distributions, which use one entry-point name."""
    site.modules = [site.install(f"{n}-quant", SCHEME.format(n), entry_point="quant") for n in ("acme", "zeta")]
    return site


def names(site: Any, **environ: str) -> list[str]:
    found: list[str] = site.collect(**environ).registries["schemes"].names()
    return found


def test_one_entry_point_name_in_two_distributions_hides_neither(crowded: Any) -> None:
    catalog = crowded.collect(QUARK_STRICT_PLUGINS="1")
    assert catalog.registries["schemes"].names() == ["acme", "good", "zeta"]
    assert [s.distribution for s in catalog.sources() if s.entry_point == "quant"] == ["acme-quant", "zeta-quant"]
    assert catalog.failures() == ()


def test_a_source_tells_distribution_version_module_and_entry_point(crowded: Any) -> None:
    assert crowded.collect().registries["schemes"].source("acme") == Source("acme-quant", "1.0", crowded.modules[0], "quant")


@pytest.mark.parametrize(
    ("disabled", "left"),
    [
        ("acme-quant", ["good", "zeta"]),
        ("Acme_Quant", ["good", "zeta"]),
        ("quant", ["good"]),
        (" acme-quant , good-quant,", ["zeta"]),
        ("", ["acme", "good", "zeta"]),
    ],
)
def test_plugins_are_denied_by_distribution_or_entry_point(crowded: Any, disabled: str, left: list[str]) -> None:
    assert names(crowded, QUARK_DISABLED_PLUGINS=disabled) == left


@pytest.mark.parametrize(
    ("allowed", "left"), [("acme-quant", ["acme"]), ("quant", ["acme", "zeta"]), ("", ["acme", "good", "zeta"]), ("x", [])]
)
def test_plugins_are_allowed_by_distribution_or_entry_point(crowded: Any, allowed: str, left: list[str]) -> None:
    assert names(crowded, QUARK_PLUGINS=allowed) == left


def test_denying_wins_over_allowing(crowded: Any) -> None:
    assert names(crowded, QUARK_PLUGINS="quant", QUARK_DISABLED_PLUGINS="zeta-quant") == ["acme"]


def test_what_is_left_out_is_not_imported_and_is_remembered(crowded: Any) -> None:
    catalog = crowded.collect(QUARK_PLUGINS="good-quant", QUARK_DISABLED_PLUGINS="acme-quant")
    assert not set(crowded.modules) & set(sys.modules)
    assert {s.distribution: why for s, why in catalog.left_out.items()} == {
        "acme-quant": "QUARK_DISABLED_PLUGINS",
        "zeta-quant": "QUARK_PLUGINS",
    }
    with pytest.raises(UnknownNameError, match=r"QUARK_DISABLED_PLUGINS leaves out .* of acme-quant 1\.0"):
        catalog.registries["schemes"].get("acme")


def test_finding_plugins_imports_none_of_them(crowded: Any) -> None:
    assert len(discover([str(crowded.path)])) == 3
    assert not set(crowded.modules) & set(sys.modules)


def test_a_distribution_that_lies_on_the_path_twice_counts_once_and_the_first_wins(site: Any, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    newer = type(site)(second)
    newer.install("Good_Quant", SCHEME.format("newer"), version="3.0")
    found = discover([str(second), str(site.path)])
    assert [(c.source.distribution, c.source.version) for c in found] == [("good-quant", "3.0")]


def test_entry_points_of_other_groups_are_no_plugins(site: Any) -> None:
    site.install("acme-quant", SCHEME.format("a"), also="[other]\nx = {module}\n")
    assert [c.source.entry_point for c in discover([str(site.path)])] == ["acme-quant", "good-quant"]


def test_an_entry_point_may_name_an_object(site: Any) -> None:
    code = "class Plugin:\n    @hookimpl\n    def quark_register_schemes(self):\n        yield scheme('made')\nplugin = Plugin()\n"
    site.install("acme-quant", code, also="object = {module}:plugin\n")
    catalog = site.collect()
    assert catalog.registries["schemes"].source("made").entry_point == "object"
    assert [f.source.entry_point for f in catalog.failures()] == ["acme-quant"], "the module around it has no hook"


@pytest.mark.parametrize(("value", "strict"), [("1", True), ("true", True), ("0", False), ("", False), ("off", False)])
def test_strict_mode_is_asked_for_in_words_or_figures(value: str, strict: bool) -> None:
    assert Settings.from_environ({"QUARK_STRICT_PLUGINS": value}).strict is strict


def test_arguments_with_defaults_do_not_concern_the_caller(site: Any) -> None:
    site.install("acme-quant", "@hookimpl\ndef quark_register_schemes(prefix='a', *rest, **more):\n    yield scheme(prefix)")
    assert names(site, QUARK_STRICT_PLUGINS="1") == ["a", "good"]


def test_threads_that_ask_first_at_the_same_time_get_one_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Catalog] = []

    def slowly() -> Catalog:
        time.sleep(0.05)
        made.append(Catalog())
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(process, "_current", None)
        patch.setattr(Catalog, "installed", slowly)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: process.catalog(), range(4)))
    assert len(made) == 1
    assert all(catalog is made[0] for catalog in found)
