"""The journal of a run: after a kill at any byte, it has only whole entries."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quark.checkpoint.atomic_directory import JOURNAL, finished_blocks
from quark.errors import ResumeError
from quark.runs.identity import RunIdentity
from quark.runs.journal import FinishedBlock, Journal

IDENTITY = RunIdentity({"dtype": "torch.float32", "list": [1, 2]}, {"torch": "2.0"}, {"config.json": "ab"}, {"calls": 2})
BLOCKS = [
    FinishedBlock(
        f"layers.{i}", {f"layers.{i}.weight": f"crc32:{i:08x}:8"}, {"layers": {"é\n": {"error": 0.1 + i}}}, {"input_groups": [["q", "k"]]}
    )
    for i in range(3)
]


def written(tmp_path: Path, blocks: list[FinishedBlock] = BLOCKS) -> Path:
    (tmp_path / "checkpoint").mkdir(exist_ok=True)
    (tmp_path / "checkpoint" / "model.safetensors").write_text("")
    journal = Journal.begin(tmp_path / "checkpoint", IDENTITY, two_passes=True)
    for block in blocks:
        journal.add(block)
    return tmp_path / JOURNAL


def test_entries_come_back_as_they_were_added(tmp_path: Path) -> None:
    written(tmp_path)
    journal = Journal.read(tmp_path)
    assert list(journal.finished) == BLOCKS
    assert journal.two_passes
    assert finished_blocks(tmp_path) == len(BLOCKS)
    journal.refuse_other_run(IDENTITY)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("journal"))


@given(data=st.data())
def test_a_journal_that_ends_anywhere_has_the_entries_before_and_takes_more(
    whole: Path, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = whole.read_bytes()
    first = raw.index(b"\n") + 1
    end = data.draw(st.integers(first, len(raw)))
    directory = tmp_path_factory.mktemp("cut")
    (directory / JOURNAL).write_bytes(raw[:end])
    journal = Journal.read(directory)
    count = raw[first:end].count(b"\n")
    assert list(journal.finished) == BLOCKS[:count]
    for block in BLOCKS[count:]:
        journal.add(block)
    assert (directory / JOURNAL).read_bytes() == raw


@given(data=st.data())
def test_a_changed_byte_ends_the_journal_before_its_line(whole: Path, data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    raw = bytearray(whole.read_bytes())
    first = raw.index(b"\n") + 1
    place, bit = data.draw(st.integers(first, len(raw) - 1)), data.draw(st.integers(0, 7))
    before = raw[first:place].count(b"\n")
    raw[place] ^= 1 << bit
    directory = tmp_path_factory.mktemp("changed")
    (directory / JOURNAL).write_bytes(raw)
    finished = list(Journal.read(directory).finished)
    # A changed byte between the values, such as a space for a line's end, may leave the line as it was.
    assert finished in (BLOCKS[:before], BLOCKS)


def test_entries_that_are_cut_off_are_replaced(tmp_path: Path) -> None:
    path = written(tmp_path)
    raw = path.read_bytes()
    journal = Journal.read(tmp_path)
    journal.cut(1)
    assert list(journal.finished) == BLOCKS[:1]
    assert path.read_bytes() == raw, "nothing is lost before there is something to replace it"
    for block in BLOCKS[1:]:
        journal.add(block)
    assert path.read_bytes() == raw


@pytest.mark.parametrize("count", range(len(BLOCKS)))
def test_an_entry_behind_a_cut_is_the_last_one(count: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    journal = Journal.read(tmp_path)
    journal.cut(count)
    journal.add(BLOCKS[-1])
    assert list(Journal.read(tmp_path).finished) == [*BLOCKS[:count], BLOCKS[-1]]
    assert path.read_bytes() == b"".join([*lines[: 1 + count], lines[-1]])


def test_what_differs_is_named_and_both_ways_on(tmp_path: Path) -> None:
    written(tmp_path)
    other = RunIdentity({"dtype": "torch.float16", "list": [1, 3]}, {"torch": "2.0"}, {"config.json": "ab"}, {"calls": 2, "more": 1})
    with pytest.raises(ResumeError, match=r"--restart.*3 finished block") as caught:
        Journal.read(tmp_path).refuse_other_run(other)
    assert caught.value.differences == (
        "settings.dtype was 'torch.float32' and is 'torch.float16'",
        "settings.list.1 was 2 and is 3",
        "data.more was not there and is 1",
    )
    assert all(line in str(caught.value) for line in caught.value.differences)


def test_many_differences_are_counted(tmp_path: Path) -> None:
    written(tmp_path)
    other = RunIdentity({str(i): i for i in range(30)}, *(getattr(IDENTITY, name) for name in ("versions", "source", "data")))
    with pytest.raises(ResumeError, match="and 25 more"):
        Journal.read(tmp_path).refuse_other_run(other)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"no json\n", None])
def test_a_journal_without_a_header_of_this_version_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":7', 1) if content is None else content)
    with pytest.raises(ResumeError, match=r"is damaged or has another version.*--restart"):
        Journal.read(tmp_path)


def test_files_that_were_not_there_when_the_run_began_are_removed(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "checkpoint" / "config.json").write_text("half")
    Journal.read(tmp_path).remove_later_files(tmp_path / "checkpoint")
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["model.safetensors"]


LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=4
)
KEYS = st.sampled_from(["format", "run", "two_passes", "files", "name", "checksums", "report", "learned", "more"])
LINES = VALUES | st.dictionaries(KEYS, VALUES)


def line_of(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"))
    return f'{{"crc32":{zlib.crc32(text.encode())},"line":{text}}}\n'.encode()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(KEYS, VALUES), lines=st.lists(LINES, max_size=3), is_plain=st.booleans())
def test_a_crafted_journal_is_read_or_refused(header: dict[str, Any], lines: list[Any], is_plain: bool, tmp_path: Path) -> None:
    own = {"format": 1, "run": {}, "two_passes": False, "files": []} | ({} if is_plain else header)
    (tmp_path / JOURNAL).write_bytes(b"".join(map(line_of, [own, *lines])))
    try:
        journal = Journal.read(tmp_path)
        journal.refuse_other_run(IDENTITY)
    except ResumeError:
        return


def test_a_journal_nested_beyond_all_bounds_ends_before_that_line(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"crc32":0,"line":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n")
    assert len(Journal.read(path.parent).finished) == len(BLOCKS)
