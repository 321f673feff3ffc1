"""A granularity unknown to core is planned, described, rounded by every algorithm and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from third_party.strided import Strided

from quark.config.describe import describe_spec, effective_bits
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers import PerGroup, quantizer_for
from quark.plugins import Catalog
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model
from quark_workbench.cli.installed import record_report

pytestmark = pytest.mark.usefixtures("third_party")
SCHEME = "third_strided_g32"
LAYER = "model.layers.0.mlp.up_proj"


def spec() -> QTensorConfig:
    return LLMTemplate.get("llama").get_config(scheme=SCHEME).global_quant_config.weight


def test_rows_and_scales_lead_back() -> None:
    x, strided = torch.arange(24.0).reshape(3, 8), Strided(4)
    assert strided.rows(x)[1].tolist() == [1, 3, 5, 7]
    assert torch.equal(strided.restore(strided.rows(x), (3, 8)), x)
    scale = torch.arange(6.0).reshape(strided.scale_shape((3, 8)))
    expanded = strided.expand_scale(scale, (3, 8))
    assert all(torch.equal(strided.rows(expanded)[i], scale.reshape(-1)[i].expand(4)) for i in range(6))
    assert torch.equal(strided.reduce_scale(expanded, (3, 8)), scale)


def test_a_spec_gets_the_granularity_of_its_format_and_keeps_it_in_json() -> None:
    assert quantizer_for(spec(), activation=False).granularity == Strided(32)
    assert QTensorConfig.from_dict(json.loads(json.dumps(spec().to_dict()))) == spec()
    assert quantizer_for(spec().set(qscheme="per_group", ch_axis=-1), activation=False).granularity == PerGroup(32)


def test_it_is_described_by_its_name_and_size() -> None:
    assert describe_spec(spec()) == "third_strided/third-party.strided 32"
    assert effective_bits(spec(), lambda name: 8) == 8 + 32 / 32


def test_a_format_without_it_refuses_the_spec() -> None:
    with pytest.raises(ConfigError, match=r"third_powers has no qscheme 'third-party\.strided'. Use per_tensor, per_channel"):
        quantizer_for(spec().set(dtype="third_powers"), activation=False)


def test_a_misspelt_qscheme_is_no_format_s_own() -> None:
    with pytest.raises(
        ConfigError, match=r"no member 'per_grop'; did you mean 'per_group'\?.*; a number format's granularity is named 'vendor\.name'"
    ):
        spec().set(qscheme="per_grop")


def test_the_format_s_own_capability_is_listed(third_party: Catalog) -> None:
    assert record_report(third_party, "formats", "third_strided")["entry"]["capabilities"] == ["third-party.strided_scales"]


@pytest.mark.parametrize("algorithm", [None, "gptq", "qronos", "awq", ["awq", "gptq"]], ids=str)
def test_a_model_is_exported_and_reads_back_to_the_bit(algorithm: str | list[str] | None, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme=SCHEME, algorithm=algorithm)
    tokens = calibration_batches(4, 64)
    model: Any = ModelQuantizer(config).quantize_model(tiny_model(blocks=1), tokens)
    layer = model.get_submodule(LAYER)
    assert layer.weight_quantizer.qparams.scale.shape == (layer.weight.shape[0], layer.weight.shape[1] // 32)
    export_safetensors(model, tmp_path / "out")
    loaded: Any = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    with torch.no_grad():
        assert torch.equal(loaded(tokens[0]).logits, model(tokens[0]).logits)


def test_gptq_comes_nearer_to_the_float_model_than_round_to_nearest() -> None:
    def logits(algorithm: str | None) -> torch.Tensor:
        config = LLMTemplate.get("llama").get_config(scheme=SCHEME, algorithm=algorithm)
        model: Any = ModelQuantizer(config).quantize_model(tiny_model(blocks=1), calibration_batches(6, 64))
        return model(calibration_batches(6, 64)[-1]).logits  # type: ignore[no-any-return]

    with torch.no_grad():
        expected = tiny_model(blocks=1)(calibration_batches(6, 64)[-1]).logits
        nearest, calibrated = (float((logits(algorithm) - expected).norm()) for algorithm in (None, "gptq"))
    assert calibrated < nearest
