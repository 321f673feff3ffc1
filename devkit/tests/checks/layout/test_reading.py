"""Checks of layouts tell of the damage that an inspection finds in a checkpoint of the layout's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quark.checkpoint.inspection import Inspection
from quark_devkit.check import CheckFailedError
from quark_devkit.checks.layout import reading


def test_is_inspected_names_the_first_damage_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "stored_exports", lambda subject: [("int8", None, None)])
    monkeypatch.setattr(reading, "inspect_checkpoint", lambda out: Inspection("a layout", ("'a.weight' is missing", "and more")))
    subject: Any = SimpleNamespace(record=SimpleNamespace(inspector="of a plugin"))
    with pytest.raises(CheckFailedError, match=r"its own checkpoint in 'int8' as damaged: .*'a.weight' is missing"):
        reading.is_inspected.run(subject)
