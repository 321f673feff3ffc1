"""Samples with images or sounds: rows with a column of images or sounds, and chats with images or sounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from quark.errors import CalibrationError

__all__ = ["MediaRow", "chat_with_media", "has_media", "is_media_row", "media_of", "media_row", "with_files_below"]

_COLUMNS = {"image": "image", "images": "image", "audio": "audio", "audios": "audio"}
"""Dictionary from the name of a column with images or sounds to their kind."""
KINDS = ("image", "audio")
"""The kinds of media in a message. A kind is a value of the key ``type``, and the key of a medium."""
_LANGUAGE = "language"


@attrs.frozen
class MediaRow:
    """A row with images or sounds.

    A medium is the path of a file, the bytes of a file, a dictionary with ``array`` and ``sampling_rate``, or
    an image of Pillow.

    Attributes:
        text: The caption, the question, or the words that are spoken. It is empty if the row has no text.
        images: The images.
        sounds: The sounds.
        language: Code of the spoken language, such as ``de``; None if the row names no language.
    """

    text: str = ""
    images: tuple[Any, ...] = ()
    sounds: tuple[Any, ...] = ()
    language: str | None = None


def is_media_row(value: Any) -> bool:
    """Return whether a row of a table has a column of images or sounds."""
    return isinstance(value, Mapping) and any(value.get(name) is not None for name in _COLUMNS)


def media_row(row: Mapping[str, Any], column: str | None, where: str) -> MediaRow:
    """Return a row of a table as a `MediaRow`.

    Args:
        row: The row. Images are in the column ``image`` or ``images``, and sounds in the column ``audio`` or
            ``audios``.
        column: Name of the column with the text; None for ``text``.
        where: Position of the row, for messages.

    Raises:
        CalibrationError: There is no column ``column``, or a column has values of a wrong type.
    """
    if column is not None and column not in row:
        raise CalibrationError(f"{where} has no column '{column}': it has {', '.join(map(str, row))}; name one with the option column=NAME")
    text, language = row.get(column or "text"), row.get(_LANGUAGE)
    for name, value in ((column or "text", text), (_LANGUAGE, language)):
        if value is not None and not isinstance(value, str):
            raise CalibrationError(f"the column '{name}' of {where} is a {type(value).__name__}: give a text")
    images, sounds = (tuple(_of_columns(row, kind, where)) for kind in KINDS)
    return MediaRow(text or "", images, sounds, language)


def chat_with_media(chat: Sequence[Mapping[str, Any]], row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return a chat with the images and sounds of its row filled in.

    A part of a message with the type ``image`` or ``audio`` may name no file. Such parts get the images and
    sounds of the row's columns, in order.

    Raises:
        CalibrationError: The number of such parts differs from the number of images or sounds in the row.
    """
    waiting = {kind: list(_of_columns(row, kind, where)) for kind in KINDS}

    def filled(kind: str, medium: Any) -> Any:
        if medium is None and not waiting[kind]:
            raise CalibrationError(f"the messages of {where} name more media of type '{kind}' than its columns have: add the missing ones")
        return waiting[kind].pop(0) if medium is None else medium

    messages = _with_media(chat, filled, where)
    if any(waiting.values()):
        raise CalibrationError(
            f"the columns of {where} have more images or sounds than its messages name: add parts such as {{'type': 'image'}}"
        )
    return messages


def has_media(sample: Any) -> bool:
    """Return whether a sample has an image or a sound."""
    return isinstance(sample, MediaRow) or any(part["type"] in KINDS for part in _parts(sample))


def media_of(sample: Any, kind: str) -> list[Any]:
    """Return the images of a sample (``kind="image"``) or its sounds (``kind="audio"``), in order.

    If a part of a chat names no image or sound, its entry in the list is None.
    """
    if isinstance(sample, MediaRow):
        return list(sample.images if kind == "image" else sample.sounds)
    return [_medium(part) for part in _parts(sample) if part["type"] == kind]


