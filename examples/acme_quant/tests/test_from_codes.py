"""Models in acme_nf3_g64 run from codes without code for it, in quark's layout and in Acme's own layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acme_quant.plugin
from acme_quant.schemes import acme_nf3_g64
from quark.base.lazy import ObjectRef
from quark.checkpoint import CheckpointContent, CheckpointExporter, CodedLayer, ExportOptions, StorageReader, unpack_model
from quark.config.layer import QLayerConfig
from quark.models.layers.layers_from_codes import RunsFromCodes
from quark.numbers import QParams, quantizer_for
from quark.plugins import Catalog, ExporterRecord, hookimpl, using
from quark.plugins.discovery import Source, discover
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model


class AcmeStorage:
    """Stores the groups of a row below each other, and beside each group its scale in bfloat16."""

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        return None

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        own = quantizer_for(layer.config.weight, activation=False).pack(layer.codes, layer.qparams)  # type: ignore[arg-type]
        return {"acme_groups": own[""].reshape(-1, 24), "acme_scales": own["scale"].to(torch.bfloat16).reshape(-1, 1)}

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        quantizer, groups = quantizer_for(config.weight, activation=False), tensors["acme_groups"]  # type: ignore[arg-type]
        codes, _ = quantizer.unpack({"": groups.reshape(shape[0], -1), "scale": tensors["acme_scales"]}, shape)
        return CodedLayer(config, codes, QParams(tensors["acme_scales"].float().reshape(shape[0], -1)))


class AcmeExporter(CheckpointExporter):
    layout, storage = "acme_groups", AcmeStorage()

    def quantization_config(self, content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
        return {"quant_method": "acme"}


class AcmeReader(StorageReader):
    storage = AcmeStorage()

    def layers(self, block: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        return {name.removesuffix(".acme_groups"): acme_nf3_g64() for name in stored if name.endswith(".acme_groups")}


class WithLayout:
    """The hook of a plugin with Acme's layout."""

    @hookimpl
    def quark_register_exporters(self) -> Iterator[ExporterRecord]:
        yield ExporterRecord(
            name="acme_groups", exporter=ObjectRef(AcmeExporter), reader=ObjectRef(AcmeReader), quant_methods=("acme",)
        )  # fmt: skip


@pytest.fixture(autouse=True)
def acme() -> Iterator[None]:
    """The plugin, whether it is installed or not, and the layout."""
    catalog = Catalog(c for c in discover() if c.source.distribution != "acme-quant")
    catalog.add(acme_quant.plugin, Source("acme-quant"))
    catalog.add(WithLayout(), Source("acme-layout"))
    with using(catalog):
        yield


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Any = model(calibration_batches(1, 40)[0])
    return found.logits


@pytest.mark.parametrize("layout", ["quark", "acme_groups"])
def test_a_reloaded_model_keeps_three_bits_an_element_and_computes_as_unpacked(layout: str, tmp_path: Path) -> None:
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="acme_nf3_g64")).quantize_model(tiny_model())
    export_safetensors(model, tmp_path / "out", layout)
    unpacked, packed = (import_model_from_safetensors(None, tmp_path / "out", packed=is_packed) for is_packed in (False, True))
    from_codes = [layer for layer in packed.modules() if isinstance(layer, RunsFromCodes)]
    assert len(from_codes) == 21
    for layer in from_codes:
        weight = layer.packed_weight
        bits = 3 + (32 if layout == "quark" else 16) / 64
        assert 8 * sum(tensor.nbytes for tensor in weight.tensors.values()) == bits * weight.shape[0] * weight.shape[1]
        assert weight.cuts is not None, "rows are unpacked slice by slice"
    expected = logits(unpacked)
    assert torch.equal(logits(packed), expected)
    assert torch.equal(logits(unpack_model(packed)), expected)


def test_acme_has_no_line_for_it() -> None:
    sources = (Path(__file__).resolve().parents[1] / "src").rglob("*.py")
    assert not re.search("PackedWeight|from_codes|FromCodes", "".join(path.read_text(encoding="utf-8") for path in sources))
