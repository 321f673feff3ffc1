"""Reading a damaged export ends in an error that names it, or in the model that was exported."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quark.checkpoint import export_safetensors, import_model_from_safetensors
from quark.checkpoint.inspection import inspect_checkpoint
from quark.config.model import QConfig
from quark.errors import CheckpointError, ConfigError, UnknownNameError, UnsupportedError
from quark.torch import LLMTemplate, ModelQuantizer

IDS = torch.arange(1, 17)[None]
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
FIXED = {"vocab_size": 32, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def exported(out: Path, scheme: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, **FIXED), dtype=torch.float32).eval()
    config = LLMTemplate.get("llama").get_config(scheme=scheme)
    export_safetensors(ModelQuantizer(config).quantize_model(model, [IDS]), out)
    return out


@torch.no_grad()
def logits(directory: Path) -> Tensor:
    found: Tensor = import_model_from_safetensors(None, directory)(IDS).logits
    return found


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("export") / "out", "int4_wo_32")


@pytest.fixture(scope="module")
def expected(export: Path) -> Tensor:
    return logits(export)


def refused_or_the_same(directory: Path, expected: Tensor) -> bool:
    """Return whether the export was read; if so, check that it gives the same model."""
    try:
        found = logits(directory)
    except (CheckpointError, UnknownNameError, UnsupportedError) as error:
        assert str(directory) in str(error)  # noqa: PT017 - of any of them
        return False
    assert torch.equal(found, expected)
    return True


def with_header(export: Path, out: Path, change: Callable[[bytearray], None]) -> Path:
    """A copy whose header, with the eight bytes of its length before it, is changed."""
    shutil.copytree(export, out, dirs_exist_ok=True)
    shard = out / "model.safetensors"
    data = bytearray(shard.read_bytes())
    change(data)
    shard.write_bytes(data)
    return out


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_changed_byte_of_the_header_is_refused_or_harmless(
    share: float, byte: int, export: Path, expected: Tensor, tmp_path: Path
) -> None:
    def change(data: bytearray) -> None:
        data[int(share * (8 + int.from_bytes(data[:8], "little")))] = byte

    refused_or_the_same(with_header(export, tmp_path / "out", change), expected)


@pytest.mark.parametrize(("name", "old", "new"), [(f"{Q_PROJ}.weight_scale", b"F32", b"I32"), (f"{Q_PROJ}.weight", b"I32", b"F32")])
def test_numbers_that_are_read_as_codes_and_the_other_way_round_are_refused(
    name: str, old: bytes, new: bytes, export: Path, tmp_path: Path
) -> None:
    def change(data: bytearray) -> None:
        at = data.index(old, data.index(f'"{name}"'.encode()))
        data[at : at + len(old)] = new

    with pytest.raises(CheckpointError, match=rf"'{name}' in .* has the dtype torch\.(int32|float32) instead of"):
        logits(with_header(export, tmp_path / "out", change))


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in ((*at, key), *places(inner, (*at, key)))]


def put(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data(), value=VALUES)
def test_a_wrong_value_in_the_quantization_config_is_refused_or_harmless(
    choice: st.DataObject, value: Any, export: Path, expected: Tensor, tmp_path: Path
) -> None:
    shutil.copytree(export, tmp_path, dirs_exist_ok=True)
    data = json.loads((export / "config.json").read_text())
    put(data["quantization_config"], choice.draw(st.sampled_from(places(data["quantization_config"]))), value)
    (tmp_path / "config.json").write_text(json.dumps(data))
    refused_or_the_same(tmp_path, expected)


@settings(max_examples=200)
@given(choice=st.data(), value=VALUES)
def test_a_wrong_value_in_the_json_of_a_configuration_is_a_config_error(choice: st.DataObject, value: Any) -> None:
    data = LLMTemplate.get("llama").get_config(scheme="fp8", kv_cache_scheme="fp8", algorithm="gptq").to_dict()
    put(data, choice.draw(st.sampled_from(places(data))), value)
    try:
        QConfig.from_dict(data)
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - what is asserted is that nothing else is raised


def with_tensor(export: Path, out: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    shutil.copytree(export, out)
    tensors = load_file(out / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def first_is(value: float) -> Callable[[Tensor], Tensor]:
    return lambda scales: torch.where(torch.arange(scales.numel()).view_as(scales) == 0, value, scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_scales_of_weights_that_none_can_be_are_refused(value: float, export: Path, tmp_path: Path) -> None:
    damaged = with_tensor(export, tmp_path / "out", f"{Q_PROJ}.weight_scale", first_is(value))
    with pytest.raises(CheckpointError, match=rf"{damaged}.* 1 of 32 scale\(s\) of the weight of '{Q_PROJ}' are NaN, infinite or negative"):
        logits(damaged)


def test_scales_of_weights_that_are_zero_are_told(export: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = with_tensor(export, tmp_path / "out", f"{Q_PROJ}.weight_scale", first_is(0.0))
    model = import_model_from_safetensors(None, damaged)
    assert f"1 of 32 scale(s) of the weight of '{Q_PROJ}' are 0" in caplog.text
    assert model.get_submodule(Q_PROJ).weight[0].count_nonzero() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_scales_of_inputs_that_none_can_be_are_refused(value: float, tmp_path: Path) -> None:
    damaged = with_tensor(exported(tmp_path / "fp8", "fp8"), tmp_path / "out", f"{Q_PROJ}.input_scale", first_is(value))
    with pytest.raises(CheckpointError, match=rf"1 of 1 scale\(s\) of the input of '{Q_PROJ}'"):
        logits(damaged)


@pytest.mark.parametrize(
    "key_value", [("group_size", 2048), ("group_size", 10**30), ("scale_calculation_mode", "x"), ("scale_format", "x")]
)
def test_settings_of_inputs_that_fit_no_layer_are_refused_when_the_export_is_read(key_value: tuple[str, Any], tmp_path: Path) -> None:
    directory = exported(tmp_path / "out", "mxfp4")
    data = json.loads((directory / "config.json").read_text())
    put(data["quantization_config"]["global_quant_config"]["input_tensors"], key_value[:1], key_value[1])
    (directory / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="cannot be quantized as asked"):
        import_model_from_safetensors(None, directory)


def test_layers_without_elements_are_refused(export: Path, tmp_path: Path) -> None:
    shutil.copytree(export, tmp_path, dirs_exist_ok=True)
    data = json.loads((export / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"intermediate_size": 0}))
    with pytest.raises(CheckpointError, match=r"have weights without elements: model\.layers\.0\.mlp\.gate_proj"):
        import_model_from_safetensors(None, tmp_path)


def test_a_model_on_the_meta_device_is_refused_where_a_checkpoint_lacks_its_buffers(export: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, **FIXED))
    with pytest.raises(
        ValueError,
        match=r"meta device, but no checkpoint holds the values of its model\.rotary_emb.*Build it on the CPU, or give model=None",
    ):
        import_model_from_safetensors(model, export)


@pytest.mark.parametrize("read", [inspect_checkpoint, partial(import_model_from_safetensors, None)])
def test_a_layout_of_a_format_that_is_not_read_here_is_refused_with_the_name_of_the_checkpoint(read: Any, tmp_path: Path) -> None:
    directory = exported(tmp_path / "out", "mxfp4")
    data = json.loads((directory / "config.json").read_text())
    for entry in data["quantization_config"]["plugins"]["formats"].values():
        entry["layout_version"] = -1
    (directory / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=rf"the checkpoint '{re.escape(str(directory))}' holds the format .* in layout -1"):
        read(directory)
