"""The exceptions that quark raises on purpose. Each message names the thing, the cause and the fix."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AmbiguousNameError",
    "CalibrationError",
    "CheckpointError",
    "ConfigError",
    "EnvironmentConflictError",
    "MissingPluginError",
    "NonFiniteError",
    "OutputError",
    "PluginError",
    "QuarkError",
    "RankError",
    "ResumeError",
    "RoundingError",
    "UnknownNameError",
    "UnsupportedError",
]


class QuarkError(Exception):
    """Base of all errors raised on purpose; the command line prints it as one paragraph and exits with 2."""


class ConfigError(QuarkError, ValueError):
    """A configuration value is wrong or does not fit the model."""


class UnknownNameError(ConfigError):
    """A name that no installed plugin provides.

    Attributes:
        kind: Kind of thing that was asked for, such as ``"scheme"``.
        name: The unknown name.
        known: The known names.
    """

    def __init__(self, message: str, *, kind: str, name: str, known: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name
        self.known = tuple(known)

    def saying(self, message: str) -> UnknownNameError:
        """Return this error with another message, such as one that says who asks for the name."""
        return UnknownNameError(message, kind=self.kind, name=self.name, known=self.known)


class AmbiguousNameError(ConfigError):
    """A name that several distributions claim; it fails only when it is asked for."""


class PluginError(QuarkError):
    """A plugin is broken: its code cannot be loaded, raised an error, or returned something invalid.

    The message names the plugin, its distribution and version; an error that the plugin raised is the cause.
    An error while plugins are collected is raised in strict mode only, and otherwise recorded and warned
    about once.
    """


class RankError(QuarkError):
    """Another process of the run has failed or is gone; the message says which, and why if that is known.

    Attributes:
        is_told: Whether the first rank reports the error too, so that other ranks need not.
    """

    def __init__(self, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.is_told = is_told


class MissingPluginError(QuarkError, ImportError):
    """A module or a name belongs to a distribution that is not active; the message has reason and fix."""


class CheckpointError(QuarkError):
    """A checkpoint on disk is incomplete, damaged, or points outside its directory."""


class CalibrationError(QuarkError, ValueError):
    """Calibration data are missing, empty, or of a kind that no model can be called with."""


class RoundingError(QuarkError):
    """A rounding cannot choose codes for some layers; the pipeline rounds these to nearest, and says so."""


class NonFiniteError(QuarkError, ValueError):
    """A weight or an activation holds NaN or Inf.

    Attributes:
        tensor: Full name of the tensor.
    """

    def __init__(self, message: str, *, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


class UnsupportedError(QuarkError, NotImplementedError):
    """The request is understood but cannot be done; the message says why."""


class OutputError(QuarkError, OSError):
    """The output directory cannot be used: not empty, not writable, or no space left."""


class ResumeError(OutputError):
    """An interrupted run left finished blocks, or the run cannot continue from them.

    The message says how to resume and how to restart.

    Attributes:
        differences: Differences from the interrupted run, one line each.
    """

    def __init__(self, message: str, *, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class EnvironmentConflictError(QuarkError, RuntimeError):
    """The environment does not fit: a rival package, an unsupported version, or a broken library."""
