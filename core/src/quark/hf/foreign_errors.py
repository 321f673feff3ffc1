"""What other libraries raise over the files of a checkpoint becomes a CheckpointError that names them, where those libraries are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.errors import CheckpointError, ConfigError, QuarkError

__all__ = ["reading"]

_LONGEST = 400


@contextmanager
def reading(path: Path, cure: str) -> Iterator[None]:
    """Name ``path`` in whatever the body raises: it hands the file or directory to transformers, and does nothing else.

    Which exceptions those libraries raise over bad files is not documented and changes from release to release, so all are taken.

    Args:
        path: Of a checkpoint.
        cure: What may be wrong, and what to do.

    Raises:
        CheckpointError: The body raised, but for errors of ours that name the path themselves.
    """
    try:
        yield
    except MemoryError:
        raise
    except ConfigError as error:  # from the part of transformers that calls back for a quantized checkpoint
        if str(path) in str(error):
            raise
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error
    except QuarkError:
        raise
    except Exception as error:
        raise CheckpointError(f"'{path}' cannot be read ({_in_one_line(error)}): {cure}") from error
    except BaseException as error:
        # A panic of a library that is written in Rust: it is no Exception, and has no class that could be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"'{path}' cannot be read ({_in_one_line(error)}): {cure}") from error


def _in_one_line(error: BaseException) -> str:
    said = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {said if len(said) <= _LONGEST else said[:_LONGEST] + '…'}"
