"""`quark_exporters.quark_layout.dequantizer`.

The weights of an export are those of the model that is loaded from it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quark.checkpoint import ExportOptions, export_safetensors, import_model_from_safetensors
from quark.checkpoint.export import export_with
from quark.errors import UnsupportedError
from quark.models.hf.dequantizer import DequantizedTensors
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.quantized_source import float_tensors_of
from quark.models.hf.shards import check_shards
from quark.plugins import schemes
from quark.torch import LLMTemplate, ModelQuantizer
from quark_devkit.small_models import fitting_schemes, quantized, run_config
from quark_tiny_model import tiny_model


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [
        ExportOptions(),
        ExportOptions(pack_method="order"),
        ExportOptions(weight_format="fake_quantized"),
    ],
    ids=["codes", "codes in order", "values"],
)
@pytest.mark.parametrize("scheme", fitting_schemes())
def test_the_weights_are_those_of_the_model_that_is_loaded(scheme: str, options: ExportOptions, tmp_path: Path) -> None:
    export_with("safetensors", quantized(run_config(scheme)), tmp_path / "out", options)
    weights = dequantized(tmp_path / "out")
    loaded = import_model_from_safetensors(None, tmp_path / "out", device="cpu").state_dict()
    assert weights
    assert all(torch.equal(weight, loaded[name]) for name, weight in weights.items())


def dequantized(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shards = check_shards(directory)
    float_tensors = float_tensors_of(directory, shards) or []
    with DequantizedTensors(FileTensors(shards), float_tensors, directory).reading(torch.device("cpu")) as read:
        return {one.name: read(one.name, dtype) for one in float_tensors}


@pytest.mark.parametrize(  # floats have no zero points: nothing may change
    "scheme", [pytest.param(name, marks=() if "int" in name else pytest.mark.slow) for name in fitting_schemes()]
)
def test_zero_points_that_are_not_stored_are_0(scheme: str, tmp_path: Path) -> None:
    model = quantized(run_config(scheme))
    for stores in (True, False):
        export_with("safetensors", model, tmp_path / f"{stores}", ExportOptions(zero_points=stores))
    expected, weights = dequantized(tmp_path / "True"), dequantized(tmp_path / "False")
    assert expected.keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in expected.items())


def test_every_scheme_that_is_stored_fits_the_small_model() -> None:
    assert set(fitting_schemes()) <= set(schemes().names())


def test_an_export_whose_rotations_run_with_the_model_is_refused(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(
        scheme="int4_wo_64", algorithm="rotation", algorithm_options={"rotation": {"r1": False, "r4": True}}
    )
    export_safetensors(ModelQuantizer(config).quantize_model(tiny_model()), tmp_path / "out")
    with pytest.raises(UnsupportedError, match="rotation runs with the model of this checkpoint"):
        float_tensors_of(tmp_path / "out", check_shards(tmp_path / "out"))
