"""OpenMP threads of the ``quark`` program sleep while they wait, unless the environment says otherwise."""

from __future__ import annotations

import os
import sys

import pytest

from quark_workbench.cli.main import main


@pytest.mark.parametrize(("given", "expected"), [(None, ("PASSIVE", "5000")), ("ACTIVE", ("ACTIVE", None))])
def test_main_sets_how_threads_wait_where_the_environment_does_not(
    given: str | None, expected: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that what main sets is undone
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    monkeypatch.setattr(sys, "argv", ["quark", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")) == expected
