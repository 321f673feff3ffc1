"""Integers of every round method, and with a zero point in the middle, from memory to disk and back."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.checkpoint import ExportOptions
from quark.checkpoint.export import export_with
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import tiny_model

from .test_export_reload import config_of, logits

TENSOR: dict[str, object] = {"qscheme": "per_tensor"}
GROUP: dict[str, object] = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32}
SPECS: dict[str, dict[str, object]] = {
    f"{dtype} {method} {shape['qscheme']}": {"dtype": dtype, "round_method": method, "symmetric": symmetric, **shape}
    for dtype, symmetric in (("int8", True), ("uint4", False), ("int3", True))
    for method in ("floor", "round")
    for shape in (TENSOR, GROUP)
} | {
    "groups of rows": {"dtype": "uint4", "symmetric": False, "qscheme": "per_group", "ch_axis": 0, "group_size": 32},
    "powers of two": {"dtype": "uint8", "observer_cls": "PerTensorPowOf2MinMaxObserver", "symmetric": True, **TENSOR},
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_integers_reload_as_they_were_asked_for(spec: dict[str, object], tmp_path: Path) -> None:
    layer = QLayerConfig(weight=QTensorConfig(is_dynamic=False, **spec))
    model = ModelQuantizer(QConfig(global_quant_config=layer, exclude=["lm_head"])).quantize_model(tiny_model(blocks=1))
    export_safetensors(model, tmp_path / "out")
    written = config_of(tmp_path / "out")["global_quant_config"]["weight"]
    assert (written["symmetric"], written["round_method"]) == (spec["symmetric"], spec.get("round_method"))
    assert "observer_options" not in written
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")), logits(model))


def test_groups_of_rows_are_in_no_layout_of_other_readers(tmp_path: Path) -> None:
    layer = QLayerConfig(weight=QTensorConfig(is_dynamic=False, **SPECS["groups of rows"]))
    model = ModelQuantizer(QConfig(global_quant_config=layer, exclude=["lm_head"])).quantize_model(tiny_model(blocks=1))
    for layout in ("awq", "compressed_tensors", "gguf"):
        with pytest.raises(UnsupportedError, match=r"input channels|PerGroupOfRows"):
            export_with(layout, model, tmp_path / layout, ExportOptions())
