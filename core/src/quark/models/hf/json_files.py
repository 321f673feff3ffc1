"""Functions that read the JSON files of a checkpoint. They limit the size of files, and convert the errors of
other libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from quark.base.files import leads_out, regular_bytes
from quark.base.shortages import refuse_failed_import, shortage
from quark.errors import CheckpointError, ConfigError, PluginError, QuarkError

LARGEST_FILE = 100_000_000
"""Maximum size of a file in bytes. It is the limit of safetensors for a header. The index of a model with a
trillion parameters is ten times smaller."""
MOST_VALUES = 4_000_000
"""Maximum number of values in a file. It limits the cost of parsing. The largest tokenizers have half as many
values."""


def config_file(checkpoint: Path) -> Path:
    """Return the path of the config.json of a checkpoint.

    Raises:
        CheckpointError: The directory does not exist, or it has no config.json. Or config.json or
            generation_config.json is a link to a file outside the directory.
    """
    if not (checkpoint / "config.json").is_file():
        reason = "it has no config.json" if checkpoint.is_dir() else "there is no such directory"
        raise CheckpointError(f"'{checkpoint}' is not a checkpoint in Hugging Face form: {reason}")
    for name in ("config.json", "generation_config.json"):
        refuse_link_out(checkpoint / name, checkpoint)
    return checkpoint / "config.json"


_FOLLOWED = ContextVar("links are followed", default=False)


@contextmanager
def links_followed() -> Iterator[None]:
    """Inside this ``with`` block, allow links to files outside a checkpoint.

    Use this context only for a directory whose links this program has made.
    """
    token = _FOLLOWED.set(True)
    try:
        yield
    finally:
        _FOLLOWED.reset(token)


def refuse_link_out(path: Path, checkpoint: Path) -> None:
    """Raise an error if a file is a link to a place outside the checkpoint.

    This prevents an export from containing a file from elsewhere on the machine.

    Raises:
        CheckpointError: ``path`` links to a place outside the checkpoint.
    """
    if not _FOLLOWED.get() and leads_out(path, checkpoint):
        raise CheckpointError(
            f"'{path}' is a link to '{os.path.realpath(path)}', outside the checkpoint, and is not read. Replace the link by "
            "the file, or remove the link"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object, and return the object.

    Raises:
        CheckpointError: The file is missing or too large, is not valid JSON, is nested too deeply for
            Python's parser, or contains another value than an object.
    """
    data = bounded_bytes(path)
    try:
        content = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise CheckpointError(f"'{path}' is nested too deeply for a file of a checkpoint: it is damaged, fetch it again") from None
    except ValueError as error:
        # From UTF-8 decoding, JSON parsing, or integers of thousands of digits.
        raise CheckpointError(f"'{path}' is no JSON file ({error}): it is damaged, fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"'{path}' holds {_kind(content)} instead of a JSON object: it is damaged, fetch it again")
    return content


def bounded_bytes(path: Path) -> bytes:
    """Return the bytes of a file that will be parsed as JSON.

    Raises:
        CheckpointError: The file cannot be read, or it has more bytes or values than any real file of a
            checkpoint.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise CheckpointError(f"'{path}' has {size:,} bytes, but at most {LARGEST_FILE:,} are read. It is not a file of a checkpoint")
        data = regular_bytes(path)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read ({error.strerror or error})") from error
    refuse_many_values(data, path)
    return data


def refuse_many_values(data: bytes, path: Path) -> None:
    """Raise CheckpointError if ``data`` contains more JSON values than any real file of a checkpoint.

    Parsing so many values would take too much time and memory. The message names ``path``.
    """
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > MOST_VALUES:
        raise CheckpointError(f"'{path}' may have {values:,} values, and the limit is {MOST_VALUES:,}. It is not a file of a checkpoint")


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}.get(type(value), "a number")


_LONGEST = 400


@contextmanager
def reading(path: Path, cure: str) -> Iterator[None]:
    """Convert an error of the ``with`` block to a CheckpointError that names ``path``.

    The ``with`` block must do nothing but pass ``path`` to transformers. For a bad file, transformers and the
    libraries that it uses raise undocumented exceptions, which change from release to release. So this
    context catches all exceptions.

    Args:
        path: A file or directory of a checkpoint.
        cure: The probable cause and the fix, for the message.

    Raises:
        CheckpointError: The ``with`` block raised a ConfigError that does not name ``path``, or an exception
            that is neither a QuarkError nor an error for which `quark.base.shortages` has advice.
        EnvironmentConflictError: A library cannot be imported.
    """
    try:
        yield
    except ConfigError as error:  # from our code, which transformers calls for a quantized checkpoint
        if str(path) in str(error):
            raise
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error
    except (MemoryError, QuarkError):
        raise
    except BaseException as error:
        # A panic of a Rust library is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if shortage(error) is not None:
            raise
        refuse_failed_import(error, f"'{path}' cannot be read")
        raise CheckpointError(f"'{path}' cannot be read ({_in_one_line(error)}): {cure}") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to the message of an error of the ``with`` block, unless the message already names it.

    ``path`` is the file whose values the ``with`` block reads.
    """
    try:
        yield
    except PluginError:
        raise
    except QuarkError as error:
        if str(path.parent) not in str(error):
            error.args = (f"the quantization_config in '{path}' cannot be used: {error}",)
        raise


def _in_one_line(error: BaseException) -> str:
    message = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {message if len(message) <= _LONGEST else message[:_LONGEST] + '…'}"
