"""Functions that read a checkpoint's JSON files with size limits and convert errors of other libraries."""

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
"""Maximum size of a file in bytes: safetensors' limit for a header. The index of a model of a trillion
parameters has a tenth of this size.
"""
MOST_VALUES = 4_000_000
"""Maximum number of values, which determines the cost of parsing. The tokenizers with the most merges have
half as many.
"""


def config_file(checkpoint: Path) -> Path:
    """Return the path of the config.json of a checkpoint.

    Raises:
        CheckpointError: There is no such directory, it has no config.json, or config.json or
            generation_config.json is a link out of it.
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
    """Inside this ``with`` block, allow links to files anywhere, because the program made the links."""
    token = _FOLLOWED.set(True)
    try:
        yield
    finally:
        _FOLLOWED.reset(token)


def refuse_link_out(path: Path, checkpoint: Path) -> None:
    """Refuse a file that links to a place outside the checkpoint, so that no result contains its content.

    Raises:
        CheckpointError: ``path`` links to a place outside the checkpoint.
    """
    if not _FOLLOWED.get() and leads_out(path, checkpoint):
        raise CheckpointError(
            f"'{path}' is a link to '{os.path.realpath(path)}', outside the checkpoint, and is not read: put the file itself there, or "
            "remove the link"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: The file is missing, too large, no JSON, nested deeper than Python's parser goes, or
            holds no object.
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
        CheckpointError: The file cannot be read, or parsing it would need more time and memory than for any
            real file.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise CheckpointError(f"'{path}' has {size:,} bytes, and at most {LARGEST_FILE:,} are read: it is not a checkpoint's file")
        data = regular_bytes(path)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read ({error.strerror or error})") from error
    refuse_many_values(data, path)
    return data


def refuse_many_values(data: bytes, path: Path) -> None:
    """Raise CheckpointError if parsing would need more time and memory than any real file needs.

    ``path`` is for the message.
    """
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > MOST_VALUES:
        raise CheckpointError(
            f"'{path}' holds up to {values:,} values, and at most {MOST_VALUES:,} are read: it is not a checkpoint's file"
        )


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}.get(type(value), "a number")


_LONGEST = 400


@contextmanager
def reading(path: Path, cure: str) -> Iterator[None]:
    """Convert an error of the ``with`` block to a CheckpointError that names ``path``.

    The body must only pass the path to transformers. The exceptions of transformers and its dependencies for
    bad files are undocumented and change between releases, so all are caught.

    Args:
        path: A file or directory of a checkpoint.
        cure: The probable cause and the fix, for the message.

    Raises:
        CheckpointError: The body raised an exception other than QuarkError and the errors of a shortage
            (`quark.base.shortages`), or a ConfigError that does not name the path.
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
    """Make the body's errors name ``path``, the file whose values it reads, unless they already name it."""
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
