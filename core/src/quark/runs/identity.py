"""RunIdentity: all facts that the result of a run depends on, as JSON values.

An interrupted run can be resumed only by a run with the same identity. The identity is also stored in the
output, so that a repeated call recognizes a finished run.
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
"""Export options that are left out of the identity. The first two change no tensor. ``own`` has the options
that only one exporter has, which are added in another way.
"""

_LISTED = 8
"""The maximum number of differences that a message lists."""
_PIECES, _PIECE = 64, 4096
"""The number of pieces that are read from each file of the source, and the size of a piece in bytes.

The pieces are small compared with the file, and are spread over all blocks.
"""


@attrs.frozen
class RunIdentity:
    """All facts that the result of a run depends on. Each attribute is a dictionary of JSON values.

    Attributes:
        settings: The configuration (resolved for the model), the exporter and its options, the converters,
            the device, the dtype, and whether sums are deterministic.
        versions: The versions of torch and transformers, and of the distributions whose formats, observers,
            algorithms and exporter the run uses.
        source: A digest of config.json. For each file of the checkpoint, also the file's size, a digest of
            its header, and a digest of a sample of its bytes. If a model has been trained further, the sample
            differs.
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
            model: The float model. Its tensors may be on the meta device.
            plan: The plan of the run. Its configuration is resolved for the model.
            shards: The files of the checkpoint.
            data: Calibration calls.
            exporter: Name of the exporter.
            options: Options of the export.
            converters: Conversions from stored tensors to the model's tensors.
            device: Device of the run.
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
        # The settings are converted to JSON and back, so that they equal the settings of an identity that was
        # read from a file. Objects are replaced by their repr.
        settings = json.loads(json.dumps(settings, default=repr))
        return cls(settings, _versions(plan, exporter), _identity_of_source(shards), _identity_of_data(data))

    def refuse_other(self, which: str, before: Mapping[str, Any], fix: str) -> None:
        """Check that an earlier run has this identity.

        Args:
            which: A phrase that names the earlier run. The message begins with it.
            before: The identity of the earlier run, as JSON values.
            fix: What the user can do. The message ends with it.

        Raises:
            ResumeError: The identities differ. The message names the differences.
        """
        if lines := differences(before, attrs.asdict(self)):
            raise ResumeError(f"{which} differs from this run: {listed(lines)}. {fix}", differences=lines)


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
    """Check at the end of a run that the files of its source have not changed.

    A change is found even if it has not changed the times of the file.

    Every rank must call this function. Each rank checks the files that it has read. These files may be copies
    of the files of the first rank.

    Raises:
        CheckpointError: A file has been changed, replaced or removed.
        RankError: A file of another rank has been changed, replaced or removed.
    """
    try:
        _refuse_changed(identity, shards)
    except CheckpointError as error:
        with suppress(RankError):  # the other ranks stop when they get the message
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
        raise CheckpointError(f"'{directory}' can no longer be read ({error.strerror}). Restore the checkpoint") from error
    if lines:
        raise CheckpointError(
            f"'{directory}' was changed during the run: {listed(lines)}. Restore it, and start again with restart=True (--restart)"
        )


def is_finished_run(out: Path, identity: RunIdentity, *, overwrite: bool) -> bool:
    """Return whether the directory ``out`` is the finished output of a run with the identity ``identity``.

    Return False if the directory does not exist or is empty, or if it was not written by a run from disk. If
    another run has written it, return False if ``overwrite`` is True; otherwise, ResumeError is raised.

    Raises:
        ResumeError: The output belongs to another run. The message names the differences.
        OutputError: A file of the output is missing or damaged. All files are read.
        CheckpointError: The checksums of the output are missing, or cannot be read.
    """
    values = read_json(out / RUN_FILE) if (out / RUN_FILE).is_file() else {}
    if "run" not in values:
        return False
    if not isinstance(values["run"], dict):
        raise OutputError(f"'{out / RUN_FILE}' is damaged. Choose another output directory, or pass overwrite=True to replace this one")
    if values["run"] != attrs.asdict(identity) and overwrite:
        return False
    fix = "choose another output directory, or pass overwrite=True to replace this one"
    identity.refuse_other(f"the run that has written '{out}'", values["run"], fix[:1].upper() + fix[1:])
    if changes := verify(out).changes:
        raise OutputError(f"'{out}' was completed by this run, but files have changed since ({listed(changes)}): {fix}")
    return True


def _identity_of_data(calls: Sequence[Call]) -> dict[str, Any]:
    return {"calls": len(calls), "digest": _digest(part for call in calls for part in _bytes_of([call.args, dict(call.kwargs)]))}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], form: str = "{} was {} and is {}") -> list[str]:
    """Return a line for each value that differs between two nested dictionaries.

    Args:
        before, now: The dictionaries.
        form: Format of a line. It has three places ``{}``: for the name, the value before, and the value now.

    >>> differences({"a": {"x": 1, "y": [1, 2]}}, {"a": {"x": 2, "y": [1, 2]}, "b": "new"})
    ['a.x was 1 and is 2', "b was not there and is 'new'"]
    """
    one, other = dict(_leaves(before)), dict(_leaves(now))
    names = [*one, *(name for name in other if name not in one)]
    return [form.format(name, *pair) for name in names if len(set(pair := (_shown(one, name), _shown(other, name)))) == 2]


def listed(lines: Sequence[str]) -> str:
    """Return a text for a message. It has the first few ``lines`` and the number of the remaining ones."""
    return "; ".join([*lines[:_LISTED], *([f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else [])])


def refuse_different_ranks(ranks: Ranks, identity: RunIdentity, **more: str) -> None:
    """Check that all processes of a run have the same identity. Call it before the run does any work.

    Every rank must call this function.

    Args:
        ranks: The processes.
        identity: Identity of the run in this process.
        more: Further values that must be the same in all processes.

    Raises:
        RankError: A process has other files, data, settings or versions. The message names the differences.
    """
    own = json.dumps({**attrs.asdict(identity), **more}, sort_keys=True)
    if len(set(ranks.gather(_digest([own.encode()])))) == 1:
        return
    first, *others = (json.loads(each) for each in ranks.gather(own))
    each = enumerate((differences(first, other, "{} is {} there and {} here") for other in others), 1)
    rank, lines = next((rank, lines) for rank, lines in each if lines)
    raise RankError(
        f"the processes of this run were started differently. Process {rank} (here) differs from process 0 (there): {listed(lines)}. "
        "Start all processes with the same checkpoint, data, options and installed versions"
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
    """Yield bytes that represent an argument of a model. Different arguments give different bytes.

    For an object that is neither a tensor nor a plain value, the bytes depend only on its class.
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
    """Yield pieces of a file that are evenly spread over it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(_PIECES):
            file.seek(number * size // _PIECES)
            yield file.read(_PIECE)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))
