"""Checkpoints of GPTQ, GPTQModel and AutoRound as sources: recordings, and codes packed by numpy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark.models.hf.dequantizer import FloatTensor
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_exporters.gptq import GptqDequantizer
from quark_exporters.stored_codes import streamed_codes, weight_quantizer

GOLDEN = Path(__file__).parent / "golden"
OF_GPTQMODEL = Path(__file__).parent / "golden_gptqmodel"
ULP = 2.0**-10
"""Of float16, relative: AutoRound multiplies codes and scales in it."""


@pytest.mark.parametrize("golden", [GOLDEN, OF_GPTQMODEL], ids=["auto_round", "gptqmodel"])
def test_the_recordings_are_those_of_the_manifest(golden: Path) -> None:
    manifest = json.loads((golden / "MANIFEST.json").read_text(encoding="utf-8"))
    assert {name: hashlib.sha256((golden / name).read_bytes()).hexdigest() for name in manifest["sha256"]} == manifest["sha256"]


@pytest.mark.parametrize("form", ["auto_gptq", "auto_round", "awq"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_checkpoint_of_auto_round_computes_its_logits(form: str, keeps: bool, tmp_path: Path) -> None:
    config = LLMTemplate.get("qwen2").get_config(scheme="int4_wo_32", exclude_layers=["*"])
    quantize_checkpoint(GOLDEN / form, tmp_path / "out", attrs.evolve(config, keep_prequantized_layers=keeps), dtype="float32")
    of_model = AutoConfig.from_pretrained(tmp_path / "out")
    if not keeps:
        del of_model.quantization_config
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", config=of_model, dtype=torch.float32)
    recorded = load_file(GOLDEN / form / "expected.safetensors")
    with torch.no_grad():
        logits = model(recorded["ids"]).logits
    assert float((logits - recorded["logits"]).norm()) <= ULP * float(recorded["logits"].norm())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name for name, tensor in stored.items() if name.endswith("proj.weight") and not tensor.is_floating_point()}
    # In two forms one of 14 layers is float and one has 3 bits, for which quark has no unsigned format.
    assert len(kept) == (0 if not keeps else 14 if form == "awq" else 12)


@pytest.mark.parametrize(
    ("setting", "form"), sorted((path.parent.name, path.stem) for path in OF_GPTQMODEL.glob("*/*.safetensors") if path.stem != "weights")
)
def test_a_checkpoint_of_gptqmodel_has_the_weights_that_gptqmodel_computes(setting: str, form: str) -> None:
    stored = load_file(OF_GPTQMODEL / setting / f"{form}.safetensors")
    block = json.loads((OF_GPTQMODEL / setting / f"{form}.json").read_text(encoding="utf-8"))
    recorded = load_file(OF_GPTQMODEL / setting / "weights.safetensors")
    ours = list(GptqDequantizer().float_tensors(block, {name: tensor.to("meta") for name, tensor in stored.items()}))
    assert {one.name for one in ours} == set(recorded)
    for one in ours:
        # In float32, a scale of float16 times a difference of codes is exact. It is rounded to float16 once.
        assert torch.equal(one.make(stored, torch.float16), recorded[one.name])
        # quark has no format for codes of 3, 5, 6 or 7 bits, and for columns in another order.
        assert len(one.layers) == (setting[3] in "248" and setting != "int4_desc_act")
        for layer in one.layers:
            coded = layer.read(stored)
            assert torch.equal(weight_quantizer(layer.config).dequantize(coded.codes, coded.qparams).half(), recorded[one.name])


@pytest.mark.parametrize("setting", ["int4_asymmetric", "int4_desc_act", "int8_asymmetric", "int3_asymmetric", "int2_asymmetric"])
def test_recorded_zero_points_of_gptqmodel_include_0(setting: str) -> None:
    words = {name: tensor for name, tensor in load_file(OF_GPTQMODEL / setting / "gptq_v2.safetensors").items() if "qzeros" in name}
    assert all((streamed_codes(tensor, int(setting[3])) == 0).any() for tensor in words.values())


def stream(codes: np.ndarray, bits: int) -> Tensor:
    """Pack rows of codes as one stream of bits, by numpy."""
    ones = (codes[..., None] >> np.arange(bits)) & 1
    return torch.from_numpy(np.packbits(ones.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little").view(np.int32).copy())


ROWS, COLUMNS, SIZE = 64, 96, 32


def layer_of(
    bits: int, seed: int, *, offset: int = 1, order: np.ndarray | None = None, size: int = SIZE
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a layer of random codes, and its weight in float32."""
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 2**bits, (ROWS, COLUMNS))
    groups = COLUMNS // size
    zeros = draw.integers(offset, 2**bits, (groups, ROWS))
    scales = (draw.lognormal(-4, 1, (groups, ROWS)) * draw.choice([-1, 1], (groups, ROWS))).astype(np.float16)  # AutoRound has both signs
    of = np.arange(COLUMNS) // size if order is None else order
    weight = (codes - zeros[of].T) * scales[of].T.astype(np.float32)
    tensors = {"qweight": stream(codes, bits).t().contiguous(), "qzeros": stream(zeros - offset, bits), "scales": torch.from_numpy(scales)}
    if order is not None:
        tensors["g_idx"] = torch.from_numpy(order.astype(np.int32))
    return {f"layer.{leaf}": tensor for leaf, tensor in tensors.items()}, torch.from_numpy(weight.astype(np.float32))


