"""Where a checkpoint's tensors lie: its safetensors files and their headers, checked before anything is read from them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import attrs

from quark.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000


@attrs.frozen
class Shard:
    """One safetensors file whose header agrees with its size.

    Attributes:
        path: The file.
        tensors: Name → (dtype as safetensors writes it, shape).
    """

    path: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]


def check_shards(directory: Path) -> list[Shard]:
    """The safetensors files of a checkpoint, each complete and inside the directory.

    Raises:
        CheckpointError: A file is missing, truncated or malformed, lies outside the directory, or lacks a tensor the index promises.
    """
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise CheckpointError(
                f"'{directory}' has neither {SINGLE} nor {INDEX}: weights are read from safetensors only, convert them first"
            )
        return [read_header(directory / SINGLE)]
    wanted = _weight_map(index)
    shards = {name: read_header(_inside(directory, name)) for name in sorted(set(wanted.values()))}
    for tensor, name in wanted.items():
        if tensor not in shards[name].tensors:
            raise CheckpointError(
                f"'{index}' says that '{tensor}' is in '{name}', but it is not there: the checkpoint is incomplete, fetch it again"
            )
    return list(shards.values())


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if isinstance(found, dict) and found and all(isinstance(v, str) for v in found.values()):
            return found
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{index}' is not a safetensors index: {error!r}") from error
    raise CheckpointError(f"'{index}' is not a safetensors index: its weight_map does not map tensor names to files")


def _inside(directory: Path, name: str) -> Path:
    """The file of that name, which must lie in the directory; links count where they stand, as model caches are made of them."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"the index of '{directory}' points to '{name}', outside the directory: refusing to read it")
    return directory / name


def read_header(path: Path) -> Shard:
    """The header of one safetensors file, checked against the file's size.

    Raises:
        CheckpointError: The file is missing, truncated or malformed.
    """
    if not path.is_file():
        raise CheckpointError(f"the shard '{path}' is missing: the checkpoint is incomplete, fetch it again")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LARGEST_HEADER
        if length >= min(size, _LARGEST_HEADER):
            raise CheckpointError(f"'{path}' is truncated or no safetensors file: {size} bytes cannot hold its header")
        try:
            header = json.loads(file.read(length))
            tensors = {k: v for k, v in header.items() if k != "__metadata__"}
            end = max((v["data_offsets"][1] for v in tensors.values()), default=0)
            found = {k: (str(v["dtype"]), tuple(v["shape"])) for k, v in tensors.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"'{path}' has a damaged safetensors header: {error!r}") from error
    if size != 8 + length + end:
        raise CheckpointError(f"'{path}' is truncated: its header promises {8 + length + end} bytes, the file has {size}. Fetch it again")
    return Shard(path, found)