def with_files_below(sample: Any, folder: Path, where: str) -> Any:
    """Return a sample whose paths of images and sounds are replaced by paths of files below a directory.

    Args:
        sample: A sample with relative or absolute paths.
        folder: The directory. A path that leads out of the directory is refused, also if it does so through a
            link. Otherwise, a data file from another person could make quark read any file.
        where: Position of the sample, for messages.

    Raises:
        CalibrationError: A path leads out of the directory, or there is no such file.
    """
    if not has_media(sample):
        return sample
    base = folder.resolve()

    def found(kind: str, medium: Any) -> Any:
        name = medium.get("path") if isinstance(medium, Mapping) and medium.get("bytes") is None else medium
        if not isinstance(name, str | Path):
            return medium
        return _file(str(name), base, kind, where)

    if isinstance(sample, MediaRow):
        images, sounds = (tuple(found(kind, one) for one in media_of(sample, kind)) for kind in KINDS)
        return attrs.evolve(sample, images=images, sounds=sounds)
    return _with_media(sample, found, where)


def _file(name: str, base: Path, kind: str, where: str) -> Path:
    """Return the path of the file ``name``, which must be below the directory ``base``."""
    if "://" in name and not name.startswith("file://"):
        raise CalibrationError(f"{where} names the address '{name[:80]}', and quark downloads no {kind}: give the path of a file")
    try:
        path = (base / name.removeprefix("file://")).resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # an invalid name, or a loop of links
        raise CalibrationError(f"{where} names the {kind} '{name[:80]}', which is no path: {error}") from error
    if not path.is_relative_to(base):
        raise CalibrationError(
            f"{where} names the {kind} '{name}', which is outside '{base}': move the file there, or name a directory that holds it with "
            f"the option media=DIR"
        )
    if not is_file:
        raise CalibrationError(
            f"{where} names the {kind} '{name}', but there is no file '{path}': a path is relative to '{base}', or to media=DIR"
        )
    return path


def _of_columns(row: Mapping[str, Any], kind: str, where: str) -> Iterator[Any]:
    """Yield the images or the sounds of a row. ``kind`` says which of the two."""
    for name, own in _COLUMNS.items():
        value = row.get(name)
        if own != kind or value is None:
            continue
        for medium in value if isinstance(value, list | tuple) else [value]:
            if medium is None or isinstance(medium, bool | int | float):
                raise CalibrationError(f"the column '{name}' of {where} holds {medium!r}: give the path of a file, or its bytes")
            yield medium


def _parts(sample: Any) -> Iterator[Mapping[str, Any]]:
    """Yield those parts of a chat's messages that have a type."""
    for message in () if isinstance(sample, str | MediaRow) else sample:
        content = message["content"]
        if isinstance(content, list | tuple):
            yield from (part for part in content if isinstance(part, Mapping) and isinstance(part.get("type"), str))


def _medium(part: Mapping[str, Any]) -> Any:
    """Return the image or sound that a part of a message names, or None if the part names nothing."""
    return next((part[key] for key in ("path", part["type"], "url") if part.get(key) is not None), None)


def _with_media(chat: Sequence[Mapping[str, Any]], medium_of: Callable[[str, Any], Any], where: str) -> list[dict[str, Any]]:
    """Return a copy of a chat in which ``medium_of`` supplies each image and sound.

    ``medium_of`` gets the kind of a part, and the image or sound that the part names or None. If the content
    of a message is a text, the content becomes a list with one part.
    """
    messages = []
    for message in chat:
        content = message["content"]
        parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
        for number, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in KINDS:
                parts[number] = {"type": kind, "path": medium_of(kind, _medium(part))}
            elif kind != "text":
                raise CalibrationError(f"a message of {where} has a part of type {kind!r}: quark reads parts of type text, image and audio")
        messages.append({**message, "content": parts})
    return messages
