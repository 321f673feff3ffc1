"""Streamed safetensors are read by the safetensors library as they were written, in one file or several."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quark.checkpoint import destination, shard_writer
from quark.checkpoint.destination import RUN_FILE
from quark.checkpoint.shard_layout import ShardLayout
from quark.checkpoint.shard_writer import ShardWriter
from quark.errors import OutputError, UnsupportedError
from quark.models.hf.shards import DTYPES, check_shards


def on_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def opened(announced: Sequence[Mapping[str, Tensor]], directory: Path, max_shard_bytes: int = 10**9) -> ShardWriter:
    return ShardWriter(ShardLayout.of(announced, max_shard_bytes), directory)


def write_shards(parts: Sequence[Mapping[str, Tensor]], directory: Path, max_shard_bytes: int) -> None:
    with opened([on_meta(part) for part in parts], directory, max_shard_bytes) as writer:
        for part in parts:
            writer.write(part)
        writer.finish()


def weights(directory: Path) -> list[Path]:
    """Return the files with tensors, and their index."""
    return sorted(path for path in directory.iterdir() if path.name != RUN_FILE)


def read(directory: Path) -> dict[str, Tensor]:
    return {n: t for shard in check_shards(directory) for n, t in load_file(shard.path).items()}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 16), dtype=torch.uint8)
    tensor = data.bool() if dtype is torch.bool else data.view(dtype)
    write_shards([{"a": tensor, "scalar": tensor.reshape(-1)[0].clone()}], tmp_path, 10**9)
    back = read(tmp_path)
    assert back["a"].dtype == dtype
    assert torch.equal(back["a"].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert back["scalar"].shape == ()


def test_tensors_that_are_not_contiguous_are_written_in_order(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    write_shards([{"a": tensor}], tmp_path, 10**9)
    assert torch.equal(read(tmp_path)["a"], tensor)


@pytest.mark.parametrize("length", range(1, 9))
def test_data_begin_at_a_multiple_of_eight_bytes(length: int, tmp_path: Path) -> None:
    """The format requires this, so that readers can map tensors."""
    write_shards([{"a" * length: torch.ones(4, dtype=torch.float64)}], tmp_path, 10**9)
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0
    assert (tmp_path / "model.safetensors").stat().st_size == 8 + header + 32


def test_empty_tensors_are_written(tmp_path: Path) -> None:
    write_shards([{"a": torch.zeros(0, 4), "b": torch.ones(2)}], tmp_path, 10**9)
    assert read(tmp_path)["a"].shape == (0, 4)


def test_large_models_are_split_at_parts_with_an_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    write_shards([{n: t} for n, t in tensors.items()], tmp_path, 80)
    names = [p.name for p in weights(tmp_path)]
    assert names[:3] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names[3:] == ["model.safetensors.index.json"]
    back = read(tmp_path)
    assert all(torch.equal(back[n], t) for n, t in tensors.items())


def test_the_index_maps_each_tensor_to_the_file_that_holds_it_and_adds_up_all_bytes(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)} | {"half": torch.ones(3, dtype=torch.float16)}
    write_shards([{n: t} for n, t in tensors.items()], tmp_path, 80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    held = {name: path.name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == held
    assert set(held) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_a_part_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    write_shards([{"a": torch.zeros(100), "b": torch.zeros(100)}, {"c": torch.zeros(1)}], tmp_path, 8)
    assert len(check_shards(tmp_path)) == 2


def test_a_dtype_the_format_has_no_name_for_is_refused_by_tensor(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'a' has the dtype torch\.complex64"):
        write_shards([{"a": torch.zeros(2, dtype=torch.complex64)}], tmp_path, 10**9)


def test_a_disk_that_is_too_small_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        opened([{"a": torch.empty(2**50, dtype=torch.uint8, device="meta")}], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_space_that_its_files_hold_already_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"a": torch.ones(1 << 16)}
    write_shards([part], tmp_path, 10**9)
    full = attrs.make_class("Full", {"free": attrs.field(default=1 << 12)})
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda _: full())
    with opened([on_meta(part)], tmp_path) as writer:
        writer.write(part)
    (tmp_path / "other").mkdir()
    with pytest.raises(OSError, match="No space left"):
        opened([on_meta(part)], tmp_path / "other")


def test_parts_may_come_in_any_order(tmp_path: Path) -> None:
    parts = [{name: torch.full((40,), float(i))} for i, name in enumerate("abc")]
    for name, order in (("forward", parts), ("backward", parts[::-1])):
        (tmp_path / name).mkdir()
        with opened([on_meta(p) for p in parts], tmp_path / name, 200) as writer:
            for p in order:
                writer.write(p)
            writer.finish()
    written = [{f.name: f.read_bytes() for f in weights(tmp_path / name)} for name in ("forward", "backward")]
    assert len(written[0]) == 4
    assert written[0] == written[1]


def test_a_part_that_was_announced_and_not_written_is_no_finished_export(tmp_path: Path) -> None:
    parts = [{name: torch.zeros(4)} for name in "ab"]
    with opened([on_meta(p) for p in parts], tmp_path) as writer:
        writer.write(parts[0])
        with pytest.raises(RuntimeError, match=r"1 announced .* not written: b"):
            writer.finish()


@pytest.mark.posix("Windows lets nobody remove, replace or cut an open file")
@pytest.mark.parametrize("what", ["removed", "replaced", "cut", "linked elsewhere", "given another header"])
def test_a_file_that_is_no_longer_the_one_that_was_written_is_no_finished_export(what: str, tmp_path: Path) -> None:
    with opened([{"a": torch.zeros(4, device="meta")}], tmp_path) as writer:
        writer.write({"a": torch.zeros(4)})
        writer.written()
        path = next(tmp_path.iterdir())
        copy = path.read_bytes()
        if what == "cut":
            os.truncate(path, len(copy) - 1)
        elif what == "given another header":
            path.write_bytes(copy.replace(b'"a"', b'"b"'))
        else:
            path.unlink()
        if what == "replaced":
            path.write_bytes(copy)
        if what == "linked elsewhere":
            (tmp_path / "other").write_bytes(copy)
            path.symlink_to(tmp_path / "other")
        with pytest.raises(OutputError, match=r"model\.safetensors' was removed, replaced or truncated"):
            writer.finish()


def test_a_part_that_is_not_as_announced_is_refused(tmp_path: Path) -> None:
    with opened([{"a": torch.zeros(4, device="meta")}], tmp_path) as writer, pytest.raises(RuntimeError, match="announced"):
        writer.write({"a": torch.zeros(5)})


@pytest.mark.parametrize("limit", [10**9, 80, 1])
def test_sizes_of_files_are_known_before_they_are_written(limit: int, tmp_path: Path) -> None:
    parts = [{f"layers.{i}.weight": torch.ones(10), f"layers.{i}.scale": torch.ones(i, dtype=torch.float16)} for i in range(5)]
    write_shards(parts, tmp_path, limit)
    assert ShardLayout.of([on_meta(p) for p in parts], limit).file_sizes() == {f.name: f.stat().st_size for f in weights(tmp_path)}


def stored(writer: ShardWriter) -> dict[str, str]:
    """Return the checksums of the parts that have been written, once they are on the disk."""
    checksums: Future[Mapping[str, str]] = Future()
    writer.when_stored(checksums.set_result)
    return dict(checksums.result(60))


def test_parts_that_are_written_beside_are_on_the_disk_too_when_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(shard_writer, "sync_data", lambda file: synced.append(os.fstat(file).st_ino))
    tensors = {name: torch.ones(40) for name in "abc"}
    with opened([on_meta({name: t}) for name, t in tensors.items()], tmp_path, 200) as writer:
        synced.clear()  # those of the headers
        writer.write_beside({"a": tensors["a"]})
        writer.write({"c": tensors["c"]})
        assert stored(writer).keys() == {"c"}
        one, two, three = (path.stat().st_ino for path in sorted(tmp_path.iterdir()))
        assert synced == [one, three]
        writer.write({"b": tensors["b"]})
        stored(writer)
    assert synced[2:] == [two]


def test_what_counts_as_written_waits_for_a_part_that_is_written_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, write_at = Event(), shard_writer.write_at

    def write_late(file: int, data: memoryview, offset: int) -> None:
        may_write.wait(60)
        write_at(file, data, offset)

    with opened([on_meta({"a": torch.ones(40)})], tmp_path) as writer, ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(shard_writer, "write_at", write_late)
        writer.write_beside({"a": torch.ones(40)})
        written = thread.submit(writer.written)
        with pytest.raises(TimeoutError):
            written.result(0.2)
        may_write.set()
        assert written.result(60).keys() == {"a"}
        assert torch.equal(writer.read("a"), torch.ones(40))
        writer.finish()


def test_what_goes_wrong_beside_the_others_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space")

    with opened([on_meta({"a": torch.ones(40)})], tmp_path) as writer:
        monkeypatch.setattr(shard_writer, "write_at", fail)
        writer.write_beside({"a": torch.ones(40)})
        with pytest.raises(OSError, match="no space"):
            writer.finish()


def test_files_that_are_opened_again_keep_what_is_in_them(tmp_path: Path) -> None:
    parts = [{name: torch.full((40,), float(i))} for i, name in enumerate("abc")]
    layout = ShardLayout.of([on_meta(p) for p in parts], 200)
    with ShardWriter(layout, tmp_path) as writer:
        assert [path.name for path in sorted(tmp_path.iterdir())] == list(layout.files)
        writer.write(parts[1])
        checksums = stored(writer)
    with ShardWriter(layout, tmp_path) as writer:
        assert writer.adopt(checksums) == []
        assert torch.equal(writer.read("b"), torch.ones(40))
        writer.write(parts[2])
        writer.write(parts[0])
        writer.finish()
    assert {n: float(t[0]) for n, t in read(tmp_path).items()} == {"a": 0, "b": 1, "c": 2}


def test_two_writers_fill_the_same_files(tmp_path: Path) -> None:
    """Processes that share a run do so."""
    parts = [{name: torch.full((40,), float(i))} for i, name in enumerate("abcd")]
    layout = ShardLayout.of([on_meta(p) for p in parts], 350)
    with ShardWriter(layout, tmp_path) as one, ShardWriter(layout, tmp_path) as other:
        for p, writer in zip(parts, (one, other, one, other), strict=True):
            writer.write(p)
        assert one.adopt(stored(other)) == []
        one.finish()
    assert {n: float(t[0]) for n, t in read(tmp_path).items()} == {"a": 0, "b": 1, "c": 2, "d": 3}


def test_what_was_not_adopted_is_missing(tmp_path: Path) -> None:
    with opened([{"a": torch.zeros(4, device="meta")}], tmp_path) as writer:
        assert writer.adopt({"a": "crc32:00000000:16", "b": ""}) == ["a", "b"]
        with pytest.raises(RuntimeError, match="not written: a"):
            writer.finish()


@pytest.mark.parametrize("damage", ["bit", "end", "length"])
def test_a_tensor_that_is_damaged_is_not_adopted(damage: str, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(40.0), "b": torch.ones(3)}
    layout = ShardLayout.of([on_meta(tensors)], 10**9)
    with ShardWriter(layout, tmp_path) as writer:
        writer.write(tensors)
        checksums = stored(writer)
    path = tmp_path / layout.files[0]
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[layout.places["b"].offset + 5] ^= 4
    path.write_bytes(data if damage != "end" else data[:-2])
    if damage == "length":
        checksums["b"] = checksums["b"].replace(":12", ":8")
    with ShardWriter(layout, tmp_path) as writer:
        assert writer.adopt(checksums) == ["b"]


def test_files_of_another_layout_are_made_anew(tmp_path: Path) -> None:
    before = {"a": torch.ones(1000)}
    write_shards([before], tmp_path, 10**9)
    after = {"b": torch.zeros(3)}
    write_shards([after], tmp_path, 10**9)
    assert list(read(tmp_path)) == ["b"]


def test_what_is_called_when_parts_are_stored_gets_each_part_once_and_its_error_is_raised(tmp_path: Path) -> None:
    parts = [{name: torch.ones(4)} for name in "ab"]
    seen: list[list[str]] = []
    with opened([on_meta(p) for p in parts], tmp_path) as writer:
        for p in parts:
            writer.write(p)
            writer.when_stored(lambda checksums: seen.append(list(checksums)))
        writer.finish()
        assert seen == [["a"], ["b"]]

        def fail(_: Mapping[str, str]) -> None:
            raise ZeroDivisionError

        writer.when_stored(fail)
        with pytest.raises(ZeroDivisionError):
            writer.finish()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_read_again_as_it_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 16), dtype=torch.uint8)
    tensors = {"a": data.bool() if dtype is torch.bool else data.view(dtype), "empty": torch.zeros(0, 2, dtype=dtype)}
    with opened([on_meta(tensors)], tmp_path) as writer:
        writer.write(tensors)
        writer.finish()
        for name, tensor in tensors.items():
            again = writer.read(name)
            assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(again.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_part_that_is_written_beside_has_a_checksum_at_the_end_and_none_in_the_journal(tmp_path: Path) -> None:
    parts = [{name: torch.ones(4)} for name in "ab"]
    with opened([on_meta(p) for p in parts], tmp_path) as writer:
        writer.write_beside(parts[1])
        writer.write(parts[0])
        assert list(stored(writer)) == ["a"]
        assert set(writer.written()) == {"a", "b"}
        writer.finish()


def test_the_next_part_is_written_while_the_disk_stores_the_last(tmp_path: Path) -> None:
    parts, is_written = [{name: torch.ones(4)} for name in "abc"], Event()
    with opened([on_meta(p) for p in parts], tmp_path) as writer:
        writer.write(parts[0])
        writer.when_stored(lambda _: None if is_written.wait(60) else pytest.fail("the next part waits for the disk"))
        writer.write(parts[1])
        writer.write(parts[2])
        is_written.set()
        writer.finish()
    assert set(read(tmp_path)) == set("abc")
