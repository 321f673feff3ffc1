"""Samples of a source of data: one text or one chat each, and the text of a chat by the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quark.errors import CalibrationError

__all__ = ["COLUMNS", "Message", "Sample", "is_chat", "is_unicode", "rendered", "sample_of", "samples_of", "text_of", "value_of"]


Message = Mapping[str, Any]
"""One message of a chat, with the keys ``role`` and ``content``; others are for the tokenizer's chat
template.
"""
Sample = str | Sequence[Message]
"""A text, or the messages of a chat."""
COLUMNS = ("text", "messages")
"""Columns of a table, or keys of an object, that hold a sample where none is named."""


def sample_of(value: Any, where: str) -> Sample:
    """Return a value that a source has yielded as a sample.

    Args:
        value: Anything.
        where: What yielded it, for messages.

    Raises:
        CalibrationError: It is neither a text nor a chat.

    >>> sample_of([{"role": "user", "content": "Hello."}], "the source 'tickets'")
    [{'role': 'user', 'content': 'Hello.'}]
    """
    if isinstance(value, str):
        return value
    if is_chat(value):
        return list(value)
    raise CalibrationError(
        f"{where} gives a {type(value).__name__} where a sample is wanted: a text, or a chat as a list of messages with the keys 'role' "
        "and 'content'"
    )


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of messages, at least one."""
    messages = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
    return len(messages) > 0 and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages)


def is_unicode(sample: Sample) -> bool:
    """Return whether a sample can be encoded: it holds no half of a surrogate pair.

    >>> is_unicode("\\ud83d")
    False
    """
    try:
        (sample if isinstance(sample, str) else json.dumps(list(sample), ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError:
        return False
    return True


def value_of(row: Any, column: str | None, where: str) -> Any:
    """Return the value of a row that holds its sample.

    It is that of the named column, or else of the first of `COLUMNS` that the row has.

    Args:
        row: A row of a table by column; or a text or a chat, which is its own value.
        column: Name of a column; None for one of `COLUMNS`.
        where: Where the row is, for messages.

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
    """Yield the sample of each row that is not an empty text; a row comes with its place, for messages.

    Arguments and errors as of `value_of` and `sample_of`.
    """
    for where, row in rows:
        sample = sample_of(value_of(row, column, where), where)
        if not isinstance(sample, str) or sample.strip():
            yield sample


def rendered(tokenizer: Any, sample: Sample) -> str:
    """Return the text of a sample.

    Raises:
        CalibrationError: The sample is a chat, and the tokenizer has no chat template, or one that refuses
            it.
    """
    if isinstance(sample, str):
        return sample
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError("the data hold chats, and this tokenizer has no chat template: use one of a chat model, or plain text")
    try:
        return tokenizer.apply_chat_template(list(sample), tokenize=False)
    except Exception as error:  # the template is code of the checkpoint, and may raise anything
        raise CalibrationError(f"the tokenizer's chat template refuses a chat of the data: {error}") from error


def text_of(tokenizer: Any, samples: Iterable[Sample]) -> str:
    """Return one text of all samples, with an empty line between two; errors as for `rendered`."""
    return "\n\n".join(rendered(tokenizer, sample) for sample in samples)
