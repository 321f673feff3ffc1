"""Events that a run sends to listeners: frozen records, one class for each kind of event.

Creating an event imports nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import attrs

EVENTS_VERSION = 1
"""Increased if an event or a field is removed or changes its meaning, not if one is added."""


def _read_only(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(values))


@attrs.frozen(kw_only=True)
class Event:
    """Something that happened in a run. Listeners must ignore events whose name they do not know.

    Attributes:
        name: Kind of the event, such as ``"block_finished"``.
        task: Task of the run: ``"quantize"``, ``"select"``, ``"evaluate"``, ``"report"`` or ``"export"``.
        elapsed: Seconds since the run began.
    """

    name: ClassVar[str] = ""
    task: str = ""
    elapsed: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON values: ``event`` (its name), ``version``, and its fields.

        Numbers have at most six decimals; values that JSON lacks become None.
        """
        fields = {field.name: _plain(getattr(self, field.name)) for field in attrs.fields(type(self))}
        return {"event": self.name, "version": EVENTS_VERSION, **fields}


@attrs.frozen(kw_only=True)
class RunStarted(Event):
    """A run has begun; nothing is planned or read yet. Each run ends with one `RunFinished` or `RunFailed`.

    Attributes:
        source: Path of the checkpoint, or the class of a model in memory.
        out: Directory that will be written; None if there is none.
        scheme: Name of the scheme of most layers; None if there is none.
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
        blocks: Number of decoder blocks of the model.
        layers: Number of layers to quantize.
        samples: Calibration forwards of all processes; 0 if none are needed.
        tokens: Calibration tokens.
        two_passes: Whether each block runs twice, to save memory.
        processes: Processes that share the run.
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
    """The run has begun another kind of work, which lasts until the next event of this kind.

    Attributes:
        phase: In a block: ``"load"``, ``"transforms"``, ``"forward"``, ``"statistics"``, ``"solve"``,
            ``"write"`` or ``"report"`` (measuring for the report). Outside blocks also ``"plan"``, ``"data"``
            (calibration data are read), ``"validate"`` (transforms of the whole model), ``"select"``,
            ``"evaluate"`` and ``"compare"`` (hidden states).
        block: Full name of the block; None outside the blocks.
    """

    name: ClassVar[str] = "phase_started"
    phase: str = ""
    block: str | None = None


@attrs.frozen(kw_only=True)
class BlockStarted(Event):
    """Work on a block has begun. A model without known blocks is one block, ``"model"``.

    Attributes:
        block: Full name of the block.
        number: 1 for the first block.
        total: Number of blocks.
    """

    name: ClassVar[str] = "block_started"
    block: str = ""
    number: int = 0
    total: int = 0


@attrs.frozen(kw_only=True)
class BlockFinished(Event):
    """A block is finished. Blocks come in order, each after its `BlockStarted`.

    Attributes:
        block: As in `BlockStarted`.
        number: As in `BlockStarted`.
        total: As in `BlockStarted`.
        outcome: ``"done"``; ``"resumed"`` if an interrupted run had finished the block; ``"other process"``
            if another process works on it.
        seconds: Time that it took.
        seconds_left: Estimated time for the other blocks at the rate so far; None if it is unknown.
        phases: Seconds by phase (see `PhaseStarted`), as in the report of the run. They count from the moment
            when the metrics of the previous block were complete, before that block was written. The first
            block also counts the forwards until they reach it.
        figures: ``bytes`` of its float tensors, number of quantized ``layers``, and figures of plugins.
            quark-workbench adds ``snr_db`` (the median signal-to-noise ratio of the layers' weights), and
            the name ``worst`` and the ratio ``worst_snr_db`` of the layer with the lowest ratio.
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
        number: 1 for the first batch.
        total: Number of batches; None if unknown.
        seconds_left: Estimated time for the other batches at the rate so far; None if it is unknown.
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
    """An export is complete under its final name.

    Attributes:
        path: The directory.
        exporter: Name of the exporter.
        bytes: Size of all its files.
        files: Number of its files.
    """

    name: ClassVar[str] = "exported"
    path: str = ""
    exporter: str = ""
    bytes: int = 0
    files: int = 0


@attrs.frozen(kw_only=True)
class RunFailed(Event):
    """The run has ended with an error or an interrupt; no event comes after this one.

    Attributes:
        error: Class of the error, such as ``"CheckpointError"``, or ``"KeyboardInterrupt"``.
        message: Text of the error.
    """

    name: ClassVar[str] = "run_failed"
    error: str = ""
    message: str = ""


@attrs.frozen(kw_only=True)
class RunFinished(Event):
    """The run has ended well, after ``elapsed`` seconds; no event comes after this one."""

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
"""All kinds of events, roughly in the order of a run."""


def _plain(value: Any) -> Any:
    """Convert a value to JSON values."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
