"""Text that plugins print while they are watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from quark.base.lazy import LazyRef
from quark.plugins import Source
from quark.plugins.registry import load_for
from quark_devkit.side_effects import prints_reach_stdout


@pytest.mark.parametrize("is_watched", [True, False])
def test_text_of_a_reference_reaches_stdout_if_it_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_watched: bool
) -> None:
    module = f"a_module_that_prints_{is_watched}"
    (tmp_path / f"{module}.py").write_text("print('hello')\nvalue = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    reference, source = LazyRef(f"{module}:value"), Source("acme-quant", "1.0", entry_point="acme")
    if is_watched:
        with prints_reach_stdout():
            assert load_for(reference, "a record", source) == 1
    else:
        assert load_for(reference, "a record", source) == 1
    printed = capsys.readouterr()
    assert (printed.out if is_watched else printed.err).strip() == "hello"
