"""Sinks: the blocks that count as finished when a run resumes, and the time when a block is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import nn

from quark.models.plan.decoder_blocks import Block
from quark.runs.identity import RunIdentity
from quark.runs.journal import FinishedBlock, Journal
from quark.runs.sink import BlockResult, CheckpointSink, InPlaceSink, JournaledSink


class Stream:
    """An export that lists the calls that it gets, and finds the blocks named in ``damaged`` damaged."""

    encodes = False

    def __init__(self, *damaged: str) -> None:
        self.damaged = damaged
        self.asked: list[str] = []
        self.stored: list[Callable[[Mapping[str, str]], None]] = []

    def adopt(self, block: Block, checksums: Mapping[str, str]) -> Sequence[str]:
        self.asked.append(block.name)
        return list(checksums) if block.name in self.damaged else []

    def write(self, block: Block | None) -> None:
        self.asked.append(f"write {block and block.name}")

    def write_float(self) -> None:
        self.asked.append("write float")

    def read(self, block: Block) -> None:
        self.asked.append(f"read {block.name}")

    def finish(self, content: object) -> None:
        self.asked.append("finish")

    def when_stored(self, then: Callable[[Mapping[str, str]], None]) -> None:
        self.stored.append(then)


BLOCKS = [Block(f"layers.{number}", nn.Identity()) for number in range(4)]


def journal_of(tmp_path: Path, *names: str) -> Journal:
    """Return the journal of an interrupted run, read from its file."""
    (tmp_path / "checkpoint").mkdir()
    journal = Journal.begin(tmp_path / "checkpoint", RunIdentity({}, {}, {}, {}), two_passes=False)
    for name in names:
        journal.add(FinishedBlock(name, {f"{name}.weight": "1"}, {"of": name}, {"learned": name}))
    return Journal.read(tmp_path)


def sink_of(stream: Stream, journal: Journal) -> JournaledSink:
    return JournaledSink(nn.Identity(), stream, journal, BLOCKS)  # type: ignore[arg-type]


def test_finished_blocks_have_the_results_of_the_journal(tmp_path: Path) -> None:
    stream = Stream()
    sink = sink_of(stream, journal_of(tmp_path, "layers.0", "layers.1"))
    assert [sink.finished(block) for block in BLOCKS] == [
        BlockResult({"of": "layers.0"}, {"learned": "layers.0"}),
        BlockResult({"of": "layers.1"}, {"learned": "layers.1"}),
        None,
        None,
    ]
    sink.read(BLOCKS[1])
    assert stream.asked == ["layers.0", "layers.1", "read layers.1"]


def test_behind_a_damaged_block_none_is_finished(tmp_path: Path) -> None:
    stream = Stream("layers.1")
    sink = sink_of(stream, journal_of(tmp_path, "layers.0", "layers.1", "layers.2", "layers.3"))
    assert [sink.finished(block) is not None for block in BLOCKS] == [True, False, False, False]
    assert stream.asked == ["layers.0", "layers.1"], "what lies behind it is not adopted"
    assert [entry.name for entry in Journal.read(tmp_path).finished][:1] == ["layers.0"]


def test_a_block_of_another_name_is_damaged(tmp_path: Path) -> None:
    stream = Stream()
    sink = sink_of(stream, journal_of(tmp_path, "layers.0", "layers.2"))
    assert [sink.finished(block) is not None for block in BLOCKS] == [True, False, False, False]
    assert stream.asked == ["layers.0"]


def test_a_block_comes_into_the_journal_when_it_is_on_the_disk(tmp_path: Path) -> None:
    stream = Stream()
    sink = sink_of(stream, journal_of(tmp_path))
    sink.end_block(BLOCKS[0], BlockResult({"a": 1}, {"b": 2}))
    assert stream.asked == ["write layers.0"]
    assert Journal.read(tmp_path).finished == ()
    stream.stored.pop()({"layers.0.weight": "7"})
    assert Journal.read(tmp_path).finished == (FinishedBlock("layers.0", {"layers.0.weight": "7"}, {"a": 1}, {"b": 2}),)
    sink.end_block(None, BlockResult())
    assert stream.stored == [], "what lies outside the blocks is written at the end of every run"


def test_an_export_is_begun_written_and_finished() -> None:
    stream = Stream()
    sink = CheckpointSink(nn.Identity(), stream)  # type: ignore[arg-type]
    sink.begin()
    sink.end_block(BLOCKS[0], BlockResult())
    sink.end_block(None, BlockResult())
    sink.finish(None)  # type: ignore[arg-type]
    assert stream.asked == ["write float", "write layers.0", "write None", "finish"]
    assert sink.needs_values


def test_layers_are_replaced_in_place() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    layer, other = nn.Linear(2, 2), model["b"]
    sink = InPlaceSink(model)
    sink.accept({"a": layer})  # type: ignore[dict-item]
    assert model["a"] is layer
    assert model["b"] is other
    assert sink.wants(BLOCKS[0])
    assert sink.finished(BLOCKS[0]) is None
