"""The run's file shows whether the files beside it have changed since they were written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.checkpoint.destination import RUN_FILE
from quark.checkpoint.run_file import complete_run_file, verify
from quark.checkpoint.shard_layout import ShardLayout
from quark.checkpoint.shard_writer import ShardWriter
from quark.errors import CheckpointError

TENSORS = {"a": torch.arange(40.0), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(0), "d": torch.arange(7)}


@pytest.fixture(scope="module", params=[10**9, 80], ids=["one file", "several"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("written")
    layout = ShardLayout.of([{name: tensor.to("meta")} for name, tensor in TENSORS.items()], request.param)
    with ShardWriter(layout, directory) as writer:
        writer.write(TENSORS)
        writer.finish()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    complete_run_file(directory)
    return directory


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def test_files_that_are_as_they_were_written_have_no_changes(copy: Path) -> None:
    (copy / "tokenizer.json").write_text('{"another": 1}')  # lies beside the checkpoint
    comparison = verify(copy)
    assert comparison.changes == ()
    assert comparison.tensors == len(TENSORS)
    assert comparison.files == 1 + (copy / "model.safetensors.index.json").is_file()


def test_every_bit_of_every_file_counts(copy: Path) -> None:
    """Headers, tensors, config.json and the index: all bits of each are changed one by one."""
    for path in sorted(copy.iterdir()):
        if path.name in (RUN_FILE, "tokenizer.json"):
            continue
        data = path.read_bytes()
        for bit in range(0, 8 * len(data), 1 if len(data) < 200 else 7):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            assert verify(copy).changes, f"bit {bit} of {path.name}"
        path.write_bytes(data)
    assert not verify(copy).changes


def test_the_message_names_the_tensor_or_the_header(copy: Path) -> None:
    path = next(path for path in sorted(copy.glob("*.safetensors")) if b'"a"' in path.read_bytes())
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start] ^= 1
    path.write_bytes(data)
    assert verify(copy).changes == (f"1 tensor(s) in '{path.name}' have changed since they were written: a",)
    data[12] ^= 1
    path.write_bytes(data)
    assert verify(copy).changes == (f"the header of '{path.name}' has changed since it was written",)
    path.write_bytes(data[:-1])
    assert verify(copy).changes == (f"'{path.name}' has {len(data) - 1:,} bytes, but had {len(data):,} when it was written",)
    path.unlink()
    assert verify(copy).changes == (f"'{path.name}' is missing",)


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        values = json.loads((directory / RUN_FILE).read_text())
        change(values)
        (directory / RUN_FILE).write_text(json.dumps(values))

    return edit


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda d: (d / RUN_FILE).unlink(), "has no quark_run.json"),
    "no JSON": (lambda d: (d / RUN_FILE).write_text("{"), "is no JSON file"),
    "no checksums": (edited(lambda v: v.pop("checksums")), "has no checksums, because an earlier version"),
    "another kind": (edited(lambda v: v.update(checksums=[])), "has no checksums, because an earlier version"),
    "no sizes": (edited(lambda v: v.pop("files")), "is damaged: its sizes or checksums are missing"),
    "a size that is none": (edited(lambda v: v["files"].update({"config.json": "x"})), "is damaged: its sizes"),
    "a file elsewhere": (edited(lambda v: v["files"].update({"../other": 3})), "is damaged: its sizes"),
    "no tensors": (edited(lambda v: v["checksums"].pop("tensors")), "is damaged: its sizes or checksums"),
    "a checksum that is none": (edited(lambda v: v["checksums"]["tensors"].update(a=3)), "is damaged: its sizes"),
    "no header": (edited(lambda v: v["checksums"].update(headers={})), "its sizes and its checksums name different files"),
    "a file too many": (edited(lambda v: v["files"].update(other=3)), "its sizes and its checksums name different files"),
}


@pytest.mark.parametrize(("change", "words"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_run_file_that_is_none_is_an_error(change: Callable[[Path], object], words: str, copy: Path) -> None:
    change(copy)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        verify(copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["checksums"]["tensors"].pop("a"),
        lambda v: v["checksums"]["tensors"].update(more="sums:00:0"),
        lambda v: v["checksums"]["headers"].update(dict.fromkeys(v["checksums"]["headers"], "sums:00:99999999999999")),
        lambda v: v["checksums"]["headers"].update(dict.fromkeys(v["checksums"]["headers"], "sums")),
    ],
    ids=["a tensor without", "a tensor too many", "a header of another size", "a header without a size"],
)
def test_checksums_of_other_tensors_are_a_change(change: Callable[[dict[str, Any]], object], copy: Path) -> None:
    edited(change)(copy)
    assert verify(copy).changes
