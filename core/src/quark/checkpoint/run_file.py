"""Functions that write ``quark_run.json`` in a checkpoint, and that verify the checkpoint with this file.

``quark_run.json`` contains checksums of tensors and files, and identifies the run. Checksums of tensors are
computed while the tensors are written. `verify` compares the files with the checksums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch

from quark.base.files import open_file, pread
from quark.base.names import folded
from quark.checkpoint.checksum import checksum, stored_bytes
from quark.checkpoint.destination import COMPANIONS, OF_THE_RUN, RUN_FILE
from quark.errors import CheckpointError
from quark.models.hf.json_files import read_json
from quark.models.hf.shards import read_header

FORMAT = 1
"""Version of the format of ``quark_run.json``."""


@attrs.frozen
class Verification:
    """The result of `verify`, which compares a checkpoint with its checksums.

    Attributes:
        tensors: Number of tensors that have a checksum.
        files: Number of files that have a single checksum for the whole file. These are all files except
            safetensors files and companions.
        changes: A message for each part that is missing or has changed.
    """

    tensors: int
    files: int
    changes: tuple[str, ...]


@attrs.frozen
class _Stored:
    """A range of bytes in an open file, with an expected checksum and the name of the tensor or file."""

    name: str
    file: int
    offset: int
    size: int
    expected: str


def begin_run_file(directory: Path, headers: Mapping[str, bytes], tensors: Mapping[str, str]) -> None:
    """Write a run file with the checksums of tensors and headers.

    Args:
        directory: The checkpoint.
        headers: A dictionary from file name to the header of the file.
        tensors: A dictionary from full name of a tensor to its checksum.
    """
    made = {name: checksum([torch.frombuffer(bytearray(header), dtype=torch.uint8)]) for name, header in headers.items()}
    _write(directory, {"checksums": {"headers": made, "tensors": dict(sorted(tensors.items()))}})


def complete_run_file(directory: Path, run: Mapping[str, Any] | None = None) -> None:
    """Add the identity of the run, the sizes of files, and more checksums to the run file.

    Each file whose header has no checksum gets a checksum of the whole file. Companions of a checkpoint, such
    as a tokenizer, get no size and no checksum, because other programs may replace them.

    Args:
        directory: The complete checkpoint. Its exporter may have called `begin_run_file`.
        run: Identity of the run, in JSON form. None if the exported model was in memory.
    """
    begun = read_json(directory / RUN_FILE)["checksums"] if (directory / RUN_FILE).is_file() else {"headers": {}, "tensors": {}}
    paths = [p for p in sorted(directory.iterdir()) if p.is_file() and p.name not in (*COMPANIONS, *OF_THE_RUN)]
    sizes = {path.name: path.stat().st_size for path in paths}
    with ExitStack() as stack:
        whole = {path.name: _opened(path, stack) for path in paths if path.name not in begun["headers"]}
        files = {name: checksum(stored_bytes(file, 0, sizes[name])) for name, file in whole.items()}
    identity = {} if run is None else {"run": run}
    _write(directory, {"format": FORMAT, **identity, "files": sizes, "checksums": {**begun, "files": files}})


def verify(directory: Path) -> Verification:
    """Compare all bytes of a checkpoint with the checksums in its run file.

    Raises:
        CheckpointError: The checkpoint has no checksums, or the checksums cannot be read.
    """
    sizes, headers, tensors, files = _contents(directory)
    changes = []
    with ExitStack() as stack:
        opened: dict[str, int] = {}
        for name, size in sizes.items():
            path = directory / name
            if not path.is_file():
                changes.append(f"'{name}' is missing")
            elif path.stat().st_size != size:
                changes.append(f"'{name}' has {path.stat().st_size:,} bytes, but had {size:,} when it was written")
            else:
                opened[name] = _opened(path, stack)
        whole = [_Stored(name, opened[name], 0, sizes[name], files[name]) for name in files if name in opened]
        changes += [f"'{part.name}' has changed since it was written" for part in _changed(whole)]
        starts = [_Stored(n, opened[n], 0, _size_of(headers[n], sizes[n]), headers[n]) for n in headers if n in opened]
        damaged = {part.name for part in _changed(starts)}
        changes += [f"the header of '{name}' has changed since it was written" for name in sorted(damaged)]
        found: set[str] = set()
        for part in (part for part in starts if part.name not in damaged):
            stored = list(_tensors(directory / part.name, part, tensors))
            found |= {tensor.name for tensor in stored}
            if changed := [tensor.name for tensor in _changed(stored)]:
                changes.append(f"{len(changed)} tensor(s) in '{part.name}' have changed since they were written: {folded(changed)}")
        if not changes and (lost := sorted(tensors.keys() ^ found)):
            changes.append(f"{len(lost)} tensor(s) have no checksum, or are in no file: {folded(lost)}")
    return Verification(len(tensors), len(files), tuple(changes))


def _contents(directory: Path) -> tuple[dict[str, int], dict[str, str], dict[str, str], dict[str, str]]:
    """Return four dictionaries that the run file contains. Their keys are names.

    The values are the sizes of files, the checksums of headers, the checksums of tensors, and the checksums
    of whole files.
    """
    path = directory / RUN_FILE
    if not path.is_file():
        raise CheckpointError(
            f"'{directory}' cannot be verified, because it has no {RUN_FILE}, the file with the checksums. Export the model again"
        )
    values = read_json(path)
    if not isinstance(sums := values.get("checksums"), dict):
        raise CheckpointError(f"'{path}' has no checksums, because an earlier version of quark wrote it. Export the model again")
    sizes: Any = values.get("files")
    parts: list[Any] = [sums.get(key) for key in ("headers", "tensors", "files")]
    if not _maps_to(int, sizes) or not all(_maps_to(str, part) for part in parts) or any(Path(n).name != n for n in sizes):
        raise CheckpointError(
            f"'{path}' is damaged: its sizes or checksums are missing, or have a wrong form. Make or fetch the checkpoint again"
        )
    headers, tensors, files = parts
    if headers.keys() | files.keys() != sizes.keys():
        raise CheckpointError(f"'{path}' is damaged: its sizes and its checksums name different files. Make or fetch the checkpoint again")
    return sizes, headers, tensors, files


def _maps_to(kind: type, values: object) -> bool:
    """Return whether ``values`` is a dictionary whose values all have the type ``kind``."""
    return isinstance(values, dict) and all(type(value) is kind for value in values.values())


def _size_of(expected: str, most: int) -> int:
    """Return the number of bytes from which the checksum ``expected`` was computed, but at most ``most``."""
    size = expected.rpartition(":")[2]
    return min(int(size), most) if size.isdecimal() and len(size) < 20 else most


def _tensors(path: Path, header: _Stored, expected: Mapping[str, str]) -> Iterator[_Stored]:
    """Yield a `_Stored` for each tensor in a safetensors file. The header of the file must be unchanged."""
    read_header(path)  # refuses a damaged header
    for name, entry in json.loads(pread(header.file, header.size - 8, 8)).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield _Stored(name, header.file, header.size + start, end - start, expected.get(name, ""))


def _changed(parts: list[_Stored]) -> list[_Stored]:
    """Return those of ``parts`` whose bytes do not have the expected checksum."""
    return [part for part in parts if checksum(stored_bytes(part.file, part.offset, part.size)) != part.expected]


def _opened(path: Path, stack: ExitStack) -> int:
    """Open a file for reading and return its descriptor, which ``stack`` will close."""
    file = open_file(path, os.O_RDONLY)
    stack.callback(os.close, file)
    return file


def _write(directory: Path, values: Mapping[str, Any]) -> None:
    (directory / RUN_FILE).write_text(json.dumps(values, indent=1), encoding="utf-8", newline="\n")
