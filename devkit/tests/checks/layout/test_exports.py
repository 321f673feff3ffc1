"""Exports that checks share, and checks of layouts whose exports take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quark.checkpoint import CheckpointContent, ExportOptions
from quark.plugins import using
from quark_devkit import all_checks, run_check
from quark_devkit.checks.layout import exports
from quark_devkit.extent import thoroughly

from ...mutants.healthy_layouts import Plain, record_of
from ...mutants.mutant import subject_among


class Counting(Plain):
    count = 0

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        Counting.count += 1
        super().export(content, out, options)


def exports_of(subject: Any, *names: str) -> int:
    """Run checks, which pass, and return how often the layout exports."""
    before = Counting.count
    for name in names:
        result = run_check(subject, all_checks()[f"layout:{name}"])
        assert result.outcome == "passed", result.message
    return Counting.count - before


def test_checks_that_read_files_share_an_export() -> None:
    subject = subject_among("layout", (record_of(Counting),))
    of_two = ("writes_the_same_twice", "leaves_the_model_as_it_is", "writes_in_its_directory_alone")
    assert exports_of(subject, "writes_no_pickle", *of_two) == 2


def test_a_slow_layout_stores_fewer_schemes_but_before_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_among("layout", (record_of(Counting),))
    exports_of(subject, "writes_the_same_twice")
    whole = exports_of(subject, "stores_or_refuses_every_scheme")
    monkeypatch.setattr(exports, "SLOW", -1.0)
    assert exports_of(subject, "stores_or_refuses_every_scheme") == 2
    with thoroughly():
        assert exports_of(subject, "stores_or_refuses_every_scheme") == whole > 3


def test_a_slow_layout_is_exported_from_disk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "SLOW", -1.0)
    subject = subject_among("layout", (record_of(Counting),))
    exports_of(subject, "writes_the_same_twice")
    assert exports_of(subject, "writes_the_same_from_disk", "brings_the_tokenizer", "names_no_place_of_this_machine") == 3


def test_a_layout_that_reads_tokenizers_gets_no_broken_one() -> None:
    plain, inside = (subject_among("layout", (record_of(Counting, capabilities=given),)) for given in ((), ("tokenizer_inside",)))
    for subject, has_one in ((plain, True), (inside, False)):
        with using(subject.catalog):
            assert ("tokenizer.json" in exports.source_export(subject).files) is has_one
