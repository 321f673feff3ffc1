"""Conversion of errors that other libraries raise for files of a checkpoint to a CheckpointError that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.errors import CheckpointError, ConfigError, QuarkError

__all__ = ["reading"]

_LONGEST = 400


@contextmanager
def reading(path: Path, cure: str) -> Iterator[None]:
    """Raise errors of the body as a CheckpointError that names ``path``; the body passes the path to transformers, and does nothing else.

    Which exceptions transformers and its dependencies raise for bad files is undocumented and changes between
    releases, so all are caught.

    Args:
        path: A file or directory of a checkpoint.
        cure: The probable cause and the fix, for the message.

    Raises:
        CheckpointError: The body raised an exception other than MemoryError and QuarkError, or a ConfigError
            that does not name the path.
    """
    try:
        yield
    except MemoryError:
        raise
    except ConfigError as error:  # from our code, which transformers calls for a quantized checkpoint
        if str(path) in str(error):
            raise
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error
    except QuarkError:
        raise
    except Exception as error:
        raise CheckpointError(f"'{path}' cannot be read ({_in_one_line(error)}): {cure}") from error
    except BaseException as error:
        # A panic of a library written in Rust is no Exception, and its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"'{path}' cannot be read ({_in_one_line(error)}): {cure}") from error


def _in_one_line(error: BaseException) -> str:
    message = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {message if len(message) <= _LONGEST else message[:_LONGEST] + '…'}"
