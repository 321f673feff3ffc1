"""A run that several ranks share keeps a journal, from which any number of ranks goes on.

Here ranks are threads.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from quark.base.ranks import Ranks
from quark.errors import ResumeError, UnsupportedError
from quark.runs import from_disk, quantize_checkpoint
from quark.runs.journal import Journal
from quark_devkit.threads import in_threads
from quark_devkit.whole_runs import interrupted_behind

from .interrupted import DATA, config, files, partial_of

CASES = (
    "gptq",
    "a float forward beside it",
    "awq and gptq",
    "awq and a float forward",
    "static activations and cache",
    "static activations, cache and attention, with gptq",
    "a rotation before gptq",
)


@pytest.fixture(autouse=True)
def _one_opens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one thread at a time make a model, since transformers sets torch's default dtype meanwhile."""
    plain, lock = from_disk.opened_checkpoint, threading.Lock()

    def opened(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return plain(*args, **kwargs)

    monkeypatch.setattr(from_disk, "opened_checkpoint", opened)


def shared(source: Path, out: Path, name: str, size: int, **more: Any) -> None:
    def run(ranks: Ranks) -> None:
        quantize_checkpoint(source, out, config(name), DATA, ranks=ranks, **more)

    in_threads(run, size, is_deterministic=True)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("before", "behind"), [(1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("name", CASES)
def test_another_number_of_ranks_goes_on_and_writes_the_bytes_of_one(
    name: str, before: int, behind: int, source: Path, tmp_path: Path
) -> None:
    shared(source, tmp_path / "once", name, 1)
    out = tmp_path / "out"
    with interrupted_behind(1):
        shared(source, out, name, before)
    assert len(Journal.read(partial_of(out)).finished) == 1
    shared(source, out, name, behind, resume=True)
    assert files(out) == files(tmp_path / "once")
    shared(source, out, name, before, resume=True)  # which is finished
    assert files(out) == files(tmp_path / "once")
    assert not list(tmp_path.glob(".*"))


def test_ranks_that_divide_the_blocks_write_the_bytes_of_one_and_do_not_resume(source: Path, tmp_path: Path) -> None:
    name = "round to nearest"
    shared(source, tmp_path / "one", name, 1)
    shared(source, tmp_path / "two", name, 2)
    assert files(tmp_path / "two") == files(tmp_path / "one")
    with interrupted_behind(1):
        shared(source, tmp_path / "out", name, 1)
    with pytest.raises(UnsupportedError, match="2 processes divide the blocks among them"):
        shared(source, tmp_path / "out", name, 2, resume=True)
    shared(source, tmp_path / "out", name, 1, resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "one")


def test_a_run_in_another_order_of_sums_does_not_go_on(source: Path, tmp_path: Path) -> None:
    with interrupted_behind(1):
        shared(source, tmp_path / "out", "gptq", 2)
    with pytest.raises(ResumeError, match=r"settings\.deterministic was True and is False"):
        quantize_checkpoint(source, tmp_path / "out", config("gptq"), DATA, resume=True)
