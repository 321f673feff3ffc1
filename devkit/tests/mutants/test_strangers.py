"""Other installed distributions have no say in the checks of a record, unless its own requires them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from torch import Tensor

from quark.base.lazy import ObjectRef
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.plugins import Catalog, FormatRecord, Record, SchemeRecord, Source, schemes
from quark.plugins.discovery import discover
from quark_devkit import Subject, all_checks, find_subject, run_check, subjects
from quark_devkit.own_catalog import among

from . import template_mutants
from .broken_formats import Plain
from .mutant import DISTRIBUTION, plugin_of

STRANGER = Source("stranger-quant", "1.0", entry_point="stranger")
TEMPLATE = template_mutants.HEALTHY[0]


class Fails(Plain):
    """A format of fewer bits than any other, which the suite takes for coarse weights; no run survives it."""

    name = "stranger_format"
    bits = 3.5

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        raise ZeroDivisionError


def stranger_scheme() -> QLayerConfig:
    return QLayerConfig(
        weight=QTensorConfig(dtype="stranger_format", qscheme="per_group", group_size=32, ch_axis=1, symmetric=True, is_dynamic=False)
    )


STRANGERS: tuple[Record, ...] = (
    FormatRecord(name="stranger_format", bits=3.5, format=ObjectRef(Fails()), capabilities={"zero_point"}),
    SchemeRecord(name="stranger_coarse", summary="of a stranger", config=ObjectRef(stranger_scheme)),
)


def beside_a_stranger(*records: Record) -> Catalog:
    catalog = Catalog(discover())
    catalog.add(plugin_of(records), Source(DISTRIBUTION, "0.1", entry_point="mutant"))
    catalog.add(plugin_of(STRANGERS), STRANGER)
    return catalog


@pytest.mark.parametrize("check", ["every_algorithm_runs", "quantizes_and_reloads"])
def test_a_template_passes_beside_a_scheme_that_breaks(check: str) -> None:
    subject = find_subject(beside_a_stranger(TEMPLATE), "template", TEMPLATE.name)
    assert run_check(subject, all_checks()[f"template:{check}"]).outcome == "passed"


def by_name(catalog: Catalog) -> Subject:
    return find_subject(catalog, "template", TEMPLATE.name)


def of_all(catalog: Catalog) -> Subject:
    return next(subjects(catalog, DISTRIBUTION, ["template"]))


@pytest.mark.parametrize("found", [by_name, of_all])
def test_every_door_leaves_strangers_out(found: Callable[[Catalog], Subject]) -> None:
    catalog = beside_a_stranger(TEMPLATE)
    own = found(catalog).catalog
    assert "stranger_coarse" in catalog.schemes
    assert "stranger_coarse" not in own.schemes
    assert "stranger_format" not in own.formats
    assert {"int4_wo_32"} <= set(own.schemes.names()), "what is built in stays"
    others = {"stranger-quant", "quark-vq"}  # the second is there if the core's extra "all" names it
    assert {source.distribution for source in own.sources()} - others == {source.distribution for source in catalog.sources()} - others
    assert "stranger-quant" not in {source.distribution for source in own.sources()}
    assert found(catalog).catalog is own, "so that what the suite keeps for a set of plugins is kept once"


def test_what_is_registered_later_is_seen() -> None:
    catalog = beside_a_stranger(TEMPLATE)
    before = by_name(catalog).catalog
    catalog.schemes.register(SchemeRecord(name="mutant_later", config=ObjectRef(stranger_scheme)), Source(DISTRIBUTION))
    assert "mutant_later" not in before.schemes
    assert "mutant_later" in by_name(catalog).catalog.schemes


def test_where_there_is_no_stranger_nothing_is_copied() -> None:
    catalog = Catalog(discover())
    assert among(catalog, (source.distribution for source in catalog.sources())) is catalog


@pytest.mark.parametrize("requires", ["Stranger_Quant>=1", "a-bridge", "stranger-quant; extra == 'more'"])
def test_what_the_distribution_requires_is_there(requires: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, requirement in ((DISTRIBUTION, requires), ("a-bridge", "stranger-quant")):
        info = tmp_path / f"{name.replace('-', '_')}-0.1.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 0.1", f"Requires-Dist: {requirement}"]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    own = by_name(beside_a_stranger(TEMPLATE)).catalog
    assert "stranger_coarse" in own.schemes


def test_a_check_sees_no_stranger_and_the_process_does_again() -> None:
    subject = by_name(beside_a_stranger(TEMPLATE))
    seen: list[bool] = []
    check = all_checks()["template:is_named_as_its_model_type"]
    run_check(subject, attrs.evolve(check, run=lambda _: seen.append("stranger_coarse" in schemes())))
    assert seen == [False]
