"""Number formats of four methods are planned, rounded by every algorithm, stored and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quark.numbers import number_format, quantizer_for
from quark.plugins import algorithms
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model

pytestmark = pytest.mark.usefixtures("third_party")
SCHEME = "third_powers_g32"
TERNARY = "third_ternary_g32"
ALGORITHMS = algorithms().names()
METHODS = {"max_magnitude", "round_", "encode", "decode"}


def test_the_format_has_four_methods() -> None:
    assert {name for name, value in vars(type(number_format("third_powers"))).items() if callable(value)} == METHODS


def test_values_are_the_nearest_and_halfway_the_even_code() -> None:
    t = torch.tensor([0.5, 0.51, 1.49, 1.5, 3.0, 3.01, 99.0, -1.5, torch.nan])
    values = number_format("third_powers").round_(t)
    assert values[:-1].tolist() == [0, 1, 1, 2, 2, 4, 4, -2]
    assert values[-1].isnan()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("scheme", "algorithm"), [(SCHEME, None), (SCHEME, "gptq"), (TERNARY, None), *((TERNARY, a) for a in ALGORITHMS)])
def test_a_model_is_exported_and_reads_back_to_the_bit(scheme: str, algorithm: str | None, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=algorithm)
    tokens = calibration_batches(2, 32)
    model = ModelQuantizer(config).quantize_model(tiny_model(blocks=1), tokens)
    export_safetensors(model, tmp_path / "out")
    loaded = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    with torch.no_grad():
        assert torch.equal(loaded(tokens[0]).logits, model(tokens[0]).logits)
    weight = loaded.get_submodule("model.layers.0.mlp.up_proj").weight
    assert torch.equal(weight, model.get_submodule("model.layers.0.mlp.up_proj").weight)


def test_specs_that_need_more_than_the_defaults_are_refused_with_the_fix() -> None:
    spec = LLMTemplate.get("llama").get_config(scheme=SCHEME).global_quant_config.weight
    cases = {
        "has no zero point": {"symmetric": False},
        "Leave out scale_format": {"scale_format": "e4m3"},
        "Leave out scale_calculation_mode": {"scale_calculation_mode": "even"},
        "Leave out round_method": {"round_method": "floor"},
        "needs is_dynamic": {"is_dynamic": None},
    }
    for words, changes in cases.items():
        assert words in (quantizer_for(spec.set(**changes), activation=False).shape_error((8, 64)) or "")
