"""A model that runs from codes computes as the unpacked one, bit for bit: every scheme, layout, and kind of layer."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import quark
from quark.checkpoint import register_layouts, running_from_codes, unpack_model
from quark.checkpoint.transformers_loading import is_read_here
from quark.errors import ConfigError
from quark.models.hf.loading import load_model
from quark.models.layers import layers_from_codes as layers_from_codes_module
from quark.models.layers.layers_from_codes import RunsFromCodes
from quark.models.layers.packed_weight import PackedWeight
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import tiny_model_dir

IDS = torch.arange(3, 40)[None]
Way = Callable[[Path, bool], nn.Module]


def exported(scheme: str, out: Path, layout: str = "quark", dtype: str = "float32", *, whole: bool = False) -> nn.Module:
    """Return the model in memory, written to ``out``; ``whole`` quantizes embeddings and head too."""
    config = LLMTemplate.get("llama").get_config(scheme=scheme)
    if whole:
        weights = attrs.evolve(config.global_quant_config, input_tensors=None)
        config = attrs.evolve(config, exclude=[], layer_quant_config={"*embed_tokens": weights})
    model = ModelQuantizer(config).quantize_model(load_model(tiny_model_dir(), dtype), [IDS])
    export_safetensors(model, out, layout)
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    result: Any = model(ids)
    return result.logits


def reloaded(directory: Path, packed: bool) -> nn.Module:
    return import_model_from_safetensors(None, directory, packed=packed)


def by_transformers(directory: Path, packed: bool) -> nn.Module:
    with running_from_codes(packed):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return model


def layers_from_codes(model: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, RunsFromCodes)}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("way", [reloaded, by_transformers])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_every_scheme_computes_the_same_from_codes_and_back(scheme: str, dtype: str, whole: bool, way: Way, tmp_path: Path) -> None:
    model = exported(scheme, tmp_path / "out", dtype=dtype, whole=whole)
    expected = logits(model)
    packed = way(tmp_path / "out", True)
    assert torch.equal(logits(packed), expected)
    assert len(layers_from_codes(packed)) == (23 if whole else 21)
    # The product of one row depends on where a float weight lies in memory: mapped from a file as here.
    unpacked, one = way(tmp_path / "out", False), IDS[:, :1]
    assert torch.equal(logits(packed, one), logits(unpacked, one)), "decoding, one token at a time"
    assert torch.equal(logits(unpack_model(packed)), expected)
    assert not layers_from_codes(packed)
    assert not layers_from_codes(unpacked)


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [("fp8", "fp8"), *((s, "compressed_tensors") for s in ("int8", "nvfp4", "int4_wo_32")), ("uint4_wo_32", "awq")],
)
def test_layouts_with_a_packing_of_their_own_too(scheme: str, layout: str, tmp_path: Path) -> None:
    exported(scheme, tmp_path / "out", layout)
    packed = import_model_from_safetensors(None, tmp_path / "out", packed=True)
    expected = logits(import_model_from_safetensors(None, tmp_path / "out"))
    assert len(layers_from_codes(packed)) == 21
    assert torch.equal(logits(packed), expected)
    assert torch.equal(logits(unpack_model(packed)), expected)


def test_a_large_head_computes_its_outputs_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(exported("int4_wo_32", tmp_path / "out", whole=True))
    packed = import_model_from_safetensors(None, tmp_path / "out", packed=True)
    head = layers_from_codes(packed)["lm_head"]
    monkeypatch.setattr(layers_from_codes_module, "ROOM_ELEMENTS", 1 << 17)
    assert [part.stop - part.start for part in head.packed_weight.row_slices(1 << 17)] == [512, 512]
    assert torch.equal(logits(packed), expected)


def test_slices_of_a_product_have_whole_vectors_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported("fp8", tmp_path / "out", whole=True)
    packed, unpacked = (reloaded(tmp_path / "out", is_packed) for is_packed in (True, False))
    monkeypatch.setattr(layers_from_codes_module, "ROOM_ELEMENTS", 100 * 256)
    sizes = {x.shape for x in _rooms(packed, monkeypatch)}
    assert sizes >= {(64, 256)}
    assert {rows % 64 for rows, _ in sizes} == {0}
    # A product of one row computes the rows behind the last vector in another order.
    for token in range(3, 9):
        assert torch.equal(logits(packed, torch.tensor([[token]])), logits(unpacked, torch.tensor([[token]])))


def _rooms(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the memory into which layers unpacked their weights in a forward."""
    rooms, room = [], layers_from_codes_module.weight_room
    with monkeypatch.context() as patch:
        patch.setattr(layers_from_codes_module, "weight_room", lambda *args: rooms.append(room(*args)) or rooms[-1])
        logits(model)
    return rooms


