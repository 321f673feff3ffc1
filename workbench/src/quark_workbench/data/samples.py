"""Samples: one text or one chat each; chats become text with the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quark.errors import CalibrationError

__all__ = ["COLUMNS", "Message", "Sample", "is_chat", "is_unicode", "rendered", "sample_of", "samples_of", "text_of", "value_of"]


Message = Mapping[str, Any]
"""One message of a chat, with the keys ``role`` and ``content``; other keys go to the chat template.
"""
Sample = str | Sequence[Message]
"""A text, or the messages of a chat."""
COLUMNS = ("text", "messages")
"""Default columns of a table, or keys of an object, that hold a sample."""


def sample_of(value: Any, where: str) -> Sample:
    """Return a source's value as a sample.

    Args:
        value: Anything.
        where: The source, for messages.

    Raises:
        CalibrationError: The value is neither a text nor a chat.

    >>> sample_of([{"role": "user", "content": "Hello."}], "the source 'tickets'")
    [{'role': 'user', 'content': 'Hello.'}]
    """
    if isinstance(value, str):
        return value
    if is_chat(value):
        return list(value)
    raise CalibrationError(
        f"{where} is a {type(value).__name__}, which is not a sample: give a text, or a chat as a list of messages with the keys 'role' "
        f"and 'content'"
    )


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of at least one message."""
    messages = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
    return len(messages) > 0 and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages)


def is_unicode(sample: Sample) -> bool:
    """Return whether a sample can be encoded, that is, holds no half of a surrogate pair.

    >>> is_unicode("\\ud83d")
    False
    """
    try:
        (sample if isinstance(sample, str) else json.dumps(list(sample), ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError:
        return False
    return True


def value_of(row: Any, column: str | None, where: str) -> Any:
    """Return the value in a row that holds the sample.

    The value is in the named column, or else in the first of `COLUMNS` that the row has.

    Args:
        row: A row of a table by column; a text or a chat is its own value.
        column: Name of a column; None for one of `COLUMNS`.
        where: Position of the row, for messages.

    Raises:
        CalibrationError: There is no such column.
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
    """Yield the sample of each row, without empty texts; each row comes with its position, for messages.

    Arguments and errors as in `value_of` and `sample_of`.
    """
    for where, row in rows:
        sample = sample_of(value_of(row, column, where), where)
        if not isinstance(sample, str) or sample.strip():
            yield sample


def rendered(tokenizer: Any, sample: Sample) -> str:
    """Return the text of a sample.

    Raises:
        CalibrationError: The sample is a chat, but the tokenizer has no chat template, or its template
            refuses the chat.
    """
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
    """Return all samples as one text, separated by empty lines; raises as `rendered`."""
    return "\n\n".join(rendered(tokenizer, sample) for sample in samples)
