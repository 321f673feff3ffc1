"""Errors of libraries that cannot be imported, which other libraries pass on as errors of another kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quark.base.shortages import shortage
from quark.errors import EnvironmentConflictError

__all__ = ["needs_libraries", "refuse_failed_import"]

_CODE_OF_CHECKPOINTS = "transformers_modules"
"""The package into which transformers puts code that comes with a checkpoint, which is part of that."""


@contextmanager
def needs_libraries(what: str) -> Iterator[None]:
    """Let the body import libraries; raise as `refuse_failed_import` if one of them cannot be imported."""
    try:
        yield
    except Exception as error:
        refuse_failed_import(error, what)
        raise


def refuse_failed_import(error: BaseException, what: str) -> None:
    """Raise if a library that cannot be imported has caused an error, other than for too little memory.

    An import fails with any type of error, since a module runs code: a library that does not fit the
    installed torch raises a RuntimeError.

    Args:
        error: From code that may import something.
        what: What could not be done, for the message: ``"'config.json' cannot be read"``.

    Raises:
        EnvironmentConflictError: The message names the library and the first cause.
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
    """Yield the names of the modules whose import an error was raised in, from the outermost one on."""
    trace = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if trace.tb_frame.f_code.co_name == "<module>" and name.partition(".")[0] != _CODE_OF_CHECKPOINTS:
            yield name
        trace = trace.tb_next
