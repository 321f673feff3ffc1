"""Tensors are read from the file whose header was checked; if the file changes, an error names it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from quark.errors import CheckpointError
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.shards import DTYPES, check_shards

CPU = torch.device("cpu")
NAMES = ("a", "b")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({name: torch.arange(2.0**16) for name in NAMES}, tmp_path / "model.safetensors")
    return tmp_path


def in_place(file: Path) -> None:
    data = file.read_bytes()
    with file.open("r+b") as opened:
        opened.write(data[:-4096] + bytes(4096))


def replaced(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    times = file.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (lambda file: os.truncate(file, 1 << 18), r"bytes \d+ before and 262144 now"),
    "longer": (lambda file: os.truncate(file, 1 << 20), r"bytes \d+ before and 1048576 now"),
    "written to": (in_place, "time of change in ns"),
    "replaced by one of the same size and time": (replaced, r"inode \d+ before and"),
    "removed": (lambda file: file.unlink(), "No such file"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_file_that_has_changed_since_its_header_was_checked_is_refused(what: str, checkpoint: Path) -> None:
    files = FileTensors(check_shards(checkpoint))
    with files.reading(CPU) as read:
        read("a", torch.float32)
    change, complaint = CHANGES[what]
    change(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors'.*{complaint}"), files.reading(CPU) as read:
        read("a", torch.float32)


def read_with(files: FileTensors, change: Callable[[], object], then: str | None) -> None:
    """Read one tensor, change the file, and read another tensor if one is named."""
    with files.reading(CPU) as read:
        first = read("a", torch.float32)
        change()
        assert torch.equal(first, torch.arange(2.0**16))  # pages of a mapping would be gone, and the process with them
        if then is not None:
            read(then, torch.float32)


@pytest.mark.parametrize("then", [None, "b"])
@pytest.mark.parametrize("what", ["cut", "longer", "written to"])
def test_a_file_that_changes_while_it_is_read_is_refused_at_the_end(what: str, then: str | None, checkpoint: Path) -> None:
    files, (change, complaint) = FileTensors(check_shards(checkpoint)), CHANGES[what]
    with pytest.raises(CheckpointError, match=complaint):
        read_with(files, lambda: change(checkpoint / "model.safetensors"), then)


KINDS = [dtype for dtype in DTYPES.values() if dtype not in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_tensors_of_any_dtype_and_shape_are_those_that_were_written(
    kinds: list[tuple[torch.dtype, list[int]]], seed: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    tensors: dict[str, Tensor] = {f"t{i}": (8 * torch.randn(shape)).to(dtype) for i, (dtype, shape) in enumerate(kinds)}
    save_file(tensors, tmp_path / "model.safetensors")
    with FileTensors(check_shards(tmp_path)).reading(CPU) as read:
        for name, tensor in tensors.items():
            found = read(name, torch.float32)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_memory_of_a_tensor_that_is_gone_is_read_into_again_and_that_of_others_is_not(checkpoint: Path) -> None:
    with FileTensors(check_shards(checkpoint)).reading(CPU) as read:
        kept, gone = read("a", torch.float32), read("b", torch.float32)
        part, address = kept[5:7], gone.data_ptr()
        del kept, gone
        assert read("b", torch.float32).data_ptr() == address
        assert read("a", torch.float32).data_ptr() != part.data_ptr() - 5 * part.itemsize
        assert part.tolist() == [5.0, 6.0]
