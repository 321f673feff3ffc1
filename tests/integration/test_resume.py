"""A run from disk that failed goes on from its finished blocks, and gives the bytes of a run that did not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from quark.base import files as files_of_systems
from quark.checkpoint import ExportOptions
from quark.checkpoint.atomic_directory import JOURNAL
from quark.checkpoint.shard_writer import ShardWriter
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_devkit.whole_runs import interrupted_behind

from .interrupted import (
    BLOCKS,
    CASES,
    DATA,
    STATIC,
    checkpoint,
    config,
    files,
    left_behind,
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("behind", [1, BLOCKS])
@pytest.mark.parametrize("name", CASES)
def test_bytes_and_report_are_those_of_a_run_that_was_not_interrupted(
    name: str, behind: int, source: Path, tmp_path: Path, quantized: list[str], reports: list[dict[str, Any]]
) -> None:
    quantize_checkpoint(source, tmp_path / "once", config(name), DATA)
    out = tmp_path / "out"
    left_behind(source, out, name, behind)
    quantized.clear()
    quantize_checkpoint(source, out, config(name), DATA, resume=True)
    assert len(quantized) == BLOCKS - behind
    assert files(out) == files(tmp_path / "once")
    assert reports[-1] == reports[0]
    assert not list(tmp_path.glob(".*"))


def test_a_run_may_be_interrupted_again_and_again(source: Path, tmp_path: Path, quantized: list[str]) -> None:
    quantize_checkpoint(source, tmp_path / "once", config("gptq"), DATA)
    quantized.clear()
    out = tmp_path / "out"
    for _ in range(BLOCKS):
        with interrupted_behind(1):
            quantize_checkpoint(source, out, config("gptq"), DATA, resume=True)
    quantize_checkpoint(source, out, config("gptq"), DATA, resume=True)
    assert files(out) == files(tmp_path / "once")
    # Each run has quantized one block that it could enter, and one that it could not.
    assert [name.rpartition(".")[2] for name in quantized] == ["0", "1", "1", "2", "2"]


FORMS: dict[str, tuple[str, dict[str, Any], ExportOptions, dict[str, Any]]] = {
    "several files": ("llama", {}, ExportOptions(max_shard_bytes=30_000), {}),
    "rounded values": ("llama", {}, ExportOptions(weight_format="fake_quantized"), {}),
    "no zero points": ("llama", {}, ExportOptions(zero_points=False), {}),
    "tied embeddings": ("llama", {"tie_word_embeddings": True}, ExportOptions(), {}),
    "transposed weights": (
        "gpt2",
        {"n_embd": 64, "n_head": 4, "n_layer": BLOCKS, "n_inner": 64, "n_positions": 64},
        ExportOptions(),
        {},
    ),
    "fused projections": ("phi3", {}, ExportOptions(), {}),
    "experts": ("mixtral", {"num_local_experts": 4}, ExportOptions(), {}),
    "experts that are stored fused": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, ExportOptions(), {}),
    "two passes of each block": ("llama", {}, ExportOptions(), {"activation_memory": 1}),
    "another dtype": ("llama", {}, ExportOptions(), {}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
def test_so_they_are_whatever_is_stored(form: str, tmp_path: Path) -> None:
    family, sizes, options, fields = FORMS[form]
    source = checkpoint(tmp_path / "source", family, **sizes)
    asked = attrs.evolve(LLMTemplate.get(family).get_config(**STATIC, algorithm="gptq"), **fields)
    more: Any = {"options": options, "dtype": "float16" if form == "another dtype" else "auto"}
    quantize_checkpoint(source, tmp_path / "once", asked, DATA, **more)
    with interrupted_behind(2):
        quantize_checkpoint(source, tmp_path / "out", asked, DATA, **more)
    quantize_checkpoint(source, tmp_path / "out", asked, DATA, resume=True, **more)
    assert files(tmp_path / "out") == files(tmp_path / "once")


def test_the_memory_mode_is_that_of_the_interrupted_run_whatever_is_free_now(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.runs.run.free_bytes", lambda _: 1)
    quantize_checkpoint(source, tmp_path / "once", config("gptq"), DATA)
    left_behind(source, tmp_path / "out", "gptq")
    monkeypatch.setattr("quark.runs.run.free_bytes", lambda _: 2**40)
    plan = quantize_checkpoint(source, tmp_path / "out", config("gptq"), DATA, resume=True)
    assert any("runs twice" in note for note in plan.notes)
    assert files(tmp_path / "out") == files(tmp_path / "once")


@pytest.mark.parametrize("what", ["header", "tensor", "end"])
def test_blocks_from_the_first_damaged_one_on_are_quantized_again_and_it_is_named(
    what: str, source: Path, tmp_path: Path, quantized: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(source, tmp_path / "once", config("gptq"), DATA)
    shard = left_behind(source, tmp_path / "out", "gptq") / "checkpoint" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    name = "model.layers.1.mlp.up_proj.weight"
    begin = 8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][0]
    if what == "end":
        data = data[: begin + 3]
    else:
        data[begin + 3 if what == "tensor" else 12] ^= 1
    shard.write_bytes(data)
    quantized.clear()
    quantize_checkpoint(source, tmp_path / "out", config("gptq"), DATA, resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "once")
    if what == "header":  # it is known, and written anew
        assert len(quantized) == 1
        return
    assert quantized == ["model.layers.1", "model.layers.2"]
    assert "The files of 'model.layers.1' from the interrupted run are damaged" in caplog.text
    assert "This block and the 0 finished block(s) after it are quantized again" in caplog.text
    assert what == "end" or f"(1 of {sum('layers.1.' in n for n in header)} tensors: {name})" in caplog.text


def test_a_block_is_on_the_disk_before_the_journal_says_so_and_everything_before_the_output_has_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    names: dict[int, str] = {}

    def recorded(owner: Any, name: str, of: Callable[[Any], str]) -> None:
        plain = getattr(owner, name)

        def record(first: Any, *rest: Any, **named: Any) -> Any:
            events.append((name, of(first)))
            return plain(first, *rest, **named)

        monkeypatch.setattr(owner, name, record)

    def named_open(path: Any, *rest: Any, **named: Any) -> int:
        file = plain_open(path, *rest, **named)
        names[file] = Path(path).name
        return file

    plain_open = os.open
    monkeypatch.setattr(os, "open", named_open)
    recorded(files_of_systems, "pwrite", names.__getitem__)
    for name in ("fdatasync", "fsync"):
        if hasattr(os, name):
            recorded(os, name, names.__getitem__)
    recorded(os, "rename", lambda path: Path(path).name)
    plain_when_stored = ShardWriter.when_stored

    def when_stored(writer: ShardWriter, then: Callable[..., None]) -> None:
        if writer._pending is not None:
            writer._pending.result()  # the block's tensors are in the files, and nothing of the next block is
        events.append(("when_stored", ""))
        plain_when_stored(writer, then)

    monkeypatch.setattr(ShardWriter, "when_stored", when_stored)
    quantize_checkpoint(source, tmp_path / "out", config(), options=ExportOptions(max_shard_bytes=30_000))
    unsynchronized: set[str] = set()
    due: list[set[str]] = []  # for each block that is being stored, what lay unsynchronized; the next block may be written meanwhile
    entries = 0
    for event, file in events:
        if event == "rename" and file == "checkpoint":
            assert not unsynchronized
        elif event == "pwrite" and file != "owner.lock":
            if file == JOURNAL:
                assert not (due.pop(0) if entries else unsynchronized)
                entries += 1
            unsynchronized.add(file)
        elif event == "when_stored":
            due.append(set(unsynchronized))
        elif event in ("fsync", "fdatasync"):
            for files in (unsynchronized, *due):
                files.discard(file)
    assert entries == 1 + BLOCKS
    renamed = events.index(("rename", "checkpoint"))
    behind_last_write = max(i for i, (event, _) in enumerate(events) if event == "pwrite")
    synchronized = {file for event, file in events[behind_last_write:renamed] if event == "fsync"}
    assert synchronized >= {path.name for path in (tmp_path / "out").iterdir()}
    if sys.platform != "win32":  # which has no such call for a directory
        assert "checkpoint" in synchronized
        assert ("fsync", tmp_path.name) in events[renamed:]
