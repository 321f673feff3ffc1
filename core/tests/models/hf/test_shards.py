"""Damaged checkpoints are refused before anything is read from them."""

import json
import math
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quark.errors import CheckpointError
from quark.models.hf.shards import INDEX, SINGLE, check_shards, refuse_codes


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


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", "", "/", "one.safetensors/"])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    write_index(sharded(tmp_path), {"a": name})
    with pytest.raises(CheckpointError, match="no file of the directory"):
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


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"b": torch.ones(4, dtype=torch.bfloat16), "a": torch.zeros(2, 3)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' twice, in 'one\.safetensors' and in 'two\.safetensors'"):
        check_shards(tmp_path)


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    names = {f"model.layers.{i}.weight": torch.ones(1) for i in range(3)}
    save_file({"b": torch.ones(4), **names}, sharded(tmp_path) / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors' has 3 tensor.*does not list: model\.layers\.\{0-2\}\.weight"):
        check_shards(tmp_path)


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, sharded(tmp_path) / SINGLE)
    with pytest.raises(CheckpointError, match="some readers use one, some the other"):
        check_shards(tmp_path)


def test_an_index_that_names_the_single_file_is_one_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / SINGLE)
    write_index(tmp_path, {"a": SINGLE})
    assert [s.path.name for s in check_shards(tmp_path)] == [SINGLE]


def write_header(file: Path, header: bytes, data: bytes = b"\0" * 8) -> Path:
    padded = header + b" " * (-len(header) % 8)
    file.write_bytes(len(padded).to_bytes(8, "little") + padded + data)
    return file


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


HEADERS = {
    "deep lists": b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a million empty lists": b'{"a": [' + b",".join([b"[]"] * 1_000_000) + b"]}",
    "a million empty objects": b'{"a": [' + b",".join([b"{}"] * 1_000_000) + b"]}",
    "deep lists in the metadata": b'{"__metadata__": {"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}",
    "a list": b"[]",
    "no UTF-8": b'{"\xff": 1}',
    "offsets beyond the file": entry(offsets=(0, 80)),
    "offsets before the file": entry(offsets=(-8, 0)),
    "offsets the wrong way round": entry(offsets=(8, 0)),
    "no offsets": entry(offsets=()),
    "a shape that does not fit the data": entry(shape=(3,)),
    "a shape that overflows": entry(shape=(2**62, 2**62)),
    "a negative shape": entry(shape=(-2,)),
    "a dtype that is none": entry(dtype="F33"),
    "bytes that belong to no tensor": entry(shape=(1,), offsets=(4, 8)),
    "overlapping tensors": b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [1], '
    b'"data_offsets": [4, 8]}}',
    "a name twice": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", "shape": [1], '
    b'"data_offsets": [4, 8]}}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_is_none_is_refused_and_its_file_named(case: str, tmp_path: Path) -> None:
    file = write_header(tmp_path / SINGLE, HEADERS[case])
    with pytest.raises(CheckpointError, match=str(file)):
        check_shards(tmp_path)


def test_a_header_that_claims_the_whole_file_is_refused_without_being_read(tmp_path: Path) -> None:
    with (tmp_path / SINGLE).open("wb") as sparse:
        sparse.write((1 << 40).to_bytes(8, "little"))
        sparse.truncate(1 << 41)
    with pytest.raises(CheckpointError, match=SINGLE):
        check_shards(tmp_path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.lists(st.integers(0, 3), max_size=3), offsets=st.lists(st.integers(0, 70), min_size=2, max_size=2))
def test_shapes_that_are_accepted_fill_the_file(shape: list[int], offsets: list[int], tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE, entry(shape=shape, offsets=offsets), b"\0" * 24)
    try:
        check_shards(tmp_path)
    except CheckpointError:
        return
    assert offsets == [0, 24]
    assert math.prod(shape) * 4 == 24


@pytest.mark.parametrize("value", [b"[]", b"{}", b'{"":0}'])
def test_a_header_of_millions_of_values_is_refused_before_it_is_parsed(
    value: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(*_: object, **__: object) -> None:
        raise AssertionError("a parser keeps every value")

    monkeypatch.setattr("quark.models.hf.shards.safe_open", parsed)
    write_header(tmp_path / SINGLE, b'{"a": [' + b",".join([value] * 4_100_000) + b"]}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors' may have [0-9,]+ values, and the limit is 4,000,000"):
        check_shards(tmp_path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.binary(max_size=80), length=st.none() | st.integers(0, 2**64 - 1))
def test_any_bytes_give_a_header_or_a_checkpoint_error(header: bytes, length: int | None, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header)
    with suppress(CheckpointError):
        assert [s.path.name for s in check_shards(tmp_path)] == [SINGLE]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), JSON | st.sampled_from(["F32", [2], [0, 8]]))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), ENTRIES | JSON))
def test_any_object_gives_a_header_that_fills_the_file_or_a_checkpoint_error(header: dict[str, object], tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE, json.dumps(header).encode(), b"\0" * 8)
    with suppress(CheckpointError):
        (shard,) = check_shards(tmp_path)
        assert shard.tensors.keys() <= header.keys()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weight_map=st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON | st.sampled_from(["one.safetensors", "two.safetensors"])) | JSON)
@example(weight_map={"a": "\0"})  # Python 3.13 raises another error for it
def test_any_index_gives_files_of_the_directory_or_a_checkpoint_error(weight_map: object, tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with suppress(CheckpointError):
        shards = check_shards(tmp_path)
        assert {s.path.parent for s in shards} == {tmp_path}
        assert weight_map == {name: s.path.name for s in shards for name in s.tensors}


@pytest.mark.posix("links are allowed to few users of Windows")
def test_a_cache_of_links_is_read(tmp_path: Path) -> None:
    """A cache of models has links in the directory of a revision, and the files elsewhere."""
    store, revision = tmp_path / "models--m" / "blobs", tmp_path / "models--m" / "snapshots" / "abc"
    store.mkdir(parents=True)
    revision.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, store / "0123")
    (revision / SINGLE).symlink_to("../../blobs/0123")
    assert [s.path for s in check_shards(revision)] == [revision / SINGLE]


@pytest.mark.posix("links are allowed to few users of Windows")
@pytest.mark.parametrize("target", ["/dev/zero", "/", "nowhere", SINGLE])
def test_a_link_to_what_is_no_file_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).symlink_to(target)
    with pytest.raises(CheckpointError):
        check_shards(tmp_path)


def test_codes_of_a_checkpoint_that_does_not_say_what_they_mean_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="'b' as F8_E4M3"):
        refuse_codes(check_shards(tmp_path), tmp_path)


def test_wide_floats_are_no_codes(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    save_file({str(dtype): torch.ones(2, dtype=dtype) for dtype in dtypes}, tmp_path / SINGLE)
    refuse_codes(check_shards(tmp_path), tmp_path)
