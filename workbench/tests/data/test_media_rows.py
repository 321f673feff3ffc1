"""Samples with images and sounds: where their files may lie, and which parts of messages name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quark.errors import CalibrationError
from quark_workbench.data import read_samples
from quark_workbench.data.media_rows import MediaRow, has_media, media_of
from quark_workbench.data.samples import rendered, sample_of


def rows(folder: Path, *values: Any) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return folder / "rows.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the files that rows name, beside another one."""
    (tmp_path / "inside/sub").mkdir(parents=True)
    for name in ("a.png", "sub/b.wav", "../outside.png"):
        (tmp_path / "inside" / name).write_bytes(b"content")
    return tmp_path / "inside"


def asking(**part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}, {"role": "assistant", "content": "This."}]


def test_a_row_has_its_text_and_the_files_of_its_columns(folder: Path) -> None:
    path = rows(folder, {"image": "a.png", "caption": "A cat."}, {"audio": {"path": "sub/b.wav"}, "caption": "meow", "language": "de"})
    first, second = read_samples(path, {"column": "caption"})
    assert first == MediaRow("A cat.", images=(folder / "a.png",))
    assert second == MediaRow("meow", sounds=(folder / "sub/b.wav",), language="de")


@pytest.mark.parametrize(
    "part", [{"path": "a.png"}, {"image": "a.png"}, {"url": "a.png"}, {"path": "sub/../a.png"}, {"path": "file://a.png"}], ids=str
)
def test_a_part_of_a_message_names_its_file(folder: Path, part: dict[str, str]) -> None:
    (sample,) = read_samples(rows(folder, {"messages": asking(type="image", **part)}))
    assert media_of(sample, "image") == [folder / "a.png"]
    assert media_of(sample, "audio") == []
    assert not isinstance(sample, str | MediaRow)
    assert [message["content"][-1] for message in sample] == [{"type": "text", "text": "What?"}, {"type": "text", "text": "This."}]


def test_parts_without_a_path_take_the_columns_in_order(folder: Path) -> None:
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Compare."}]}]
    (sample,) = read_samples(rows(folder, {"messages": chat, "images": ["a.png", "sub/b.wav"]}))
    assert media_of(sample, "image") == [folder / "a.png", folder / "sub/b.wav"]


@pytest.mark.parametrize("images", [["a.png"], ["a.png"] * 3])
def test_parts_and_columns_of_another_number_are_refused(folder: Path, images: list[str]) -> None:
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]
    with pytest.raises(CalibrationError, match=r"line 1 of .*: add"):
        list(read_samples(rows(folder, {"messages": chat, "images": images})))


@pytest.mark.posix("links need a privilege on Windows")
def test_a_link_that_leads_out_of_the_directory_is_refused(folder: Path) -> None:
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    with pytest.raises(CalibrationError, match=r"which is outside '.*inside'"):
        list(read_samples(rows(folder, {"image": "link.png", "text": ""})))


@pytest.mark.parametrize("name", ["../outside.png", "/etc/hostname", "sub/../../outside.png"])
def test_a_path_that_leads_out_of_the_directory_is_refused(folder: Path, name: str) -> None:
    for row in ({"image": name, "text": ""}, {"messages": asking(type="image", path=name)}):
        with pytest.raises(CalibrationError, match=r"which is outside '.*inside': move the file there, or .*media=DIR"):
            list(read_samples(rows(folder, row)))


def test_another_directory_can_be_named_for_relative_and_absolute_paths(folder: Path) -> None:
    path = rows(folder, {"image": "outside.png"}, {"image": str(folder / "a.png")})
    samples = list(read_samples(path, {"media": str(folder.parent)}))
    assert [media_of(sample, "image") for sample in samples] == [[folder.parent / "outside.png"], [folder / "a.png"]]
    with pytest.raises(CalibrationError, match="names no directory"):
        list(read_samples(path, {"media": str(folder / "nowhere")}))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"image": "none.png"}, "line 1 of .* names the image 'none.png', but there is no file '.*none.png': a path is relative to"),
        ({"audio": "https://example.org/a.wav"}, "names the address .*, and quark downloads no audio"),
        ({"image": "a\0.png"}, "which is no path"),
        ({"image": 3}, "holds 3: give the path of a file, or its bytes"),
        ({"image": "a.png", "text": 3}, "the column 'text' of line 1 .* is a int: give a text"),
        ({"messages": asking(type="video", path="a.mp4")}, None),
        (
            {"messages": [*asking(type="image", path="a.png"), *asking(type="video")]},
            "a part of type 'video': quark reads",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_line(folder: Path, row: dict[str, Any], said: str | None) -> None:
    if said is None:  # a chat without images and sounds is left to the chat template
        assert not has_media(next(read_samples(rows(folder, row))))
        return
    with pytest.raises(CalibrationError, match=said):
        list(read_samples(rows(folder, row)))


def test_a_column_that_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(CalibrationError, match=r"has no column 'caption': it has image; name one with the option column=NAME"):
        list(read_samples(rows(folder, {"image": "a.png"}), {"column": "caption"}))


def test_a_model_of_texts_refuses_images(folder: Path) -> None:
    for sample in (MediaRow("A cat.", images=(folder / "a.png",)), asking(type="image", path="a.png")):
        with pytest.raises(CalibrationError, match="reads texts alone"):
            rendered(None, sample)


def test_a_source_of_a_plugin_may_yield_rows() -> None:
    assert sample_of({"image": b"bytes", "text": "A cat."}, "it") == MediaRow("A cat.", images=(b"bytes",))
    with pytest.raises(CalibrationError, match="or a row with the column 'image' or 'audio'"):
        sample_of({"picture": b"bytes"}, "it")
