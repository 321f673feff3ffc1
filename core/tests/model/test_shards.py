"""Damaged checkpoints are refused before anything is read from them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quark.errors import CheckpointError
from quark.model.shards import INDEX, SINGLE, check_shards


def sharded(directory: Path) -> Path:
    save_file({"a": torch.ones(2, 3)}, directory / "one.safetensors")
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, directory / "two.safetensors")
    write_index(directory, {"a": "one.safetensors", "b": "two.safetensors"})
    return directory


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_complete_checkpoint_lists_its_tensors(tmp_path: Path) -> None:
    found = {name: facts for shard in check_shards(sharded(tmp_path)) for name, facts in shard.tensors.items()}
    assert found == {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE)
    assert [s.path.name for s in check_shards(tmp_path)] == [SINGLE]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors' is missing"):
        check_shards(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: int) -> None:
    shard = sharded(tmp_path) / "one.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"one\.safetensors' is truncated"):
        check_shards(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/one.safetensors", ".."])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    write_index(sharded(tmp_path), {"a": name})
    with pytest.raises(CheckpointError, match="outside the directory"):
        check_shards(tmp_path)


def test_a_tensor_the_index_promises_must_be_there(tmp_path: Path) -> None:
    write_index(sharded(tmp_path), {"a": "one.safetensors", "c": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"'c' is in 'two\.safetensors'"):
        check_shards(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path) / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{INDEX}' (is no JSON file|holds a list|is not a safetensors index)"):
        check_shards(tmp_path)


def test_no_weights_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="safetensors only"):
        check_shards(tmp_path)


def test_a_header_of_nonsense_is_refused(tmp_path: Path) -> None:
    body = b'{"a": 7}'
    (tmp_path / SINGLE).write_bytes(len(body).to_bytes(8, "little") + body + b"\0" * 8)
    with pytest.raises(CheckpointError, match="Error while deserializing header"):
        check_shards(tmp_path)
