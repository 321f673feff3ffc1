"""Functions that give advice on an error with a cause outside quark. Such causes are: too little memory or
disk space, too many threads or open files, a missing permission, and a library that cannot be imported."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from quark.errors import EnvironmentConflictError, QuarkError

_GO_ON = "a run from disk continues after its finished blocks with --resume (resume=True)"
_MEMORY = (
    "There is too little memory: give a smaller --activation-memory (activation_memory), fewer or shorter samples, or close other "
    "programs. "
    f"A checkpoint that is quantized from disk has one block in memory at a time, and {_GO_ON}"
)
_THREADS = f"No more threads can be started: raise the limit (ulimit -u, or the container's limit), or set OMP_NUM_THREADS=1; {_GO_ON}"
_FILES = f"Too many files are open: raise the limit (ulimit -n 4096), or close other programs; {_GO_ON}"
_SPACE = f"There is no space left: free some, or choose another place; {_GO_ON}"
_PERMISSION = "You may not use that file or directory: change its permissions, or choose a place that you may read and write"
_OF_NUMBER = {
    errno.ENOMEM: _MEMORY,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: _PERMISSION,
}
_OF_MESSAGE = {
    re.compile(r"can't start new thread|pthread_create"): _THREADS,
    re.compile(
        r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc|failed to map segment", re.IGNORECASE
    ): _MEMORY,
    re.compile(r"too many open files", re.IGNORECASE): _FILES,
}
"""A dictionary from message to advice. It is for errors that can only be recognized by their message, because
torch, Python or another library has no exception type for them."""


def shortage(error: BaseException) -> str | None:
    """Return advice if ``error`` occurred because the machine lacks a resource. Return None for any other
    error.

    >>> shortage(RuntimeError("can't start new thread")).partition(":")[0]
    'No more threads can be started'
    >>> shortage(ValueError("of another kind"))
    """
    for cause in _causes(error):
        if isinstance(cause, MemoryError):
            return _MEMORY
        if isinstance(cause, OSError) and cause.errno in _OF_NUMBER:
            return _OF_NUMBER[cause.errno]
        if not isinstance(cause, QuarkError):
            for said, advice in _OF_MESSAGE.items():
                if said.search(str(cause)):
                    return advice
    return None


def advise(error: BaseException) -> None:
    """If `shortage` returns advice for ``error``, add the advice to the error as a note. Do this only once
    for each error."""
    advice = shortage(error)
    if advice is not None and advice not in getattr(error, "__notes__", ()):
        error.add_note(advice)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its cause, then the cause of that error, and so on."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


_CODE_OF_CHECKPOINTS = "transformers_modules"
"""The package in which transformers puts code that comes with a checkpoint. Such code is not a library."""


@contextmanager
def needs_libraries(what: str) -> Iterator[None]:
    """Run the ``with`` block, and call `refuse_failed_import` if the block raises an error."""
    try:
        yield
    except Exception as error:
        refuse_failed_import(error, what)
        raise


def refuse_failed_import(error: BaseException, what: str) -> None:
    """Raise EnvironmentConflictError if ``error`` occurred because a library cannot be imported.

    Do nothing if the error has another cause, or if `shortage` has advice for it. An import may fail with any
    type of error, because it runs the code of a module. For instance, the import of a library that does not
    fit the installed torch may raise a RuntimeError.

    Args:
        error: An error that was raised by code that may import something.
        what: A clause for the message that says what failed, such as ``"'config.json' cannot be read"``.

    Raises:
        EnvironmentConflictError: A library cannot be imported. The message names the library and the first
            cause.
    """
    if shortage(error) is not None:
        return
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    root = causes[-1]
    importing = [module for cause in causes for module in _modules_run_in(cause)]
    if not any(isinstance(cause, ImportError) for cause in causes) and not importing:
        return
    named = root.name if isinstance(root, ImportError) else None
    library = (named or (importing[-1] if importing else "")).partition(".")[0]
    said = " ".join(str(root).split()) or "no reason given"
    raise EnvironmentConflictError(
        f"{what}, because {library or 'a library'} cannot be imported ({type(root).__name__}: {said}). This environment is at fault: "
        f"install {f'a version of {library}' if library else 'what the message asks for, in a version'} that fits the other packages, "
        "or remove it if it is not needed"
    ) from error


def _modules_run_in(error: BaseException) -> Iterator[str]:
    """Yield the names of the modules that were being imported when ``error`` was raised.

    The outermost module is first.
    """
    trace = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if trace.tb_frame.f_code.co_name == "<module>" and name.partition(".")[0] != _CODE_OF_CHECKPOINTS:
            yield name
        trace = trace.tb_next
