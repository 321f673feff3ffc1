"""Events that listeners hear of a run: frozen records, one class for each kind of event.

Making one imports nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import attrs

EVENTS_VERSION = 1
"""Raised when an event or one of its fields goes or changes its meaning; new events and new fields do not
raise it.
"""


def _read_only(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(values))


@attrs.frozen(kw_only=True)
class Event:
    """Something that happened in a run. Listeners ignore events of a name that they do not know.

    Attributes:
        name: Which kind of event it is, such as ``"block_finished"``.
        task: Task of the run: ``"quantize"``, ``"select"``, ``"evaluate"``, ``"report"`` or ``"export"``.
        elapsed: Seconds since the run began.
    """

    name: ClassVar[str] = ""
    task: str = ""
    elapsed: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values: ``event``, its name, ``version``, and its fields.

        Numbers have six digits behind the point at most; None stands for those that JSON does not have.
        """
        fields = {field.name: _plain(getattr(self, field.name)) for field in attrs.fields(type(self))}
        return {"event": self.name, "version": EVENTS_VERSION, **fields}


@attrs.frozen(kw_only=True)
class RunStarted(Event):
    """A run has begun; nothing is planned or read yet. Each run ends with one `RunFinished` or `RunFailed`.

    Attributes:
        source: Path of the checkpoint, or the class of a model in memory.
        out: Directory that is to be written; None where none is.
        scheme: Name of the scheme of most layers; None where there is none.
        algorithms: Names of the algorithms, in the order of the configuration.
    """

    name: ClassVar[str] = "run_started"
    source: str = ""
    out: str | None = None
    scheme: str | None = None
    algorithms: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class RunPlanned(Event):
    """The plan of the run is made; no weight has been read or changed.

    Attributes:
        blocks: Decoder blocks of the model.
        layers: Layers that are to be quantized.
        samples: Calibration forwards, of all processes; 0 where none are needed.
        tokens: Calibration tokens.
        two_passes: Whether each block is passed twice, for want of memory.
        processes: That share the run.
    """

    name: ClassVar[str] = "run_planned"
    blocks: int = 0
    layers: int = 0
    samples: int = 0
    tokens: int = 0
    two_passes: bool = False
    processes: int = 1


@attrs.frozen(kw_only=True)
class PhaseStarted(Event):
    """The run has begun another kind of work, which goes on until the next event of this name.

    Attributes:
        phase: In a block ``"load"``, ``"transforms"``, ``"forward"``, ``"statistics"``, ``"solve"``,
            ``"write"`` or ``"report"`` (measuring for the report). Outside also ``"plan"``, ``"data"``
            (calibration data are read), ``"validate"`` (transforms of the whole model), ``"select"``,
            ``"evaluate"`` and ``"compare"`` (hidden states).
        block: Full name of the block; None outside the blocks.
    """

    name: ClassVar[str] = "phase_started"
    phase: str = ""
    block: str | None = None


@attrs.frozen(kw_only=True)
class BlockStarted(Event):
    """A block is worked on. A model that is not known by blocks is one block, ``"model"``.

    Attributes:
        block: Full name of the block.
        number: 1 for the first.
        total: How many there are.
    """

    name: ClassVar[str] = "block_started"
    block: str = ""
    number: int = 0
    total: int = 0


@attrs.frozen(kw_only=True)
class BlockFinished(Event):
    """A block is finished. Blocks come in order, each after its `BlockStarted`.

    Attributes:
        block: As of `BlockStarted`.
        number: Likewise.
        total: Likewise.
        outcome: ``"done"``; ``"resumed"`` for one that an interrupted run had finished; ``"other process"``
            for one that another process works on.
        seconds: How long it took.
        seconds_left: How long the other blocks will take at the rate so far; None as long as that is not
            known.
        phases: Seconds by phase, as of `PhaseStarted`, as the report of the run has them: since the figures
            of the block before were taken, which is before that is written; of the first block also those of
            the forwards until they reach it.
        figures: What is known of it: ``bytes`` of its float tensors, ``layers`` that were quantized, and what
            plugins have measured. quark-workbench gives ``snr_db``, the median of the signal-to-noise ratios
            of their weights, and the layer with the lowest, ``worst`` and ``worst_snr_db``.
    """

    name: ClassVar[str] = "block_finished"
    block: str = ""
    number: int = 0
    total: int = 0
    outcome: str = "done"
    seconds: float = 0.0
    seconds_left: float | None = None
    phases: Mapping[str, float] = attrs.field(factory=dict, converter=_read_only, hash=False)
    figures: Mapping[str, Any] = attrs.field(factory=dict, converter=_read_only, hash=False)


@attrs.frozen(kw_only=True)
class BatchFinished(Event):
    """An evaluation of a model in memory has finished a batch of windows.

    Attributes:
        number: 1 for the first.
        total: How many there are; None where that is not known.
        seconds_left: How long the others will take at the rate so far; None as long as that is not known.
    """

    name: ClassVar[str] = "batch_finished"
    number: int = 0
    total: int | None = None
    seconds_left: float | None = None


@attrs.frozen(kw_only=True)
class Warned(Event):
    """Something was logged below the logger ``quark`` at the level WARNING or above.

    Attributes:
        message: The text.
        level: ``"WARNING"``, ``"ERROR"`` or ``"CRITICAL"``.
        logger: Name of the logger.
    """

    name: ClassVar[str] = "warning"
    message: str = ""
    level: str = "WARNING"
    logger: str = ""


@attrs.frozen(kw_only=True)
class Exported(Event):
    """An export is complete, and has its name.

    Attributes:
        path: The directory.
        exporter: Name of the exporter.
        bytes: Of all its files.
        files: How many there are.
    """

    name: ClassVar[str] = "exported"
    path: str = ""
    exporter: str = ""
    bytes: int = 0
    files: int = 0


@attrs.frozen(kw_only=True)
class RunFailed(Event):
    """The run has ended by an error, or was interrupted; nothing comes after this.

    Attributes:
        error: Class of the error, such as ``"CheckpointError"``, or ``"KeyboardInterrupt"``.
        message: Text of the warning.
    """

    name: ClassVar[str] = "run_failed"
    error: str = ""
    message: str = ""


@attrs.frozen(kw_only=True)
class RunFinished(Event):
    """The run has ended well, after ``elapsed`` seconds; nothing comes after this."""

    name: ClassVar[str] = "run_finished"


EVENTS: tuple[type[Event], ...] = (
    RunStarted,
    RunPlanned,
    PhaseStarted,
    BlockStarted,
    BlockFinished,
    BatchFinished,
    Warned,
    Exported,
    RunFailed,
    RunFinished,
)
"""All kinds of events, about in the order in which a run has them."""


def _plain(value: Any) -> Any:
    """Return a value of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
