"""A source that changes while a run reads it is an error about the source, and nothing appears under OUT."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quark.errors import CheckpointError
from quark.models.hf import shards
from quark.runs import quantize_block, quantize_checkpoint
from quark.runs.source import CheckpointSource

from .interrupted import BLOCKS, DATA, config

SHARD = "model.safetensors"


def zeros(file: Path) -> bytes:
    """The bytes of a shard with the same header and no number but 0."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return data[:end] + bytes(len(data) - end)


def replaced(source: Path) -> None:
    (source / "other").write_bytes(zeros(source / SHARD))
    (source / "other").replace(source / SHARD)


def rewritten(source: Path) -> None:
    data = zeros(source / SHARD)
    with (source / SHARD).open("r+b") as file:
        file.write(data)


def rewritten_in_secret(source: Path) -> None:
    times = (source / SHARD).stat()
    rewritten(source)
    os.utime(source / SHARD, ns=(times.st_atime_ns, times.st_mtime_ns))


def other_config(source: Path) -> None:
    file = source / "config.json"
    file.write_text(file.read_text().replace("silu", "gelu"))


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "replaced": (replaced, f"{SHARD}' has been changed or replaced since it was first read"),
    "rewritten in place": (rewritten, f"{SHARD}' has been changed or replaced since it was first read: time of change"),
    "rewritten with its time": (rewritten_in_secret, rf"was changed during the run: {SHARD}\.sample was"),
    "cut": (lambda source: os.truncate(source / SHARD, 5000), rf"{SHARD}' has been changed .*: bytes \d+ before and 5000 now"),
    "removed": (lambda source: (source / SHARD).unlink(), rf"cannot be read from '.*{SHARD}' \(No such file"),
    "another config": (other_config, r"was changed during the run: config\.json was"),
}


def behind(monkeypatch: pytest.MonkeyPatch, block: int, act: Callable[[], object]) -> None:
    """Act when a block has been quantized."""
    plain, done = quantize_block.quantize_block, list[str]()

    def acting(started: Any, sink: Any, each: Any, *rest: Any) -> None:
        plain(started, sink, each, *rest)
        done.append(each.name)
        if len(done) == block:
            act()

    monkeypatch.setattr(quantize_block, "quantize_block", acting)


@pytest.mark.parametrize("name", ["round to nearest", "gptq"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_source_that_changes_is_an_error_about_it(
    what: str, name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, copied)
    change, complaint = CHANGES[what]
    behind(monkeypatch, 1, lambda: change(copied))
    with pytest.raises(CheckpointError, match=complaint):
        quantize_checkpoint(copied, out, config(name), DATA)
    assert not out.exists()


@pytest.mark.parametrize("what", CHANGES)
def test_a_source_that_changes_behind_the_last_block_is_an_error_too(
    what: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(source, copied)
    behind(monkeypatch, BLOCKS, lambda: CHANGES[what][0](copied))
    with pytest.raises(CheckpointError):
        quantize_checkpoint(copied, out, config(), DATA)
    assert not out.exists()


def test_files_are_looked_at_twice_a_read_and_nothing_more_is_read(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, reads = list[object](), list[object]()
    state_of, read = shards.state_of, CheckpointSource._checked

    def looking(file: Any) -> dict[str, int]:
        looked.append(file)
        return state_of(file)

    def reading(self: CheckpointSource, recipes: Any) -> Any:
        reads.append(recipes)
        return read(self, recipes)

    monkeypatch.setattr(shards, "state_of", looking)
    monkeypatch.setattr(CheckpointSource, "_checked", reading)
    quantize_checkpoint(source, tmp_path / "out", config())
    once = 2  # when headers are read, and at the end
    assert len(looked) <= 2 * len(reads) + once + 4  # carried tensors and the check of the export open the source again
