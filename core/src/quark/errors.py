"""The exceptions that quark raises on purpose. Each message says what has failed, why, and how to fix it."""

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
    """Base class of all errors that quark raises on purpose.

    The command line prints the message as one paragraph and exits with the code 2.
    """


class ConfigError(QuarkError, ValueError):
    """A configuration value is wrong or does not fit the model."""


class UnknownNameError(ConfigError):
    """A name that no installed plugin provides.

    Attributes:
        kind: The kind of object to which the name should refer, such as ``"scheme"``.
        name: The unknown name.
        known: The names that installed plugins provide.
    """

    def __init__(self, message: str, *, kind: str, name: str, known: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name
        self.known = tuple(known)

    def saying(self, message: str) -> UnknownNameError:
        """Return a copy of this error with the message ``message``. It can say, for instance, which setting
        has the unknown name."""
        return UnknownNameError(message, kind=self.kind, name=self.name, known=self.known)


class AmbiguousNameError(ConfigError):
    """Several distributions provide the same name. This error is raised only if this name is looked up."""


class PluginError(QuarkError):
    """A plugin is broken: its code cannot be loaded, raised an error, or returned something invalid.

    The message names the plugin, its distribution and its version. If the plugin raised an error, that error
    is the ``__cause__``. While quark collects plugins, it raises this error only in strict mode. In the other
    modes, it records the error and logs one warning.
    """


class RankError(QuarkError):
    """Another process of the run has failed or has ended. The message says which process and, if known, why.

    Attributes:
        is_told: Whether the first rank reports the error too. If so, the other ranks need not report it.
    """

    def __init__(self, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.is_told = is_told


class MissingPluginError(QuarkError, ImportError):
    """A module or a name belongs to a distribution that is not installed, is disabled, or cannot be imported.

    The message says why, and how to activate it.
    """


class CheckpointError(QuarkError):
    """A checkpoint on disk is incomplete or damaged, or has a link to a file outside its directory."""


class CalibrationError(QuarkError, ValueError):
    """Calibration data are missing or empty, or they have a type that no model accepts as input."""


class RoundingError(QuarkError):
    """A rounding algorithm cannot choose codes for some layers.

    The pipeline then rounds the weights of these layers to the nearest values, and logs the names of the
    layers.
    """


class NonFiniteError(QuarkError, ValueError):
    """A weight or an activation contains NaN or Inf.

    Attributes:
        tensor: The full name of the tensor.
    """

    def __init__(self, message: str, *, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


class UnsupportedError(QuarkError, NotImplementedError):
    """The request is valid, but quark cannot do it. The message says why."""


class OutputError(QuarkError, OSError):
    """The output directory cannot be used, because it is not empty or not writable, or because there is no
    space left."""


class ResumeError(OutputError):
    """An interrupted run left finished blocks in the output directory, or a run cannot continue from such
    blocks.

    The message says how to resume and how to restart.

    Attributes:
        differences: One line for each difference between this run and the interrupted run.
    """

    def __init__(self, message: str, *, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class EnvironmentConflictError(QuarkError, RuntimeError):
    """quark cannot work in this environment, which has a rival package, an unsupported version or a broken
    library."""
