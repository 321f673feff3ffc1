"""Reading any JSON file of a checkpoint soon gives an object, or a CheckpointError that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quark.errors import CheckpointError
from quark.models.hf import json_files
from quark.models.hf.json_files import bounded_bytes, read_json

DAMAGED = {
    "nothing": b"",
    "half": b'{"a": [1, 2',
    "no UTF-8": b'{"a": "\xff"}',
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a number of too many digits": b'{"a": ' + b"7" * 10_000 + b"}",
    "many empty lists": b'{"a": [' + b",".join([b"[]"] * 2_100_000) + b"]}",
    "many empty objects": b'{"a": [' + b",".join([b"{}"] * 2_100_000) + b"]}",
    "many numbers": b'{"a": [' + b"1," * 4_100_000 + b"1]}",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(case: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(DAMAGED[case])
    with pytest.raises(CheckpointError, match=str(file)):
        read_json(file)


def test_a_file_that_is_not_there_or_is_a_directory_is_named(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "nowhere.json"):
        with pytest.raises(CheckpointError, match=str(file)):
            read_json(file)


def test_a_file_that_is_too_large_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as sparse:
        sparse.truncate(json_files.LARGEST_FILE + 1)
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(CheckpointError, match="at most 100,000,000 are read"):
        bounded_bytes(file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.dictionaries(st.text(), JSON, max_size=4), ascii_only=st.booleans())
def test_every_object_is_read_as_it_was_written(value: dict[str, Any], ascii_only: bool, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
    assert read_json(tmp_path / "a.json") == value


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=40) | st.text(alphabet='{}[],:"01e-\\u ', max_size=40).map(str.encode))
def test_any_bytes_give_an_object_or_a_checkpoint_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(data)
    said = str(tmp_path / "a.json")
    try:
        found = read_json(tmp_path / "a.json")
    except CheckpointError as error:
        found, said = {}, str(error)
    assert isinstance(found, dict)
    assert str(tmp_path / "a.json") in said
