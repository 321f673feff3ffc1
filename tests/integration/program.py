"""Run the program ``quark`` in this process."""

import pytest

from quark_workbench.cli.main import main


def run(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of the program with these arguments."""
    monkeypatch.setattr("sys.argv", ["quark", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        main()
    return int(done.value.code or 0)