def test_a_lookup_unpacks_the_rows_of_its_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported("int4_wo_32", tmp_path / "out", whole=True)
    packed = import_model_from_safetensors(None, tmp_path / "out", packed=True)
    embedding, shapes = layers_from_codes(packed)["model.embed_tokens"], []
    values = PackedWeight.values
    monkeypatch.setattr(PackedWeight, "values", lambda self, out=None: shapes.append(self.shape) or values(self, out))
    found = embedding(torch.tensor([[3, 1000, 3, 5]]))
    assert shapes == [(16, 256)], "eight codes are a word: the rows 0 to 7 and 1000 to 1007"
    monkeypatch.undo()
    assert torch.equal(found, embedding.weight[torch.tensor([[3, 1000, 3, 5]])])


def test_an_export_of_packed_layers_is_refused(tmp_path: Path) -> None:
    exported("int8", tmp_path / "out")
    packed = import_model_from_safetensors(None, tmp_path / "out", packed=True)
    with pytest.raises(ConfigError, match="unpack_model"):
        export_safetensors(packed, tmp_path / "again")
    export_safetensors(unpack_model(packed), tmp_path / "again")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "out"))
    assert all(torch.equal(found[name], expected[name]) for name in found.keys() | expected.keys())


def test_transformers_and_our_loader_keep_codes_where_that_is_wanted(tmp_path: Path) -> None:
    for layout in ("quark", "compressed_tensors"):
        expected = logits(exported("int8", tmp_path / layout, layout))
        register_layouts()
        with running_from_codes():
            packed = AutoModelForCausalLM.from_pretrained(tmp_path / layout, dtype="auto")
        # Of quant_method quark, transformers leaves it to the first forward to unpack.
        assert torch.equal(logits(packed), expected)
        assert len(layers_from_codes(packed)) == (21 if layout == "quark" or is_read_here("compressed-tensors") else 0)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / layout, dtype="auto")
        assert torch.equal(logits(plain), expected)
        assert not layers_from_codes(plain)
        loaded = load_model(tmp_path / layout, packed=True)
        assert torch.equal(logits(loaded), expected)
        assert torch.equal(logits(unpack_model(packed)), expected)
        assert not layers_from_codes(packed)
    assert len(layers_from_codes(load_model(tmp_path / "quark", packed=True))) == 21


def test_a_cast_is_one_of_the_values_and_never_of_codes_or_scales(tmp_path: Path) -> None:
    exported("fp8", tmp_path / "out")
    packed = import_model_from_safetensors(None, tmp_path / "out", packed=True)
    expected = logits(import_model_from_safetensors(None, tmp_path / "out").to(torch.float64))
    (layer, *_) = layers_from_codes(packed).values()
    before = {name: tensor.clone() for name, tensor in layer.packed_weight.tensors.items()}
    packed.to(torch.float64)
    after = layer.packed_weight.tensors
    assert {n: t.dtype for n, t in before.items()} == {n: t.dtype for n, t in after.items()}
    assert layer.weight.dtype is torch.float64
    assert torch.equal(logits(packed), expected)


