"""A head and embeddings that are quantized alike stay one tensor: made once, stored once, and tied by every reader."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from quark.base.ranks import Ranks
from quark.checkpoint import ExportOptions
from quark.checkpoint.export import export_with
from quark.checkpoint.inspection import inspect_checkpoint
from quark.checkpoint.transformers_loading import load_checkpoint
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import CheckpointError
from quark.models.hf.loading import load_model, unpack_model
from quark.models.layers import have_same_weight
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization import Int8PerChannelSpec
from quark_devkit.threads import in_threads
from quark_devkit.whole_runs import contents, interrupted_behind
from quark_tiny_model import tiny_model, tiny_model_dir
from quark_workbench.evaluate.quantized_checkpoint import QuantizedCheckpoint

IDS = torch.arange(3, 43).reshape(2, 20)
DATA = [IDS[:1], IDS[1:]]
INT8 = Int8PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec()
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def weight_of(scheme: str) -> QTensorConfig:
    return INT8 if scheme == "int8_wo" else LLMTemplate.get("llama").get_config(scheme=scheme).global_quant_config.weight


def both(layer: QLayerConfig, *, body: QLayerConfig | None = None, **more: Any) -> QConfig:
    """A configuration that quantizes the head and the embeddings alike."""
    names = ("lm_head", "*embed_tokens")
    return QConfig(body or layer, layer_quant_config=dict.fromkeys(names, layer), **more)


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS % model.config.vocab_size, **inputs).logits


def tensors(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def changed(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    stored = tensors(directory)
    change(stored)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


READERS: dict[str, Callable[[Path], Any]] = {
    "ours": lambda out: import_model_from_safetensors(None, out),
    "ours, into a float model": lambda out: import_model_from_safetensors(
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out)), out
    ),
    "ours, packed": lambda out: import_model_from_safetensors(None, out, packed=True),
    "ours, packed and then unpacked": lambda out: unpack_model(import_model_from_safetensors(None, out, packed=True)),
    "transformers": lambda out: AutoModelForCausalLM.from_pretrained(out, dtype="auto"),
    "the programs'": load_checkpoint,
    "the programs', packed": lambda out: load_checkpoint(out, packed=True),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    model = ModelQuantizer(both(QLayerConfig(weight=weight_of("int4_wo_32")))).quantize_model(tiny_model())
    out = tmp_path_factory.mktemp("exported")
    export_safetensors(model, out)
    return model, out


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_ties_them_again(reader: str, exported: tuple[nn.Module, Path]) -> None:
    model, out = exported
    assert have_same_weight(model.lm_head, model.model.embed_tokens)  # type: ignore[union-attr, arg-type]
    back = READERS[reader](out)
    assert torch.equal(logits(back), logits(model))
    assert have_same_weight(back.lm_head, back.model.embed_tokens)
    twin = copy.deepcopy(back)
    assert have_same_weight(twin.lm_head, twin.model.embed_tokens)


@pytest.mark.parametrize("packed", [False, True])
def test_so_does_the_reader_of_one_block_after_another(packed: bool, exported: tuple[Any, Path]) -> None:
    model, out = exported
    checkpoint = QuantizedCheckpoint(out, torch.device("cpu"), packed=packed)
    for block in (None, *checkpoint.blocks):
        checkpoint.load(block)
    back: Any = checkpoint.model
    assert torch.equal(logits(back), logits(model))
    assert have_same_weight(back.lm_head, back.model.embed_tokens)


@pytest.mark.parametrize("reader", ["ours", "ours, packed and then unpacked"])
def test_what_was_read_is_written_as_it_was(reader: str, exported: tuple[nn.Module, Path], tmp_path: Path) -> None:
    export_safetensors(READERS[reader](exported[1]), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(exported[1])


def test_transformers_reports_no_tensor_as_missing(exported: tuple[nn.Module, Path]) -> None:
    _, report = AutoModelForCausalLM.from_pretrained(exported[1], dtype="auto", output_loading_info=True)
    assert not any(report.values())


def test_an_inspection_finds_no_damage(exported: tuple[nn.Module, Path]) -> None:
    assert not inspect_checkpoint(exported[1]).damage


SCHEMES = ["int8_wo", "int4_wo_64", "int4_wo_per_channel", "uint4_wo_32", "int2_wo_32", "fp8", "mxfp4", "nvfp4", "mx6", "vq2"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("values", [False, True], ids=["codes", "values"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "opt"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_file_holds_one_tensor_and_its_scales(scheme: str, family: str, values: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    more = {"word_embed_proj_dim": 64, "ffn_dim": 64} if family == "opt" else {"layer_types": ["full_attention"]} if "3" in family else {}
    float_model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **more)).eval()
    model = ModelQuantizer(both(QLayerConfig(weight=weight_of(scheme)))).quantize_model(float_model)
    out = tmp_path / "out"
    export_safetensors(model, out, weight_format="fake_quantized" if values else "real_quantized")
    stored = tensors(out)
    assert not [name for name in stored if name.startswith("lm_head")]
    assert any("embed_tokens.weight" in name for name in stored)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    for reader in ("ours", "ours, packed", "transformers"):
        back = READERS[reader](out)
        assert torch.equal(logits(back), logits(model)), reader
        assert have_same_weight(back.get_output_embeddings(), back.get_input_embeddings()), reader


@pytest.mark.parametrize("algorithm", [None, "gptq"])
def test_the_bytes_are_the_same_in_memory_from_disk_resumed_and_of_several_ranks(algorithm: str | None, tmp_path: Path) -> None:
    layer = QLayerConfig(weight=weight_of("int4_wo_64"))
    base = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", algorithm=algorithm, exclude_layers=[])
    base.layer_quant_config = {"lm_head": layer, "model.embed_tokens": layer}
    export_safetensors(ModelQuantizer(base).quantize_model(load_model(tiny_model_dir()), DATA), tmp_path / "memory")
    plan = quantize_checkpoint(tiny_model_dir(), tmp_path / "disk", base, DATA)
    assert plan.sharing({row.name for row in plan.rows}) == {"lm_head": "model.embed_tokens"}
    with interrupted_behind(1):
        quantize_checkpoint(tiny_model_dir(), tmp_path / "resumed", base, DATA)
    quantize_checkpoint(tiny_model_dir(), tmp_path / "resumed", base, DATA, resume=True)

    def run(ranks: Ranks) -> None:
        quantize_checkpoint(tiny_model_dir(), tmp_path / "ranks", base, DATA, ranks=ranks)

    in_threads(run, 2, is_deterministic=True)
    expected = tensors(tmp_path / "memory")
    for other in ("disk", "resumed", "ranks"):
        found = tensors(tmp_path / other)
        assert found.keys() == expected.keys()
        assert algorithm is not None or all(torch.equal(found[name], expected[name]) for name in expected)
        assert torch.equal(found["model.embed_tokens.weight"], expected["model.embed_tokens.weight"])
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory") == contents(tmp_path / "resumed")


def test_the_head_of_a_model_without_blocks_is_not_left_to_an_algorithm_that_knows_only_its_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    model = BertForMaskedLM(config).eval()
    layer = QLayerConfig(weight=weight_of("int4_wo_32"))
    nearest = ModelQuantizer(QConfig(layer, layer_type_quant_config={nn.Embedding: layer})).quantize_model(copy.deepcopy(model))
    gptq = LLMTemplate.get("bert").get_config(scheme="int4_wo_32", algorithm="gptq", exclude_layers=[])
    gptq.layer_type_quant_config = {nn.Embedding: layer}
    quantized: Any = ModelQuantizer(gptq).quantize_model(model, DATA)
    head, words = quantized.cls.predictions.decoder, quantized.bert.embeddings.word_embeddings
    assert have_same_weight(head, words)
    assert torch.equal(head.weight, nearest.cls.predictions.decoder.weight)
    export_safetensors(quantized, tmp_path / "out")
    stored = tensors(tmp_path / "out")
    assert "cls.predictions.decoder.weight" not in stored
    back = import_model_from_safetensors(None, tmp_path / "out")
    assert torch.equal(logits(back), logits(quantized))


def test_a_finished_model_without_blocks_is_read_back_by_a_resumed_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    BertForMaskedLM(config).eval().save_pretrained(tmp_path / "source")
    asked = LLMTemplate.get("bert").get_config(scheme="int4_wo_32", algorithm="gptq", exclude_layers=[])
    asked.layer_type_quant_config = {nn.Embedding: QLayerConfig(weight=weight_of("int4_wo_32"))}
    quantize_checkpoint(tmp_path / "source", tmp_path / "once", asked, DATA)
    with interrupted_behind(1):
        quantize_checkpoint(tmp_path / "source", tmp_path / "out", asked, DATA)
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", asked, DATA, resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "once")


def test_all_embeddings_of_an_encoder_and_a_decoder_stay_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    layer = QLayerConfig(weight=INT8)
    config = QConfig(layer, layer_quant_config=dict.fromkeys(["shared", "*embed_tokens", "lm_head"], layer))
    model: Any = ModelQuantizer(config).quantize_model(T5ForConditionalGeneration(T5Config(**sizes)).eval())
    export_safetensors(model, tmp_path / "out")
    stored = [name for name in tensors(tmp_path / "out") if "embed" in name or "shared" in name or "head" in name]
    assert all(name.startswith("shared.weight") for name in stored)
    back: Any = import_model_from_safetensors(None, tmp_path / "out")
    for layer_of in (back.encoder.embed_tokens, back.decoder.embed_tokens, back.lm_head):
        assert have_same_weight(layer_of, back.shared)
    assert torch.equal(logits(back, decoder_input_ids=IDS), logits(model, decoder_input_ids=IDS))


def test_the_scale_of_the_heads_input_is_the_heads(tmp_path: Path) -> None:
    fp8 = LLMTemplate.get("llama").get_config(scheme="fp8").global_quant_config
    model: Any = ModelQuantizer(both(fp8)).quantize_model(tiny_model(), DATA)
    assert have_same_weight(model.lm_head, model.model.embed_tokens)
    export_safetensors(model, tmp_path / "out")
    assert sorted(n for n in tensors(tmp_path / "out") if n.startswith("lm_head")) == ["lm_head.input_scale"]
    for reader in ("ours", "ours, packed", "transformers"):
        assert torch.equal(logits(READERS[reader](tmp_path / "out")), logits(model)), reader


@pytest.mark.parametrize(("head", "embedding"), [("int4_wo_32", "int4_wo_64"), ("int4_wo_32", None), (None, "int4_wo_32")])
def test_other_ways_to_quantize_them_leave_each_its_own_weight(head: str | None, embedding: str | None, tmp_path: Path) -> None:
    body = QLayerConfig(weight=weight_of("int4_wo_128"))
    asked = {name: QLayerConfig(weight=weight_of(s)) for name, s in (("lm_head", head), ("model.embed_tokens", embedding)) if s}
    config = QConfig(body, layer_quant_config=asked, exclude=[] if head else ["lm_head"])
    quantize_checkpoint(tiny_model_dir(), tmp_path / "disk", config)
    model = ModelQuantizer(config).quantize_model(load_model(tiny_model_dir()))
    assert not have_same_weight(model.lm_head, model.model.embed_tokens)  # type: ignore[arg-type]
    export_safetensors(model, tmp_path / "memory")
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= tensors(tmp_path / "disk").keys()
    assert json.loads((tmp_path / "disk" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_rotation_that_changes_them_differently_leaves_each_its_own_codes(tmp_path: Path) -> None:
    layer = QLayerConfig(weight=weight_of("int4_wo_64"))
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", algorithm="rotation", exclude_layers=[])
    config.layer_quant_config = {"lm_head": layer, "model.embed_tokens": layer}
    plan = quantize_checkpoint(tiny_model_dir(), tmp_path / "disk", config, DATA)
    model: Any = ModelQuantizer(config).quantize_model(load_model(tiny_model_dir()), DATA)
    export_safetensors(model, tmp_path / "memory")
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")
    for made in (plan, model.quark_plan):
        assert not made.sharing({row.name for row in made.rows})
        assert any("each gets its own codes" in note for note in made.notes)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "disk")), logits(model))


DAMAGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "the scale is missing": lambda s: s.pop("model.embed_tokens.weight_scale"),
    "the codes are missing": lambda s: s.pop("model.embed_tokens.weight"),
    "the head has a scale of its own": lambda s: s.update({"lm_head.weight_scale": s["model.embed_tokens.weight_scale"] * 2}),
    "the head has codes of its own": lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone()}),
    "only the head is stored": lambda s: s.update({"lm_head.weight": s.pop("model.embed_tokens.weight")}),
}


@pytest.mark.parametrize("reader", ["ours", "ours, into a float model", "ours, packed", "transformers", "the programs'"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_with_half_of_a_head_is_refused(damage: str, reader: str, exported: tuple[nn.Module, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_safetensors(exported[0], out)
    changed(out, DAMAGES[damage])
    with pytest.raises((CheckpointError, RuntimeError)):
        READERS[reader](out)
    assert inspect_checkpoint(out).damage


@pytest.mark.parametrize("reader", READERS)
def test_a_float_head_is_not_made_of_codes(reader: str, exported: tuple[nn.Module, Path], tmp_path: Path) -> None:
    """The config says that the head is float, but no float head is stored."""
    out = tmp_path / "out"
    export_safetensors(exported[0], out)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["exclude"] = ["lm_head"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, RuntimeError)):
        READERS[reader](out)


@pytest.mark.parametrize("reader", READERS)
def test_a_checkpoint_that_has_both_is_read_as_ever(reader: str, exported: tuple[nn.Module, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_safetensors(exported[0], out)
    own = "model.embed_tokens."
    changed(out, lambda s: s.update({f"lm_head.{n.removeprefix(own)}": t.clone() for n, t in [*s.items()] if n.startswith(own)}))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert torch.equal(logits(READERS[reader](out)), logits(exported[0]))


def test_a_gguf_file_has_the_embeddings_and_no_output(tmp_path: Path) -> None:
    config = both(QLayerConfig(weight=weight_of("int4_wo_32")))
    model = ModelQuantizer(config).quantize_model(load_model(tiny_model_dir(), "float32"))
    export_with("gguf", model, tmp_path / "memory")
    quantize_checkpoint(tiny_model_dir(), tmp_path / "disk", config, exporter="gguf", dtype="float32")
    assert (tmp_path / "memory/model.gguf").read_bytes() == (tmp_path / "disk/model.gguf").read_bytes()
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "disk/model.gguf").tensors}
    assert kinds["token_embd.weight"] == "Q4_0"
    assert "output.weight" not in kinds
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "disk", gguf_file="model.gguf", dtype=torch.float32)
    torch.testing.assert_close(back.lm_head.weight, model.lm_head.weight, rtol=2**-11, atol=0)  # its scales are float16


def test_the_plan_says_that_they_are_one_tensor_and_of_how_many_bytes(exported: tuple[Any, Path]) -> None:
    model, out = exported
    row = next(row for row in model.quark_plan.rows if row.name == "lm_head")
    assert row.shares_codes_of == "model.embed_tokens"
    size = sum(t.nbytes for n, t in tensors(out).items() if n.startswith("model.embed_tokens"))
    assert row.weight_bytes == size
    assert any(f"stored once, in {size:,} bytes" in note for note in model.quark_plan.notes)


def test_options_of_the_export_change_nothing_of_this(exported: tuple[Any, Path], tmp_path: Path) -> None:
    export_with("safetensors", exported[0], tmp_path / "out", ExportOptions(zero_points=False))
    assert [n for n in tensors(tmp_path / "out") if "head" in n or "embed" in n] == [
        "model.embed_tokens.weight",
        "model.embed_tokens.weight_scale",
    ]
    for reader in ("ours", "ours, packed"):
        assert torch.equal(logits(READERS[reader](tmp_path / "out")), logits(exported[0])), reader
