"""Samples for calibration and evaluation.

A sample is a text, a chat, or a row with images or sounds. The tokenizer's chat template turns a chat into
text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quark.errors import CalibrationError
from quark_workbench.data.media_rows import MediaRow, chat_with_media, has_media, is_media_row, media_row

__all__ = ["COLUMNS", "Message", "Sample", "is_chat", "is_unicode", "rendered", "sample_of", "samples_of", "text_of", "value_of"]


Message = Mapping[str, Any]
"""One message of a chat, with the keys ``role`` and ``content``; other keys go to the chat template.
"""
Sample = str | Sequence[Message] | MediaRow
"""A text, the messages of a chat, or a row with images or sounds."""
COLUMNS = ("text", "messages")
"""Default columns of a table, or keys of an object, that hold a sample."""


def sample_of(value: Any, where: str) -> Sample:
    """Check that a value from a data source is a sample, and return the sample.

    Args:
        value: Any value that a data source has yielded.
        where: Name of the source or position in it, for messages.

    Raises:
        CalibrationError: The value is neither a text, nor a chat, nor a row with images or sounds.

    >>> sample_of([{"role": "user", "content": "Hello."}], "the source 'tickets'")
    [{'role': 'user', 'content': 'Hello.'}]
    """
    if isinstance(value, str | MediaRow):
        return value
    if is_chat(value):
        return list(value)
    if is_media_row(value):
        return media_row(value, None, where)
    raise CalibrationError(
        f"{where} is a {type(value).__name__}, which is not a sample: give a text, a chat as a list of messages with the keys 'role' "
        f"and 'content', or a row with the column 'image' or 'audio'"
    )


def is_chat(value: Any) -> bool:
    """Return whether a value is a chat, which is a list of at least one message."""
    messages = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
    return len(messages) > 0 and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages)


def is_unicode(sample: Sample) -> bool:
    """Return whether a sample can be encoded as UTF-8. Text with half of a surrogate pair cannot be encoded.

    >>> is_unicode("\\ud83d")
    False
    """
    try:
        texts = [sample.text] if isinstance(sample, MediaRow) else sample
        (sample if isinstance(sample, str) else json.dumps(list(texts), ensure_ascii=False, default=lambda _: "")).encode()
    except UnicodeEncodeError:
        return False
    return True


def value_of(row: Any, column: str | None, where: str) -> Any:
    """Return the value of a row that is the text or the chat.

    Args:
        row: A dictionary from name of column to value. If ``row`` is itself a text or a chat, and no column
            is named, ``row`` is returned.
        column: Name of the column; None for the first of `COLUMNS` that the row has.
        where: Position of the row, for messages.

    Raises:
        CalibrationError: The row has no such column.
    """
    if column is None and (isinstance(row, str) or is_chat(row)):
        return row
    names = list(row) if isinstance(row, Mapping) else []
    name = column if column is not None else next((name for name in COLUMNS if name in names), None)
    if name not in names:
        wanted = f"no column '{column}'" if column is not None else "neither a column 'text' nor 'messages'"
        raise CalibrationError(f"{where} has {wanted}: it has {', '.join(map(str, names)) or 'none'}; name one with the option column=NAME")
    return row[name]


def samples_of(rows: Iterable[tuple[str, Any]], column: str | None) -> Iterator[Sample]:
    """Yield the sample of each row. Empty texts are skipped.

    ``rows`` are pairs: the position of a row, for messages, and the row. The argument ``column`` is as in
    `value_of`, and the errors are as in `value_of` and `sample_of`.
    """
    for where, row in rows:
        if is_media_row(row):
            chat = row.get(column or "messages")
            yield chat_with_media(chat, row, where) if is_chat(chat) else media_row(row, column, where)
            continue
        sample = sample_of(value_of(row, column, where), where)
        if not isinstance(sample, str) or sample.strip():
            yield sample


def rendered(tokenizer: Any, sample: Sample) -> str:
    """Return the text of a sample.

    Raises:
        CalibrationError: The sample has images or sounds. Or the sample is a chat, and the tokenizer has no
            chat template or the template refuses the chat.
    """
    if isinstance(sample, MediaRow) or has_media(sample):
        raise CalibrationError(
            "the data hold images or sounds, but this step reads texts alone: give texts, or a model that takes images or sounds"
        )
    if isinstance(sample, str):
        return sample
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError(
            "the data hold chats, but this tokenizer has no chat template: use the tokenizer of a chat model, or plain text"
        )
    try:
        return tokenizer.apply_chat_template(list(sample), tokenize=False)
    except Exception as error:  # the template is code of the checkpoint, and may raise anything
        raise CalibrationError(f"the tokenizer's chat template refuses a chat of the data: {error}") from error


def text_of(tokenizer: Any, samples: Iterable[Sample]) -> str:
    """Return all samples as one text, with empty lines between samples. The errors are as in `rendered`."""
    return "\n\n".join(rendered(tokenizer, sample) for sample in samples)
