"""Events that a run sends to listeners. Each kind of event is a class of frozen objects.

This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import attrs

EVENTS_VERSION = 1
"""Version of the events. It increases if an event or a field is removed or gets another meaning.

It does not increase if an event or a field is added.
"""


def _read_only(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(values))


@attrs.frozen(kw_only=True)
class Event:
    """Something that happened in a run. Listeners must ignore events whose name is unknown to them.

    Attributes:
        name: Kind of the event, such as ``"block_finished"``.
        task: Task of the run: ``"quantize"``, ``"select"``, ``"evaluate"``, ``"report"`` or ``"export"``.
        elapsed: Seconds since the run began.
    """

    name: ClassVar[str] = ""
    task: str = ""
    elapsed: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a dictionary of JSON values, with the keys ``event`` (the event's name),
        ``version`` and the names of the fields.

        Numbers are rounded to six decimals. Numbers that JSON cannot represent (NaN, infinity) become None.
        """
        fields = {field.name: _plain(getattr(self, field.name)) for field in attrs.fields(type(self))}
        return {"event": self.name, "version": EVENTS_VERSION, **fields}


@attrs.frozen(kw_only=True)
class RunStarted(Event):
    """A run has begun. Nothing is planned or read yet. Each run ends with one `RunFinished` or `RunFailed`.

    Attributes:
        source: Path of the checkpoint, or name of the class of a model in memory.
        out: Directory to which the run will write. None if the run writes no files.
        scheme: Name of the scheme of most layers. None if the configuration of these layers is not a named
            scheme.
        algorithms: Names of the algorithms, in the order of the configuration.
    """

    name: ClassVar[str] = "run_started"
    source: str = ""
    out: str | None = None
    scheme: str | None = None
    algorithms: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class RunPlanned(Event):
    """The plan of the run is ready. No weight has been read or changed yet.

    Attributes:
        blocks: Number of decoder blocks of the model.
        layers: Number of layers to quantize.
        samples: Number of calibration forward passes of all processes together. 0 if the run does not
            calibrate.
        tokens: Number of calibration tokens.
        two_passes: Whether the samples run through each block twice, to save memory.
        processes: Number of processes that share the run.
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
    """The run has begun another phase of its work. The phase lasts until the next `PhaseStarted`.

    Attributes:
        phase: Inside a block, the phase is ``"load"``, ``"transforms"``, ``"forward"``, ``"statistics"``,
            ``"solve"``, ``"write"`` or ``"report"`` (the run measures for the report). Outside blocks it can
            also be ``"plan"``, ``"data"`` (the run reads calibration data), ``"validate"`` (the run validates
            transforms of the whole model), ``"select"`` (the run selects schemes), ``"evaluate"`` or
            ``"compare"`` (the run compares hidden states).
        block: Full name of the block. None outside blocks.
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
    """A block is finished. The run has sent the block's `BlockStarted` before, and it sends blocks in order.

    Attributes:
        block: Full name of the block, as in `BlockStarted`.
        number: 1 for the first block, as in `BlockStarted`.
        total: Number of blocks, as in `BlockStarted`.
        outcome: ``"done"`` if this run has quantized the block. ``"resumed"`` if an earlier, interrupted run
            has quantized the block. ``"other process"`` if another process of the run works on the block.
        seconds: Time that the block took.
        seconds_left: Estimated seconds for the remaining blocks at the rate so far. None if it is unknown.
        phases: Mapping from phase (see `PhaseStarted`) to seconds, as in the report of the run. The time of a
            block begins when the metrics of the previous block are complete, before that block is written.
            The time of the first block includes the part of the forward passes that precedes the block.
        figures: ``bytes`` is the size of the block's float tensors, and ``layers`` is the number of quantized
            layers. Plugins can add further figures. quark-workbench adds ``snr_db``, the median
            signal-to-noise ratio of the layers' weights. It also adds the name (``worst``) and the
            signal-to-noise ratio (``worst_snr_db``) of the layer with the lowest ratio.
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
        total: Number of batches. None if it is unknown.
        seconds_left: Estimated time for the remaining batches at the rate so far. None if it is unknown.
    """

    name: ClassVar[str] = "batch_finished"
    number: int = 0
    total: int | None = None
    seconds_left: float | None = None


@attrs.frozen(kw_only=True)
class Warned(Event):
    """The logger ``quark``, or a logger below it, has logged a message of level WARNING or above.

    Attributes:
        message: Text of the message.
        level: ``"WARNING"``, ``"ERROR"`` or ``"CRITICAL"``.
        logger: Name of the logger.
    """

    name: ClassVar[str] = "warning"
    message: str = ""
    level: str = "WARNING"
    logger: str = ""


@attrs.frozen(kw_only=True)
class Exported(Event):
    """An export is complete, and its directory has its final name.

    Attributes:
        path: Directory of the export.
        exporter: Name of the exporter.
        bytes: Total size of the files in the directory.
        files: Number of files in the directory.
    """

    name: ClassVar[str] = "exported"
    path: str = ""
    exporter: str = ""
    bytes: int = 0
    files: int = 0


@attrs.frozen(kw_only=True)
class RunFailed(Event):
    """The run has ended with an error or an interrupt. It sends no further events.

    Attributes:
        error: Name of the error's class, such as ``"CheckpointError"`` or ``"KeyboardInterrupt"``.
        message: Text of the error.
    """

    name: ClassVar[str] = "run_failed"
    error: str = ""
    message: str = ""


@attrs.frozen(kw_only=True)
class RunFinished(Event):
    """The run has ended without an error, ``elapsed`` seconds after it began. It sends no further events."""

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
    """Convert a value to a value that JSON can represent."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
