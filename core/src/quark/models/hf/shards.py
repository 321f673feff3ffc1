"""Functions that read and check the headers of a checkpoint's safetensors files before tensors are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
from safetensors import SafetensorError, safe_open

from quark.base.files import state_of
from quark.base.names import folded
from quark.base.shortages import shortage
from quark.errors import CheckpointError
from quark.models.hf.json_files import LARGEST_FILE, read_json, refuse_link_out, refuse_many_values

_NARROW_FLOATS = ("F8", "F6_", "F4")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""A dictionary from the name of a dtype in a safetensors header to the torch dtype. Narrower floats are
refused (`refuse_codes`)."""


@attrs.frozen
class Shard:
    """One safetensors file whose header agrees with its size.

    Attributes:
        path: The file.
        tensors: A dictionary from tensor name to a pair: the name of the dtype in safetensors, and the shape.
        state: The state of the file (`quark.base.files.state_of`) before the header was read.
    """

    path: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    state: dict[str, int]

    def refuse_changed(self, file: int | None = None) -> None:
        """Raise an error if the file has changed since its header was read.

        Args:
            file: The descriptor of the file if it is open. With None, the file that is now at ``path`` is
                checked.

        Raises:
            CheckpointError: The file was changed, replaced or removed.
        """
        try:
            now = state_of(self.path if file is None else file)
        except OSError as error:
            raise CheckpointError(f"'{self.path}' cannot be read any more ({error.strerror}): restore the checkpoint") from error
        if changed := [f"{what} {was} before and {now[what]} now" for what, was in self.state.items() if now[what] != was]:
            raise CheckpointError(
                f"'{self.path}' has been changed or replaced since it was first read: {', '.join(changed)}. Restore the checkpoint and "
                "leave it alone while it is read"
            )


@contextmanager
def unchanged(shards: Sequence[Shard]) -> Iterator[None]:
    """Raise an error if files change while the ``with`` block reads them.

    If the ``with`` block raises a CheckpointError and a file has changed, the error about the change is
    raised instead.

    Raises:
        CheckpointError: A file was changed, replaced or removed.
    """
    try:
        yield
    except CheckpointError:
        for shard in shards:
            shard.refuse_changed()
        raise
    for shard in shards:
        shard.refuse_changed()


def check_shards(directory: Path) -> list[Shard]:
    """Check the headers of the safetensors files of a checkpoint, and return a `Shard` for each file.

    Raises:
        CheckpointError: A file is missing, truncated, malformed or outside the directory. Or a file lacks a
            tensor that the index lists, or has a tensor that the index does not list. Or two files have the
            same tensor. Or it is unclear which files belong to the checkpoint.
    """
    index = directory / INDEX
    for name in (INDEX, SINGLE):
        refuse_link_out(directory / name, directory)
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise CheckpointError(
                f"'{directory}' has neither {SINGLE} nor {INDEX}: weights are read from safetensors only, convert them first"
            )
        return [read_header(directory / SINGLE)]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"'{index}' is not a safetensors index: its weight_map does not map tensor names to files")
    files = {name: _inside(directory, name) for name in sorted(set(weight_map.values()))}
    if SINGLE not in files and (directory / SINGLE).exists():
        raise CheckpointError(
            f"'{directory}' has a {SINGLE}, and an {INDEX} that names other files: some readers use one, some the other. Remove the "
            "wrong one"
        )
    shards = {name: read_header(path) for name, path in files.items()}
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors:
            raise CheckpointError(
                f"'{index}' says that '{tensor}' is in '{name}', but it is not there: the checkpoint is incomplete, fetch it again"
            )
    _refuse_twice(shards, directory)
    _refuse_unlisted(shards, weight_map, index)
    return list(shards.values())


def refuse_codes(shards: Iterable[Shard], directory: Path) -> None:
    """Raise an error if a checkpoint without a ``quantization_config`` has quantized tensors.

    Raises:
        CheckpointError: A tensor has floating-point elements of 8 bits or fewer. Such elements are codes,
            which cannot be used without scales.
    """
    for shard in shards:
        for tensor, (dtype, _) in shard.tensors.items():
            if dtype.startswith(_NARROW_FLOATS):
                raise CheckpointError(
                    f"'{shard.path}' holds '{tensor}' as {dtype}, but '{directory}/config.json' has no quantization_config that "
                    "names its scales. Give the float checkpoint, or restore the quantization_config"
                )


def _refuse_twice(shards: Mapping[str, Shard], directory: Path) -> None:
    file_of: dict[str, str] = {}
    for name, shard in shards.items():
        for tensor in shard.tensors:
            if tensor in file_of:
                raise CheckpointError(
                    f"'{directory}' has the tensor '{tensor}' twice, in '{file_of[tensor]}' and in '{name}'. Fetch the checkpoint again, "
                    "or make it again"
                )
            file_of[tensor] = name


def _refuse_unlisted(shards: Mapping[str, Shard], weight_map: Mapping[str, str], index: Path) -> None:
    for shard in shards.values():
        if unlisted := [tensor for tensor in shard.tensors if tensor not in weight_map]:
            raise CheckpointError(
                f"'{shard.path}' has {len(unlisted)} tensor(s) that '{index}' does not list: {folded(unlisted)}. The file and the index "
                "may be of different checkpoints: fetch both again, or make the index again"
            )


def _inside(directory: Path, name: str) -> Path:
    """Return the path of the file ``name`` in ``directory``. Raise CheckpointError if the file is outside the
    directory."""
    if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
        raise CheckpointError(f"the index of '{directory}' points to {name!r}, which is no file of the directory: correct the index")
    refuse_link_out(directory / name, directory)
    return directory / name


def read_header(path: Path) -> Shard:
    """Read and check the header of one safetensors file, and return a `Shard`.

    The library safetensors reads the header. It limits the size and depth of the header, refuses values of a
    wrong type, and checks that the tensors fill the file without overlap. This function first limits the
    number of values in the header, because safetensors would store all of them in memory before it finds an
    invalid value. No tensor is read, and the file is not mapped into memory.

    Raises:
        CheckpointError: The file is missing, truncated or malformed.
    """
    if not path.is_file():
        raise CheckpointError(f"the shard '{path}' is missing: the checkpoint is incomplete, fetch it again")
    try:
        state = state_of(path)
        _refuse_large_header(path)
        with safe_open(path, framework="np", backend="pread") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return Shard(path, {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}, state)
    except (SafetensorError, OSError) as error:
        if shortage(error) is not None:
            raise
        raise CheckpointError(
            f"'{path}' is truncated or damaged, or no safetensors file ({error}; it has {path.stat().st_size:,} bytes): fetch it again"
        ) from error


def _refuse_large_header(path: Path) -> None:
    """Raise CheckpointError for a header with more values than any real header has.

    safetensors itself refuses a header that is longer than the file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length <= min(LARGEST_FILE, path.stat().st_size):
                refuse_many_values(file.read(length), path)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read ({error.strerror or error})") from error
