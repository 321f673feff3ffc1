"""Tensors of a checkpoint's safetensors files, read without safetensors, and failing writes."""

from __future__ import annotations

import builtins
import errno
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

try:
    import resource
except ImportError:  # Windows limits no file
    resource = None  # type: ignore[assignment]

from quark_devkit.check import CheckFailedError, require

CAN_LIMIT = resource is not None
"""Whether this system supports `largest_file`, which Windows does not."""

BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32}
BITS |= {"U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of an element by the name of its dtype. Source: the format description of safetensors."""


@attrs.frozen
class StoredTensor:
    """A tensor in a file's header.

    Attributes:
        file: Name of the file.
        dtype: Dtype in the header.
        shape: Sizes.
        begin: The position of the first byte, counted from the end of the header.
        end: The position after the last byte.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the safetensors files in a directory.

    Raises:
        CheckFailedError: A header is damaged, sizes and shapes disagree, bytes belong to no tensor, or a name
            occurs twice.
    """
    found: dict[str, StoredTensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        require(8 + length <= len(content), f"writes '{path.name}', which is shorter than its header says")
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        position = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            require(entry["dtype"] in BITS, f"writes '{name}' in the dtype {entry['dtype']}, which safetensors does not have")
            right = begin == position and (end - begin) * 8 == math.prod(entry["shape"]) * BITS[entry["dtype"]]
            require(right, f"writes '{path.name}' with '{name}' at the bytes {begin} to {end}, which do not fit its shape {entry['shape']}")
            if name in found:
                raise CheckFailedError(f"writes the tensor '{name}' twice, in '{path.name}' and in '{found[name].file}'")
            found[name] = StoredTensor(path.name, entry["dtype"], tuple(entry["shape"]), begin, end)
            position = end
        require(8 + length + position == len(content), f"writes '{path.name}' with bytes that belong to no tensor")
    return found


def wrong_index(directory: Path, tensors: dict[str, StoredTensor]) -> str | None:
    """Return an error in the index of the shards in a directory, as a predicate; None if there is no error in
    it."""
    files = {tensor.file for tensor in tensors.values()}
    path = directory / "model.safetensors.index.json"
    if not path.is_file():
        return f"writes {len(files)} files of tensors but no index" if len(files) > 1 else None
    index = json.loads(path.read_text(encoding="utf-8"))
    places: dict[str, str] = index["weight_map"]
    for name, file in places.items():
        if name not in tensors or tensors[name].file != file:
            return f"writes an index that puts '{name}' into the wrong file '{file}'"
    if unlisted := sorted(tensors.keys() - places.keys()):
        return f"writes the tensor '{unlisted[0]}', which is not in the index"
    size = sum(tensor.end - tensor.begin for tensor in tensors.values())
    total = index.get("metadata", {}).get("total_size")
    return None if total == size else f"writes an index with total_size {total}, but the tensors have {size} bytes"


@contextmanager
def failing_open(below: Path, number: int) -> Iterator[list[Path]]:
    """Make opening files for writing below a directory fail after some calls, as on a full disk.

    Yields a list of all files that Python code has tried to open in this way.

    Args:
        below: The directory.
        number: The number of calls that succeed first.
    """
    seen: list[Path] = []

    def wrapped(function: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def opened(file: Any, *args: Any, **named: Any) -> Any:
            path = Path(os.fsdecode(file)) if isinstance(file, str | bytes | os.PathLike) else None
            if path is not None and path.resolve().is_relative_to(below.resolve()) and writes(*args, **named) and path.suffix != ".lock":
                seen.append(path)
                if len(seen) > number:
                    raise OSError(errno.ENOSPC, "no space left (on purpose)", str(path))
            return function(file, *args, **named)

        return opened

    def by_mode(mode: str = "r", *_: Any, **__: Any) -> bool:
        return any(letter in mode for letter in "wax+")

    def by_flags(flags: int = 0, *_: Any, **__: Any) -> bool:
        return bool(flags & (os.O_WRONLY | os.O_RDWR)) and not flags & getattr(os, "O_DIRECTORY", 0)

    kept = builtins.open, io.open, os.open
    builtins.open, io.open, os.open = wrapped(kept[0], by_mode), wrapped(kept[1], by_mode), wrapped(kept[2], by_flags)
    try:
        yield seen
    finally:
        builtins.open, io.open, os.open = kept


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files. A write beyond ``size`` bytes fails, in code of any language."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
