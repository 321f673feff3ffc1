"""Identity of a run: everything that its result depends on, as JSON values.

A run is resumed only where it equals that of the run before. It stays in the output, so that a run that is
asked for again is known to be finished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch
from torch import Tensor, nn

from quark.base.names import fold_names
from quark.base.ranks import Ranks
from quark.base.version import VERSION, transformers_version
from quark.calibration.batches import Call
from quark.checkpoint.destination import RUN_FILE
from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.provenance import provenance
from quark.checkpoint.run_file import verify
from quark.errors import CheckpointError, OutputError, RankError, ResumeError
from quark.models.hf.json_files import read_json
from quark.models.hf.shards import Shard
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins.attribution import origin

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter

_NOT_OF_THE_WEIGHTS = ("overwrite", "tokenizer", "own")
"""Export options that change no tensor; an exporter's own are listed apart."""

_LISTED = 8
"""Differences that a message lists."""
_PIECES, _PIECE = 64, 4096
"""Pieces of a file of the source that are looked at, and their size in bytes: little beside the file, and
spread over all blocks.
"""


@attrs.frozen
class RunIdentity:
    """Everything that the result of a run depends on, as JSON values by name.

    Attributes:
        settings: Configuration as it is resolved for the model, exporter and its options, converters, device,
            dtype, order of sums.
        versions: Of torch, transformers and the distributions whose formats, observers, algorithms and
            exporter the run uses.
        source: Of each file of the checkpoint its size, and digests of its header and of a sample of its
            bytes, which differs where a model has been trained further; a digest of its config.json.
        data: A digest of the calibration data.
    """

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    source: Mapping[str, Any]
    data: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: QuantPlan,
        shards: Sequence[Shard],
        data: Sequence[Call],
        exporter: str,
        options: ExportOptions,
        converters: Sequence[WeightConverter],
        device: torch.device,
        is_deterministic: bool = False,
    ) -> Self:
        """Return the identity of a run.

        Args:
            model: The float model; meta tensors will do.
            plan: Of the run: its configuration is resolved for the model.
            shards: The files of the checkpoint.
            data: Calibration calls.
            exporter: Name of the exporter.
            options: Of the export.
            converters: What stored tensors become before they are the model's.
            device: Where the run works.
            is_deterministic: Whether the result does not depend on the number of processes
                (`quark.base.ranks.Ranks`).
        """
        common = {f.name: getattr(options, f.name) for f in attrs.fields(ExportOptions) if f.name not in _NOT_OF_THE_WEIGHTS}
        settings = {
            "configuration": plan.config.to_dict(),
            "layers that stay as they are": list(fold_names(plan.kept)),
            "architecture": _digest([repr(plan.architecture).encode()]),
            "exporter": exporter,
            "exporter options": {**common, **options.own},
            "weight converters": [
                [c.source_patterns, c.target_patterns, [[type(o).__name__, vars(o)] for o in c.operations]] for c in converters
            ],
            "device": device.type,
            "deterministic": is_deterministic,
            "dtype": str(next(p.dtype for p in model.parameters())),
        }
        # As it is when it has been written as JSON and read again; objects become their representation.
        settings = json.loads(json.dumps(settings, default=repr))
        return cls(settings, _versions(plan, exporter), _identity_of_source(shards), _identity_of_data(data))

    def refuse_other(self, which: str, before: Mapping[str, Any], fix: str) -> None:
        """Check that an earlier run is this one.

        Args:
            which: The earlier run, for the message.
            before: Its identity, as JSON values.
            fix: What to do if it is another.

        Raises:
            ResumeError: It is another; the message names what differs.
        """
        if lines := differences(before, attrs.asdict(self)):
            raise ResumeError(f"{which} is not the one that is asked for now. It differs in: {listed(lines)}. {fix}", differences=lines)


def _versions(plan: QuantPlan, exporter: str) -> dict[str, str]:
    entries = [entry for kind in provenance(plan.config).values() for entry in kind.values()]
    source = origin("exporters", exporter).source
    used = {entry["distribution"]: entry["version"] for entry in entries} | {source.distribution: source.version}
    return {"quark-core": VERSION, "torch": torch.__version__, "transformers": str(transformers_version()), **dict(sorted(used.items()))}


def _identity_of_source(shards: Sequence[Shard]) -> dict[str, Any]:
    files = {
        s.path.name: {"bytes": s.path.stat().st_size, "header": _digest([_header(s.path)]), "sample": _digest(_sample(s.path))}
        for s in shards
    }
    return {"config.json": _digest([(shards[0].path.parent / "config.json").read_bytes()]), **files}


def refuse_changed_source(ranks: Ranks, identity: RunIdentity, shards: Sequence[Shard]) -> None:
    """Check at the end of a run that its source is what it was at the beginning, also if no time tells.

    Each rank looks at the files that it has read, which may be a copy of those of the first; collective.

    Raises:
        CheckpointError: A file has been changed, replaced or removed.
        RankError: One of another rank has.
    """
    try:
        _refuse_changed(identity, shards)
    except CheckpointError as error:
        with suppress(RankError):  # the others stop when they hear of it
            ranks.gather(str(error))
        raise
    for rank, reason in enumerate(ranks.gather("")):
        if reason:
            raise RankError(f"process {rank} of this run has stopped: {reason}")