@pytest.mark.parametrize("whole", [False, True])
def test_a_copy_that_is_pickled_or_deep_runs_from_codes_too(whole: bool, tmp_path: Path) -> None:
    exported("int4_wo_32", tmp_path / "out", whole=whole)
    packed = reloaded(tmp_path / "out", True)
    expected = logits(packed)
    layer = copy.deepcopy(packed).get_submodule("model.layers.0.mlp.up_proj")
    for copied in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert layers_from_codes(copied).keys() == layers_from_codes(packed).keys()
        assert type(copied.get_submodule("model.layers.0.mlp.up_proj")) is type(layer)
        assert torch.equal(logits(copied), expected)
        assert torch.equal(logits(unpack_model(copied)), expected)
    assert len(layers_from_codes(packed)) > 0, "the copies were unpacked, and not the model"


def test_the_state_of_a_packed_model_is_its_stored_tensors_and_is_taken_by_another(tmp_path: Path) -> None:
    exported("int4_wo_32", tmp_path / "out")
    packed = reloaded(tmp_path / "out", True)
    state, expected = packed.state_dict(), logits(packed)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in stored.items():
        if name.endswith("_proj.weight"):
            assert state[name.removesuffix("weight") + "packed_"].equal(tensor)
            assert state[name.removesuffix("weight") + "packed_scale"].equal(stored[f"{name}_scale"])
    other = reloaded(tmp_path / "out", True)
    for layer in layers_from_codes(other).values():
        for tensor in layer.packed_weight.tensors.values():
            tensor.zero_()
    assert not torch.equal(logits(other), expected)
    other.load_state_dict(state)
    assert torch.equal(logits(other), expected)


def test_of_a_mixture_the_experts_with_tokens_are_unpacked_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=8, num_experts_per_tok=2)).eval()
    ModelQuantizer(LLMTemplate.get("mixtral").get_config(scheme="int4_wo_32")).quantize_model(model)
    export_safetensors(model, tmp_path / "out")
    packed, unpacked = both = [reloaded(tmp_path / "out", is_packed) for is_packed in (True, False)]
    experts, token = {name for name in layers_from_codes(packed) if ".experts." in name}, IDS[:, :1]
    assert len(experts) == 8 * 3
    names, values = [], PackedWeight.values
    monkeypatch.setattr(PackedWeight, "values", lambda self, out=None: names.append(self.name) or values(self, out))
    found = logits(packed, token)
    assert len(experts & set(names)) == 2 * 3, "a token has two experts"
    assert torch.equal(found, logits(unpacked, token))
    assert torch.equal(*(logits(each, IDS) for each in both))
    assert experts <= set(names), "37 tokens have them all"


def test_a_tied_head_stays_tied_or_has_codes_of_its_own(tmp_path: Path) -> None:
    model = load_model(tiny_model_dir())
    model.config.tie_word_embeddings = True
    model.tie_weights()
    float_head, config = copy.deepcopy(model), LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
    for name, each, exclude in (("float", float_head, config.exclude), ("quantized", model, [])):
        quantized = ModelQuantizer(attrs.evolve(config, exclude=exclude)).quantize_model(each)
        export_safetensors(quantized, tmp_path / name)
        packed = reloaded(tmp_path / name, True)
        assert (packed.lm_head.weight is packed.model.embed_tokens.weight) == (name == "float")
        assert ("lm_head" in layers_from_codes(packed)) == (name == "quantized")
        assert torch.equal(logits(packed), logits(quantized))


def test_fake_quantized_weights_are_values_and_stay_so(tmp_path: Path) -> None:
    model = exported("int8", tmp_path / "first")
    export_safetensors(model, tmp_path / "out", weight_format="fake_quantized")
    packed = import_model_from_safetensors(None, tmp_path / "out", packed=True)
    assert not layers_from_codes(packed)
    assert torch.equal(logits(packed), logits(model))