def float_tensor(block: dict[str, Any], tensors: dict[str, Tensor]) -> FloatTensor:
    (one,) = GptqDequantizer().float_tensors({"quant_method": "gptq", **block}, {name: t.to("meta") for name, t in tensors.items()})
    assert (one.name, one.shape) == ("layer.weight", (ROWS, COLUMNS))
    return one


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    ("block", "offset"),
    [
        ({}, 1),
        ({"checkpoint_format": "gptq"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, 0),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, 1),
        ({"quant_method": "intel/auto-round", "packing_format": "auto_round:gptqmodel"}, 0),
    ],
    ids=str,
)
def test_every_width_and_form_gives_the_values(bits: int, block: dict[str, Any], offset: int) -> None:
    tensors, weight = layer_of(bits, bits, offset=offset)
    one = float_tensor({"bits": bits, "group_size": SIZE, **block}, tensors)
    assert torch.equal(one.make(tensors, torch.float32), weight)
    assert len(one.layers) == (bits in (2, 4, 8))
    for layer in one.layers:
        coded = layer.read(tensors)
        assert torch.equal(weight_quantizer(layer.config).dequantize(coded.codes, coded.qparams), weight)


@pytest.mark.parametrize("size", [SIZE, COLUMNS])
def test_the_shapes_say_bits_and_groups_where_a_layer_is_of_others_than_the_checkpoint(size: int) -> None:
    tensors, weight = layer_of(8, 1, size=size)
    assert torch.equal(float_tensor({"bits": 4, "group_size": 128}, tensors).make(tensors, torch.float32), weight)


def test_columns_in_another_order_have_the_scales_of_their_groups() -> None:
    order = np.random.default_rng(3).permutation(np.arange(COLUMNS) // SIZE)
    tensors, weight = layer_of(4, 3, order=order)
    one = float_tensor({"group_size": SIZE, "desc_act": True}, tensors)
    assert torch.equal(one.make(tensors, torch.float32), weight)
    assert one.layers == ()
    (layer,) = float_tensor({"group_size": SIZE, "desc_act": False}, tensors).layers
    with pytest.raises(CheckpointError, match=r"layer\.g_idx.*desc_act"):
        layer.read(tensors)
    tensors["layer.g_idx"][5] = 3
    with pytest.raises(CheckpointError, match=r"g_idx.* does not exist: the layer has 3"):
        one.make(tensors, torch.float32)


@pytest.mark.parametrize("leaf", ["qweight", "qzeros", "scales"])
def test_tensors_that_are_missing_or_do_not_fit_are_named(leaf: str) -> None:
    tensors, _ = layer_of(4, 0)
    name = f"layer.{leaf}"
    for other in (tensors[name][:-1], tensors[name].flatten(), tensors[name].double() if leaf != "scales" else tensors[name].int()):
        with pytest.raises(CheckpointError, match=rf"'layer'.*{leaf}.*damaged"):
            float_tensor({"group_size": SIZE}, tensors | {name: other})
    if leaf != "qweight":
        del tensors[name]
        with pytest.raises(CheckpointError, match=rf"lacks 'layer\.{leaf}'"):
            float_tensor({"group_size": SIZE}, tensors)


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"checkpoint_format": "marlin"}, UnsupportedError),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, UnsupportedError),
        ({"quant_method": "auto-round", "packing_format": "llm_compressor"}, UnsupportedError),
        ({"group_size": 0}, ConfigError),
        ({"group_size": True}, ConfigError),
        ({"group_size": "32"}, ConfigError),
    ],
    ids=str,
)
def test_other_forms_are_refused_by_name(block: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=str(next(reversed(block.values())))):
        float_tensor(block, layer_of(4, 0)[0])


def test_a_zero_point_that_the_format_does_not_hold_is_dequantized_and_not_kept() -> None:
    tensors, weight = layer_of(4, 0, offset=1)
    tensors["layer.qzeros"].fill_(-1)
    one = float_tensor({"group_size": SIZE}, tensors)
    assert one.make(tensors, torch.float32).shape == weight.shape
    with pytest.raises(CheckpointError, match=r"zero point 16.*--no-keep-prequantized"):
        one.layers[0].read(tensors)


@pytest.mark.parametrize("programs", ["gptqmodel:7.7.0", ["gptqmodel:7.7.0"]], ids=["text", "list"])
def test_a_zero_point_of_0_of_gptqmodel_borrows_from_the_next(programs: str | list[str]) -> None:
    tensors, _ = layer_of(4, 0)
    tensors["layer.qzeros"].fill_(-1)  # 0x11111110 - 0x11111111: of eight zero points, the first is 0, and the others are 1
    tensors["layer.scales"].abs_()
    (layer,) = float_tensor({"group_size": SIZE, "meta": {"quantizer": programs}}, tensors).layers
    zeros = layer.read(tensors).qparams.zero_point
    assert zeros is not None
    assert zeros.reshape(ROWS, -1).t().tolist() == [[0, 1, 1, 1, 1, 1, 1, 1] * (ROWS // 8)] * (COLUMNS // SIZE)