def _refuse_changed(identity: RunIdentity, shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.refuse_changed()
    directory = shards[0].path.parent
    try:
        lines = differences(identity.source, _identity_of_source(shards))
    except OSError as error:
        raise CheckpointError(f"'{directory}' cannot be read any more ({error.strerror}): restore the checkpoint") from error
    if lines:
        raise CheckpointError(
            f"'{directory}' has been changed while it was read: {listed(lines)}. Restore it, and start again with restart=True (--restart)"
        )


def is_finished_run(out: Path, identity: RunIdentity, *, overwrite: bool) -> bool:
    """Return whether an output directory is of the run of that identity.

    False where it is free, may be replaced, or is an export of no run from disk.

    Raises:
        ResumeError: It is of another run; the message names what differs.
        OutputError: A file of it has gone, or is not as it was written: all of them are read.
        CheckpointError: Its checksums are missing, or cannot be read.
    """
    values = read_json(out / RUN_FILE) if (out / RUN_FILE).is_file() else {}
    if "run" not in values:
        return False
    if not isinstance(values["run"], dict):
        raise OutputError(f"'{out / RUN_FILE}' is damaged: choose another output directory, or pass overwrite=True to replace it")
    if values["run"] != attrs.asdict(identity) and overwrite:
        return False
    fix = "choose another output directory, or pass overwrite=True to replace it"
    identity.refuse_other(f"the run that has written '{out}'", values["run"], fix[:1].upper() + fix[1:])
    if changes := verify(out).changes:
        raise OutputError(f"'{out}' is of this run and was complete, and has been changed since ({listed(changes)}): {fix}")
    return True


def _identity_of_data(calls: Sequence[Call]) -> dict[str, Any]:
    return {"calls": len(calls), "digest": _digest(part for call in calls for part in _bytes_of([call.args, dict(call.kwargs)]))}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], form: str = "{} was {} and is {}") -> list[str]:
    """Return a line for each value that differs, such as ``"settings.dtype was float16 and is float32"``.

    >>> differences({"a": {"x": 1, "y": [1, 2]}}, {"a": {"x": 2, "y": [1, 2]}, "b": "new"})
    ['a.x was 1 and is 2', "b was not there and is 'new'"]
    """
    one, other = dict(_leaves(before)), dict(_leaves(now))
    names = [*one, *(name for name in other if name not in one)]
    return [form.format(name, *pair) for name in names if len(set(pair := (_shown(one, name), _shown(other, name)))) == 2]


def listed(lines: Sequence[str]) -> str:
    """Return the first differences for a message, and how many more there are."""
    return "; ".join([*lines[:_LISTED], *([f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else [])])


def refuse_different_ranks(ranks: Ranks, identity: RunIdentity, **more: str) -> None:
    """Check that all processes of a run have been asked for the same, before work begins; collective.

    Args:
        ranks: The processes.
        identity: Of the run, as this process sees it.
        more: What else all of them have to agree on.

    Raises:
        RankError: Source, data, settings or versions of another process are others; the message names them.
    """
    own = json.dumps({**attrs.asdict(identity), **more}, sort_keys=True)
    if len(set(ranks.gather(_digest([own.encode()])))) == 1:
        return
    first, *others = (json.loads(each) for each in ranks.gather(own))
    each = enumerate((differences(first, other, "{} is {} there and {} here") for other in others), 1)
    rank, lines = next((rank, lines) for rank, lines in each if lines)
    raise RankError(
        f"the processes of this run are not asked for the same. From process 0 there, process {rank} here differs in: {listed(lines)}. "
        "Start all of them with the same checkpoint, data, options and installed versions"
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    elif path:
        yield path, value
    for key, inner in items:
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not there"


def _bytes_of(value: Any) -> Iterator[bytes]:
    """Yield bytes that differ where arguments of a model differ.

    Only the class counts of objects other than tensors and plain values.
    """
    if isinstance(value, Tensor):
        dense = value.detach().cpu().contiguous()
        yield f"{value.dtype}{list(value.shape)}".encode()
        yield dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield b"{"
        for key, inner in value.items():
            yield f"{key!r}:".encode()
            yield from _bytes_of(inner)
        yield b"}"
    elif isinstance(value, list | tuple):
        yield b"["
        for inner in value:
            yield from _bytes_of(inner)
        yield b"]"
    else:
        yield (repr(value) if isinstance(value, str | int | float | None) else type(value).__name__).encode()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _sample(path: Path) -> Iterator[bytes]:
    """Yield pieces of a file, spread evenly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(_PIECES):
            file.seek(number * size // _PIECES)
            yield file.read(_PIECE)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))
