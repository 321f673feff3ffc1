"""The bytes and the bits per weight of each kind of layer, from the headers of files, and hashes of files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from quark.base.names import without_numbers
from quark.checkpoint.destination import OF_THE_RUN
from quark.errors import CheckpointError
from quark.models.hf.shards import check_shards
from quark.models.plan.plan_row import PlanRow

__all__ = ["OTHER", "SMALL", "block_of", "files_of", "kind_of", "sizes_of", "stored_bytes", "tensor_bytes"]

OTHER = "(other tensors)"
"""The kind of tensors that belong to no layer of the plan."""
SMALL = 32 << 20
"""Bytes up to which a file is always hashed: that takes some hundredths of a second."""


def kind_of(name: str, blocks: Iterable[str]) -> str:
    """Return the kind of a layer, which is its name in its block with ``*`` in place of numbers.

    For a layer outside all blocks, the full name takes the place of the name in the block.
    """
    block = block_of(name, blocks)
    return without_numbers(name if block is None else name.removeprefix(f"{block}."))


def block_of(name: str, blocks: Iterable[str]) -> str | None:
    """Return the block of a layer, or None if the layer is outside all blocks or the model is one block."""
    return next((b for b in blocks if b and name.startswith(f"{b}.")), None)


def tensor_bytes(directory: Path) -> dict[str, int]:
    """Return a dictionary from name to bytes for each tensor of a checkpoint, from the headers of its files.

    Raises:
        CheckpointError: The checkpoint has no safetensors files, or they are damaged.
    """
    return {name: _bytes(*entry) for shard in check_shards(directory) for name, entry in shard.tensors.items()}


def stored_bytes(directory: Path) -> dict[str, int] | None:
    """Return what `tensor_bytes` returns, or None if this raises CheckpointError."""
    try:
        return tensor_bytes(directory)
    except CheckpointError:
        return None


def sizes_of(rows: Sequence[PlanRow], blocks: Sequence[str], float_bytes: int, element: int, directory: Path) -> dict[str, Any]:
    """Return the sizes of a checkpoint and of its float model.

    Args:
        rows: The rows of the plan.
        blocks: Names of the decoder blocks.
        float_bytes: Bytes of the whole float model.
        element: Bytes of one element of the float model.
        directory: Directory of the checkpoint.

    Returns:
        A dictionary. ``float_bytes`` and ``stored_bytes`` are the bytes of all tensors in the float model and
        in the checkpoint. ``effective_bits`` is the mean number of stored bits per weight, with scales and
        zero points, over all layers with a quantized weight. ``kinds`` has such values for each kind of
        layer; it also names the layers that are tied to this kind and are not stored again. ``layers`` is a
        dictionary from full name to bits per weight. Unknown values are None.
    """
    stored = stored_bytes(directory)
    own = [r for r in rows if r.tied_to is None]
    of_layer = None if stored is None else _of_layers(stored, own)
    kinds: dict[str, dict[str, Any]] = {}
    for row in own:
        empty = {"layers": 0, "weights": 0, "float_bytes": 0, "stored_bytes": 0, "quantized": False}
        kind = kinds.setdefault(kind_of(row.name, blocks), empty)
        if tied := [r.name for r in rows if r.tied_to == row.name and f"{r.name}.weight" not in (stored or ())]:
            kind["tied"] = [*kind.get("tied", ()), *tied]
        kind["layers"] += 1
        kind["weights"] += prod(row.shape)
        kind["float_bytes"] += prod(row.shape) * element
        kind["stored_bytes"] += 0 if of_layer is None else of_layer[row.name]
        kind["quantized"] |= row.has_quantized_weight
    rest = float_bytes - sum(kind["float_bytes"] for kind in kinds.values())
    total = None if stored is None else sum(stored.values())
    if rest > 0:
        left = 0 if total is None else total - sum(kind["stored_bytes"] for kind in kinds.values())
        kinds[OTHER] = {"layers": 0, "weights": rest // element, "float_bytes": rest, "stored_bytes": left, "quantized": False}
    listed = [{"kind": name, **kind, "bits": _bits(kind["stored_bytes"], kind["weights"])} for name, kind in kinds.items()]
    if of_layer is None:
        listed = [entry | {"stored_bytes": None, "bits": None} for entry in listed]
    quantized = [r for r in own if r.has_quantized_weight]
    weights = sum(prod(r.shape) for r in quantized)
    effective = None if of_layer is None else _bits(sum(of_layer[r.name] for r in quantized), weights)
    bits = {} if of_layer is None else {r.name: _bits(of_layer[r.name], prod(r.shape)) for r in own}
    return {"float_bytes": float_bytes, "stored_bytes": total, "effective_bits": effective, "kinds": listed, "layers": bits}


def files_of(directory: Path, *, hashes_weights: bool) -> list[dict[str, Any]]:
    """Return the name, the bytes and the SHA-256 hash of each file of a checkpoint, in order of name.

    The files of the report are left out.

    Args:
        directory: Directory of the checkpoint.
        hashes_weights: Whether to hash files of more than `SMALL` bytes too. This reads all weights.
    """
    files = sorted(p for p in directory.iterdir() if p.is_file() and p.name not in OF_THE_RUN)
    sizes = {path: path.stat().st_size for path in files}
    return [{"name": p.name, "bytes": n, "sha256": _digest(p) if hashes_weights or n <= SMALL else None} for p, n in sizes.items()]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_layers(stored: Mapping[str, int], rows: Iterable[PlanRow]) -> dict[str, int]:
    """Return a dictionary from name of layer to the bytes of its weight, scales, zero points and bias."""
    names = {row.name for row in rows}
    sizes = dict.fromkeys(names, 0)
    for tensor, size in stored.items():
        owner = tensor
        while owner and owner not in names:
            owner = owner.rpartition(".")[0]
        if owner:
            sizes[owner] += size
    return sizes


def _bits(size: int, weights: int) -> float | None:
    return 8 * size / weights if weights else None


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. ``dtype`` is a name of safetensors, such as ``BF16`` or ``F8_E4M3``.

    An element of the dtype ``BOOL`` needs one byte.
    """
    digits = re.search(r"\d+", dtype)
    return prod(shape) * (8 if digits is None else int(digits.group())) // 8
