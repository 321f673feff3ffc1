"""The identity of a run tells it from every other run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quark.calibration.batches import Call
from quark.checkpoint.destination import RUN_FILE
from quark.checkpoint.exporter import ExportOptions
from quark.errors import CheckpointError, OutputError
from quark.runs.from_disk import opened_checkpoint
from quark.runs.identity import RunIdentity, _identity_of_data, _identity_of_source, differences, is_finished_run
from quark.runs.run import plan_run
from quark.torch import LLMTemplate
from quark.torch.quantization.weight_convert import Chunk, Transpose, WeightConverter
from quark_tiny_model import tiny_model_dir

LEAVES = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(value=st.dictionaries(st.text(), VALUES))
def test_nothing_differs_from_itself(value: dict[str, Any]) -> None:
    assert differences(value, value) == []


def test_each_value_that_differs_is_named_with_both_values() -> None:
    before = {"a": {"b": [1, 2], "gone": None}, "same": 1}
    now = {"a": {"b": [1, 3, 4]}, "same": 1}
    assert differences(before, now) == [
        "a.b.1 was 2 and is 3",
        "a.gone was None and is not there",
        "a.b.2 was not there and is 4",
    ]


TOKENS = torch.arange(6)[None]
OTHERS = {
    "a value": [Call((TOKENS + 1,))],
    "a shape": [Call((TOKENS.reshape(2, 3),))],
    "a dtype": [Call((TOKENS.float(),))],
    "a name": [Call((), {"input_ids": TOKENS})],
    "more": [Call((TOKENS,)), Call((TOKENS,))],
    "a plain argument": [Call((TOKENS,), {"flag": True})],
}


@pytest.mark.parametrize("other", OTHERS)
def test_data_that_differ_in_anything_have_another_digest(other: str) -> None:
    assert _identity_of_data(OTHERS[other]) != _identity_of_data([Call((TOKENS,))])
    assert _identity_of_data([Call((TOKENS.clone(),))]) == _identity_of_data([Call((TOKENS,))])


def test_the_strides_of_data_do_not_count() -> None:
    assert _identity_of_data([Call((TOKENS.expand(2, 6),))]) == _identity_of_data([Call((TOKENS.repeat(2, 1),))])


def identity(**changes: Any) -> RunIdentity:
    """Return the identity of a run on the tiny checkpoint, with some arguments changed."""
    scheme, algorithm = changes.pop("scheme", "int4_wo_32"), changes.pop("algorithm", None)
    shards, tensors = opened_checkpoint(tiny_model_dir(), dtype=changes.pop("dtype", "auto"))
    plan = plan_run(tensors.model, LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=algorithm)).plan
    settings: dict[str, Any] = {
        "data": [Call((TOKENS,))],
        "exporter": "safetensors",
        "options": ExportOptions(),
        "converters": [],
        "device": torch.device("cpu"),
        "is_deterministic": False,
    }
    return RunIdentity.of(tensors.model, plan, shards, **(settings | changes))


CONVERTER = WeightConverter("gate_up_proj.weight", ["gate_proj.weight", "up_proj.weight"], operations=[Chunk(dim=0)])
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "scheme": ({"scheme": "int4_wo_64"}, "settings.configuration."),
    "algorithm": ({"algorithm": ["gptq"]}, "settings.configuration."),
    "dtype": ({"dtype": "float16"}, "settings.dtype "),
    "data": ({"data": [Call((TOKENS + 1,))]}, "data.digest "),
    "number of calls": ({"data": [Call((TOKENS,))] * 2}, "data.calls "),
    "exporter": ({"exporter": "fp8"}, "settings.exporter "),
    "common option": ({"options": ExportOptions(pack_method="order")}, "settings.exporter options.pack_method "),
    "size of shards": ({"options": ExportOptions(max_shard_bytes=1 << 20)}, "settings.exporter options.max_shard_bytes "),
    "zero points": ({"options": ExportOptions(zero_points=False)}, "settings.exporter options.zero_points "),
    "own option": ({"options": ExportOptions(own={"custom": 3})}, "settings.exporter options.custom "),
    "converter": ({"converters": [CONVERTER]}, "settings.weight converters."),
    "device": ({"device": torch.device("meta")}, "settings.device "),
    "order of sums": ({"is_deterministic": True}, "settings.deterministic "),
}


def test_settings_of_a_converters_operation_belong_to_the_run() -> None:
    by_rows, by_columns = (WeightConverter("w", "w", operations=[Transpose(*dims)]) for dims in ((0, 1), (1, 2)))
    one, other = (attrs.asdict(identity(converters=[converter])) for converter in (by_rows, by_columns))
    places = [line.partition(":")[0].rpartition(" ")[0] for line in differences(one, other)]
    assert [place.startswith("settings.weight converters.0.2.0.1.dim") for place in places] == [True, True]


@pytest.mark.parametrize("change", CHANGES)
def test_each_setting_is_a_part_of_the_identity_under_its_name(change: str) -> None:
    changes, name = CHANGES[change]
    found = differences(attrs.asdict(identity()), attrs.asdict(identity(**changes)))
    assert any(line.startswith(name) for line in found), found


def test_what_changes_no_tensor_is_no_part_of_the_identity() -> None:
    assert identity() == identity(options=ExportOptions(overwrite=True, tokenizer=None))


def test_a_source_with_other_weights_or_another_configuration_is_another_run(tmp_path: Path) -> None:
    one, other, edited = (Path(shutil.copytree(tiny_model_dir(), tmp_path / name)) for name in ("one", "other", "edited"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    (edited / "config.json").write_text((edited / "config.json").read_text() + " ")
    first = identity_of_source(one)
    assert identity_of_source(one) == first
    assert set(identity_of_source(other)) == set(first)
    assert [name for name in first if identity_of_source(other)[name] != first[name]] == ["model.safetensors"]
    assert identity_of_source(other)["model.safetensors"]["bytes"] == first["model.safetensors"]["bytes"]
    assert [name for name in first if identity_of_source(edited)[name] != first[name]] == ["config.json"]


@pytest.mark.parametrize("place", [0, 1 / 4, 1 / 2, 3 / 4, 1])
def test_a_piece_of_a_large_file_that_changes_anywhere_makes_another_source(place: float, tmp_path: Path) -> None:
    one, other = (Path(shutil.copytree(tiny_model_dir(), tmp_path / name)) for name in ("one", "other"))
    tensors = {**load_file(one / "model.safetensors"), "more": torch.zeros(3 << 20, dtype=torch.uint8)}
    for directory in (one, other):
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    path = other / "model.safetensors"
    data, changed = bytearray(path.read_bytes()), 1 << 18
    header = 8 + int.from_bytes(data[:8], "little")
    begin = header + int(place * (len(data) - header - changed))
    data[begin : begin + changed] = bytes(255 - byte for byte in data[begin : begin + changed])
    path.write_bytes(data)
    before, now = identity_of_source(one), identity_of_source(other)
    assert [name for name in before if now[name] != before[name]] == ["model.safetensors"]
    assert now["model.safetensors"]["header"] == before["model.safetensors"]["header"]


def identity_of_source(directory: Path) -> dict[str, Any]:
    return _identity_of_source(opened_checkpoint(directory)[0])


IDENTITY = RunIdentity({"dtype": "torch.float32"}, {"torch": "2.0"}, {"config.json": "ab"}, {"calls": 2})


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from(["format", "run", "files", "more"]), VALUES | st.just(attrs.asdict(IDENTITY))))
def test_a_crafted_file_of_a_finished_run_is_read_or_refused(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(json.dumps(values))
    for overwrite in (False, True):
        try:
            assert is_finished_run(tmp_path, IDENTITY, overwrite=overwrite) in (False, True)
        except (OutputError, CheckpointError):
            continue
