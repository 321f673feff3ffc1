"""Where an export goes: built beside its place, moved there when complete; a failed one leaves nothing."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.errors import OutputError
from quark.export.destination import move_into_place, refuse_used_directory

_CURES = {
    errno.ENOSPC: "there is no space left on the device; free some, or choose another place",
    errno.EDQUOT: "your quota is used up; free some space, or choose another place",
    errno.EACCES: "you may not write there; choose another place",
    errno.EROFS: "the file system is read-only; choose another place",
}


@contextmanager
def building(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory beside ``out``, renamed to it when the body ends well and removed when it does not.

    Args:
        out: Where to; see `quark.export.destination.refuse_used_directory`.
        overwrite: Whether an earlier export there is replaced.

    Raises:
        OutputError: ``out`` is in use, or writing fails for want of space or rights.
    """
    refuse_used_directory(out, overwrite=overwrite)
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        yield temporary
        temporary.chmod(0o755)
        move_into_place(temporary, out, overwrite=overwrite)
    except OSError as error:
        if isinstance(error, OutputError) or error.errno is None:
            raise
        cure = _CURES.get(error.errno, "choose another place")
        raise OutputError(f"'{out}' could not be written ({error.strerror}): {cure}. Nothing was left behind") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
