"""Whatever bytes an export holds, reading it ends in a model or in a CheckpointError, never in anything else."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quark.errors import CheckpointError
from quark.export import export_safetensors, import_model_from_safetensors
from quark.export.reader import read_quantization_config
from quark.testing.tiny import tiny_model
from quark.torch import LLMTemplate, ModelQuantizer


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "out"
    export_safetensors(ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="int4_wo_64")).quantize_model(tiny_model()), out)
    return out


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(8, 3000), byte=st.integers(0, 255))
def test_a_flipped_byte_of_the_header_is_refused_or_harmless(where: int, byte: int, export: Path, tmp_path: Path) -> None:
    shutil.copytree(export, tmp_path / "out", dirs_exist_ok=True)
    shard = tmp_path / "out" / "model.safetensors"
    with shard.open("r+b") as file:
        file.seek(where)
        file.write(bytes([byte]))
    with suppress(CheckpointError):
        import_model_from_safetensors(None, tmp_path / "out")


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
KEYS = [
    "global_quant_config",
    "layer_quant_config",
    "layer_type_quant_config",
    "exclude",
    "kv_cache_quant_config",
    "export",
    "quant_method",
]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), value=SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2))
def test_a_wrong_value_in_the_config_is_refused_or_harmless(key: str, value: Any, export: Path, tmp_path: Path) -> None:
    data = json.loads((export / "config.json").read_text())
    data["quantization_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(data))
    with suppress(CheckpointError):
        read_quantization_config(tmp_path)
