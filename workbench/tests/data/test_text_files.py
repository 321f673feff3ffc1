"""Files of data are text in UTF-8, plain or compressed, and anything else is refused by its name."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from quark.errors import CalibrationError, MissingPluginError
from quark_tiny_model import tiny_tokenizer
from quark_workbench.data import read_samples, token_sequences

LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in ("one", "zwei, für ü", "三"))
SAMPLES = ["one", "zwei, für ü", "三"]
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
NAMES = ("a.txt", "a.jsonl", "a.json", "a.other")
"""A name for each way of reading."""


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("compression", ["", *COMPRESSIONS])
@pytest.mark.parametrize("content", [LINES, json.dumps([{"text": text} for text in SAMPLES], indent=1)])
def test_json_is_read_with_and_without_compression_and_a_mark(content: str, compression: str, mark: str, tmp_path: Path) -> None:
    data = (mark + content).encode()
    file = tmp_path / f"c.jsonl{compression}"
    file.write_bytes(COMPRESSIONS[compression](data) if compression else data)
    assert list(read_samples(file)) == SAMPLES
    assert list(read_samples(tmp_path)) == SAMPLES


@pytest.mark.parametrize("name", ["a.txt.gz", "a.gz", "a.txt", "A.TXT.GZ"])
def test_what_is_compressed_is_told_by_its_bytes(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress("\ufeffsome text, für alle".encode()))
    assert list(read_samples(tmp_path / name)) == ["some text, für alle"]


def test_zstandard_is_read_if_its_library_is_there_and_otherwise_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.jsonl.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd" + LINES.encode())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPluginError, match=r"Zstandard need the package 'pyarrow'.*pip install 'quark-core\[data\]'"):
        list(read_samples(file))

    def input_stream(path: str, compression: str) -> object:
        assert compression == "zstd"
        stream = Path(path).open("rb")  # noqa: SIM115 - closed by the reader
        stream.seek(4)
        return stream

    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(input_stream=input_stream))
    assert list(read_samples(file)) == SAMPLES


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (LINES.encode("utf-16"), "UTF-16"),
        (LINES.encode("utf-16-le"), "zero bytes.*UTF-16"),
        (LINES.encode("utf-16-be"), "zero bytes.*UTF-16"),
        (LINES.encode("utf-32"), "UTF-32|zero bytes"),
        ("für".encode("latin-1"), "not UTF-8 text.*0xfc.*iconv"),
        (LINES.encode() + b"\0", "zero bytes"),
        (b'{"text": "one"}\n\xff\n', "not UTF-8 text.*0xff"),
        (random.Random(0).randbytes(4096), "not UTF-8 text"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "not UTF-8 text"),
        (bytes(10_000), "zero bytes"),
    ],
    ids=["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "a byte 0 at the end", "a bad byte", "random", "png", "zeros"],
)
def test_what_is_no_text_is_refused_by_its_name(data: bytes, says: str, name: str, compressed: bool, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(gzip.compress(data) if compressed else data)
    wanted = "not UTF-8 text" if compressed else says
    with pytest.raises(CalibrationError, match=rf"'.*{name}'.*({wanted})"):
        list(read_samples(file))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_damaged_archive_is_refused_by_its_name(compression: str, tmp_path: Path) -> None:
    file = tmp_path / f"c.jsonl{compression}"
    file.write_bytes(COMPRESSIONS[compression]((LINES * 1000).encode())[:-12])
    with pytest.raises(CalibrationError, match=rf"c\.jsonl\{compression}' is damaged"):
        list(read_samples(file))


@pytest.mark.posix("it has other devices and pipes")
def test_pipes_and_devices_are_refused_before_they_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for path in ("/dev/zero", "/dev/null", "/dev/random", tmp_path / "pipe.jsonl", tmp_path / "zero.txt"):
        with pytest.raises(CalibrationError, match="is a pipe or a device"):
            read_samples(path)
        with pytest.raises(CalibrationError, match="there is no file"):
            read_samples("text", {"path": str(path)})
    with pytest.raises(CalibrationError, match="no file that a source can read"):
        read_samples(tmp_path)


def test_half_of_a_surrogate_pair_costs_its_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = [{"role": "user", "content": "half \ud83d"}]
    rows = [{"text": "one"}, {"text": "half \ude00"}, {"text": "a pair \U0001f600"}, {"messages": chat}]
    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with file.open("ab") as more:
        more.write(b'{"text": "as bytes \xed\xa0\xbd"}\n{"text": "last"}\n')
    assert list(read_samples(file)) == ["one", "a pair \U0001f600", "last"]
    assert "half of a surrogate pair" in caplog.text
    assert token_sequences(tiny_tokenizer(), read_samples(file), 4, 8)


def test_a_file_of_nothing_but_broken_samples_holds_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "\\ud83d"}\n')
    with pytest.raises(CalibrationError, match=r"c\.jsonl' holds no text"):
        list(read_samples(tmp_path / "c.jsonl"))
    assert "1 sample(s)" in caplog.text


def test_a_line_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark_workbench.data.text_files._LONGEST_LINE", 1000)
    monkeypatch.setattr("quark_workbench.data.text_files._LONGEST_TEXT", 1000)
    for name, says in (("a.jsonl", "has a line of more than 1,000"), ("a.txt", "has more than 1,000 characters")):
        (tmp_path / name).write_bytes(gzip.compress(b" " * 2000))
        with pytest.raises(CalibrationError, match=says):
            list(read_samples(tmp_path / name))
