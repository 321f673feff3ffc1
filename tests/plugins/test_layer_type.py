"""A third party's layer type is planned, quantized, rounded, exported and read back like core's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from third_party.layers import GainedTranspose, Gated, QuantGainedTranspose, QuantGated, QuantScaledEmbedding, ScaledEmbedding
from torch import nn

import quark
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.layers import counts_as
from quark.models.plan.quant_plan import make_plan
from quark.plugins import Catalog, LayerTypeRecord, Source, documented_object, hookimpl, using
from quark.plugins.discovery import discover
from quark.runs import ModelQuantizer
from quark.torch import export_safetensors, import_model_from_safetensors


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = Gated(64, 96), nn.GELU(), Gated(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


DATA = list(torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1)))


def config(scheme: str = "int4_wo_32", **more: object) -> QConfig:
    return QConfig(global_quant_config=quark.schemes().load_config(scheme)(), **more)


def test_it_stays_float_where_nobody_registers_it() -> None:
    assert counts_as(Gated(4, 4)) is None


def test_it_is_planned_as_a_linear_layer(third_party: Catalog) -> None:
    plan = ModelQuantizer(config()).plan(Model())
    assert [(row.name, row.layer_type, row.shape) for row in plan.quantized] == [("up", "linear", (96, 64)), ("down", "linear", (64, 96))]


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4_weight_only"])
def test_it_is_quantized_exported_and_read_back_to_the_same_outputs(third_party: Catalog, scheme: str, tmp_path: Path) -> None:
    model = ModelQuantizer(config(scheme)).quantize_model(Model(), DATA)
    assert isinstance(model.up, QuantGated)
    assert not torch.equal(model(DATA[0]), Model()(DATA[0]))
    export_safetensors(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {"up.gain", "up.offset", "up.bias", "up.weight", "up.weight_scale"} <= set(stored)
    again = Model()
    for name in ("up", "down"):
        again.get_submodule(name).gain.data.fill_(torch.nan)  # what is read, and not what the model brings, must count
        again.get_submodule(name).offset.fill_(torch.nan)
    again = import_model_from_safetensors(again, tmp_path / "out", device="cpu")
    assert isinstance(again.up, QuantGated)
    assert torch.equal(again(DATA[0]), model(DATA[0]))


def test_a_rounding_of_linear_layers_rounds_it(third_party: Catalog) -> None:
    settings = documented_object("GPTQConfig")(inside_layer_modules=["up", "down"])
    model = ModelQuantizer(config(algo_config=[settings])).quantize_model(Model(), DATA)
    assert {row.name: row.algorithm for row in model.quark_plan.quantized} == {"up": "gptq", "down": "gptq"}
    assert set(model.quark_report.layers) == {"up", "down"}


class Drawing(nn.Module):
    """A token becomes a picture: layers of a third party that are not linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = ScaledEmbedding(16, 32), GainedTranspose(32, 6, 3, groups=2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(self.embed(ids).transpose(1, 2).unflatten(2, (2, 2)))
        return y


def test_convolutions_and_embeddings_of_a_third_party_are_quantized_and_read_back(third_party: Catalog, tmp_path: Path) -> None:
    layer = QLayerConfig(weight=documented_object("Int8PerChannelSpec")(ch_axis=0, symmetric=True))
    asked = QConfig(global_quant_config=layer, layer_type_quant_config={nn.Embedding: layer})
    plan = ModelQuantizer(asked).plan(Drawing())
    assert [(row.layer_type, row.shape) for row in plan.quantized] == [("embedding", (16, 32)), ("conv_transpose2d", (6, 16, 3, 3))]
    ids = torch.arange(8).view(2, 4)
    model = ModelQuantizer(asked).quantize_model(Drawing())
    assert (type(model.embed), type(model.up)) == (QuantScaledEmbedding, QuantGainedTranspose)
    assert (model.embed.weight_quantizer.scale.shape, model.up.weight_quantizer.scale.shape) == ((16,), (6,))
    export_safetensors(model, tmp_path / "out")
    again = Drawing()
    again.up.gain.data.fill_(torch.nan)
    assert torch.equal(import_model_from_safetensors(again, tmp_path / "out", device="cpu")(ids), model(ids))


class _Rival:
    @hookimpl
    def quark_register_layer_types(self) -> list[LayerTypeRecord]:
        return [LayerTypeRecord(name="rival", layer="third_party.layers:Gated", quantized="third_party.layers:QuantGated")]


def test_two_layer_types_of_one_class_are_an_error_that_names_both(third_party: Catalog) -> None:
    third_party.add(_Rival(), Source("rival-quant", "1.0", entry_point="rival"))
    with pytest.raises(ConfigError, match=r"'gated' of plugin 'layer_type' of third-party .* and 'rival' of plugin 'rival' of rival-quant"):
        counts_as(Gated(4, 4))


def test_a_quantized_class_that_is_none_is_named(third_party: Catalog) -> None:
    class Wrong:
        @hookimpl
        def quark_register_layer_types(self) -> list[LayerTypeRecord]:
            return [LayerTypeRecord(name="wrong", layer="third_party.layers:Gated", quantized="third_party.layers:Gated")]

    with using(Catalog(discover())) as catalog:
        catalog.add(Wrong(), Source("wrong-quant", "1.0", entry_point="wrong"))
        with pytest.raises(Exception, match=r"wrong.*subclass of quark\.models\.layers\b.*\.QuantizedLayer"):
            ModelQuantizer(config()).quantize_model(Model())


class Linear(nn.Module):
    """Another class of the name of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


def test_a_row_is_planned_under_the_registered_name_whatever_the_classes_are_called() -> None:
    class Own:
        @hookimpl
        def quark_register_layer_types(self) -> list[LayerTypeRecord]:
            return [LayerTypeRecord(name="own_linear", layer=f"{__name__}:Linear", quantized="third_party.layers:QuantGated")]

    with using(Catalog(discover())) as catalog:
        catalog.add(Own(), Source("own-quant", "1.0", entry_point="own"))
        rows = make_plan(nn.Sequential(Linear(), nn.Linear(4, 4), nn.Embedding(4, 4)), config("fp8")).rows
        assert [(row.layer_type, row.is_linear, row.is_lookup) for row in rows] == [
            ("own_linear", False, False),
            ("linear", True, False),
            ("embedding", False, True),
        ]
