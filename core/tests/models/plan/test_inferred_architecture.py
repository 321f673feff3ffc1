"""The architecture that is inferred from the module tree of an unknown family.

It suffices to quantize block by block, or there is none.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoConfig,
    AutoModelForCausalLM,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForSequenceClassification,
    WhisperForCausalLM,
)

from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.errors import UnknownNameError
from quark.models.layers import QuantizedLayer
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import architecture_of, template_of
from quark.models.plan.inferred_architecture import fitted, infer_architecture, with_inferred_attention
from quark.models.plan.mixtures import ExpertNames
from quark.plugins import schemes, templates
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import tiny_model

IDS = torch.arange(3, 23)[None]
ENCODER_DECODER = {"vocab_size": 64, "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64}
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}


def unknown_model(model_type: str, **more: object) -> nn.Module:
    assert model_type not in templates(), "choose another type: this one has a template"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL, **more), dtype=torch.float32).eval()


def persimmon() -> nn.Module:
    return unknown_model("persimmon", intermediate_size=64)


INFERRED = (
    "decoder_blocks",
    "head",
    "query_projections",
    "key_projections",
    "value_projections",
    "key_norms",
    "experts",
    "kv_layers_name",
    "q_layer_name",
    "exclude_layers_name",
)


@pytest.mark.parametrize("attribute", INFERRED)
def test_what_is_inferred_of_a_known_family_is_what_its_template_says(attribute: str) -> None:
    known = architecture_of(tiny_model())
    found = infer_architecture(tiny_model(), "llama")
    assert found is not None
    assert known is not None
    assert getattr(found, attribute) == getattr(known, attribute)


def test_an_unknown_family_quantizes_block_by_block_and_reloads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = persimmon()
    template = template_of(model)
    assert "inferred from its modules" in caplog.text
    assert template.kv_layers_name == ["*query_key_value"]
    ModelQuantizer(template.get_config("fp8", kv_cache_scheme="fp8")).quantize_model(model, [IDS])
    assert all(row.fused for row in model.quark_plan.attentions)
    layers = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 8
    assert all(isinstance(m, QuantizedLayer) for m in layers)
    assert not isinstance(model.lm_head, QuantizedLayer)
    export_safetensors(model, tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(import_model_from_safetensors(None, tmp_path / "out")(IDS).logits, model(IDS).logits)


def test_names_fill_what_an_architecture_does_not_state_and_nothing_else() -> None:
    model = tiny_model()
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    known = architecture_of(model)
    assert known is not None
    assert with_inferred_attention(known, model, layers) == known
    unstated = attrs.evolve(known, query_projections=None, key_projections=None, value_projections=(), key_norms=None)
    assert with_inferred_attention(unstated, model, layers) == attrs.evolve(known, value_projections=())
    assert with_inferred_attention(None, model, layers[:3]).key_projections == ("model.layers.0.self_attn.k_proj",)


def test_experts_of_an_unknown_family_are_found_by_the_module_that_holds_them() -> None:
    config = MixtralConfig(**SMALL, intermediate_size=64, num_local_experts=2, num_key_value_heads=4)
    found = infer_architecture(MixtralForCausalLM(config), "mixed")
    assert found is not None
    assert found.experts == "mlp.experts"
    assert ExpertNames(found).among(["model.layers.0.mlp.experts.1.up_proj", "model.layers.0.mlp.up_proj"]) == [
        "model.layers.0.mlp.experts.1.up_proj"
    ]


def test_an_encoder_has_blocks_before_those_of_its_decoder() -> None:
    model = PegasusForConditionalGeneration(PegasusConfig(**ENCODER_DECODER, encoder_layers=1, decoder_layers=2))
    found = infer_architecture(model, "pegasus")
    assert found is not None
    assert (found.encoder_blocks, found.decoder_blocks) == (("model.encoder.layers",), "model.decoder.layers")
    assert [block.name for block in decoder_blocks(model, found)] == [
        "model.encoder.layers.0",
        "model.decoder.layers.0",
        "model.decoder.layers.1",
    ]
    assert found.exclude_layers_name == ("lm_head",)


def test_blocks_that_are_passed_several_times_are_one_block(caplog: pytest.LogCaptureFixture) -> None:
    config = AlbertConfig(**SMALL, intermediate_size=64, embedding_size=32)
    model = AlbertForMaskedLM(config)
    assert infer_architecture(model, "albert") is None
    assert {"predictions.dense", "predictions.decoder"} <= set(template_of(model).exclude_layers_name)
    assert "blocks           unknown: the whole model is one block" in caplog.text


def test_what_is_no_model_of_transformers_has_no_template() -> None:
    with pytest.raises(UnknownNameError, match="no model template defined"):
        template_of(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("model", "blocks", "head"),
    [
        (LlamaModel(LlamaConfig(**SMALL, intermediate_size=64)), ("layers",), None),
        (LlamaForSequenceClassification(LlamaConfig(**SMALL, intermediate_size=64)), ("model.layers",), None),
        (LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64)), ("model.layers",), "lm_head"),
    ],
    ids=["base", "classifier", "language model"],
)
def test_the_facts_about_a_family_have_the_names_of_the_class(model: nn.Module, blocks: tuple[str, ...], head: str | None) -> None:
    known = architecture_of(model)
    assert known is not None
    assert known.block_lists == blocks
    assert len(decoder_blocks(model, known)) == 2
    assert known.embeddings[0] in dict(model.named_modules())
    assert known.final_norm in dict(model.named_modules())
    assert known.head in ("lm_head", head)


def test_the_names_of_a_family_are_found_below_other_modules_and_without_its_decoder() -> None:
    facts = Architecture(model_type="t5", encoder_blocks="encoder.block", decoder_blocks="decoder.block", head="lm_head")
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    alone = fitted(facts, T5EncoderModel(config))
    assert alone is not None
    assert (alone.block_lists, alone.decoder_blocks, alone.head) == (("encoder.block",), None, None)
    below = fitted(facts, T5ForSequenceClassification(config))
    assert below is not None
    assert below.block_lists == ("transformer.encoder.block", "transformer.decoder.block")
    assert fitted(facts, BertForMaskedLM(BertConfig(**SMALL, intermediate_size=64))) is None


@pytest.mark.parametrize("kind", [BartForCausalLM, WhisperForCausalLM])
def test_a_decoder_without_its_encoder_has_its_blocks_once(kind: Any) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    model = kind(kind.config_class(**sizes, encoder_layers=0, pad_token_id=0))
    facts = architecture_of(model)
    assert facts is not None
    assert (facts.encoder_blocks, facts.decoder_blocks) == ((), "model.decoder.layers")
    assert [block.name for block in decoder_blocks(model, facts)] == ["model.decoder.layers.0", "model.decoder.layers.1"]


def test_the_plan_says_that_blocks_were_inferred() -> None:
    layer = schemes().load_config("int4_wo_32")()
    plan = ModelQuantizer(QConfig(global_quant_config=layer, exclude=["lm_head"])).plan(persimmon())
    assert any("a template for the model type 'persimmon'" in note and "'model.layers'" in note for note in plan.notes)


def test_layers_outside_the_blocks_stay_float() -> None:
    model = BertForMaskedLM(BertConfig(**SMALL, intermediate_size=64))
    found = infer_architecture(model, "bert")
    assert found is not None
    assert found.decoder_blocks == "bert.encoder.layer"
    assert {"cls.predictions.transform.dense", "cls.predictions.decoder"} <= set(found.exclude_layers_name)


def paligemma(layers: int = 2) -> PaliGemmaForConditionalGeneration:
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "image_size": 16}
    text = {"model_type": "gemma", **SMALL, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 8}
    config = PaliGemmaConfig(vision_config=vision | {"num_attention_heads": 4, "patch_size": 8}, text_config=text, projection_dim=32)
    config.text_config.num_hidden_layers = layers
    torch.manual_seed(0)
    return PaliGemmaForConditionalGeneration(config).eval()


def test_beside_a_vision_tower_the_blocks_are_those_of_the_language_model(tmp_path: Path) -> None:
    model = paligemma()
    found = architecture_of(model)
    assert found is not None
    assert found.decoder_blocks == "model.language_model.layers"
    assert "model.vision_tower.*" in found.exclude_layers_name
    config = template_of(model).get_config("int4_wo_32", algorithm=["gptq"])
    data = [{"input_ids": torch.arange(3, 19)[None]}] * 2
    quantized = ModelQuantizer(config).quantize_model(model, data)
    names = {name for name, module in quantized.named_modules() if isinstance(module, QuantizedLayer)}
    assert len(names) == 14
    assert all(name.startswith("model.language_model.layers.") for name in names)
    export_safetensors(quantized, tmp_path)
    reloaded = import_model_from_safetensors(None, tmp_path, device="cpu")
    with torch.no_grad():
        assert torch.equal(reloaded(**data[0]).logits, quantized(**data[0]).logits)


def test_a_language_model_of_another_length_than_its_config_says_is_one_block() -> None:
    model = paligemma()
    model.config.text_config.num_hidden_layers = 3
    assert infer_architecture(model, "paligemma") is None


def test_a_module_that_is_no_language_model_has_no_architecture() -> None:
    assert architecture_of(nn.Sequential(nn.Linear(4, 4))) is None
    assert infer_architecture(nn.ModuleList([nn.Linear(4, 4)]), "x") is None


class Routed(nn.Module):
    """A language model that no library has: two blocks, each with a gate beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        names = ("query_key_value", "gate", "up_proj")
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(4, 4) for name in names}) for _ in range(2))
        self.config = SimpleNamespace(num_hidden_layers=2)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_routers_of_an_unknown_family_stay_float() -> None:
    model = Routed()
    found = infer_architecture(model, "routed")
    assert found is not None
    config = QConfig(global_quant_config=schemes().load_config("int4_wo_per_channel")(), exclude=list(found.exclude_layers_name))
    plan = ModelQuantizer(config).plan(model)
    assert {row.name.rpartition(".")[2] for row in plan.quantized} == {"query_key_value", "up_proj"}


class StackedExperts(nn.Module):
    """Six experts, whose matrices are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(6, 8, 4))


class Mixture(nn.Module):
    """A mixture of six experts, whose router has no telling name."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.pick = nn.ModuleDict({"wg": nn.Linear(4, 6), "wide": nn.Linear(4, 8)})
        self.parts = experts


@pytest.mark.parametrize("experts", [StackedExperts, lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(6))])
def test_a_layer_as_wide_as_there_are_experts_beside_it_is_a_router(experts: Callable[[], nn.Module]) -> None:
    model = Routed()
    for block in model.blocks:
        block["mixture"] = Mixture(experts())  # type: ignore[index]
        block["other"] = nn.Linear(4, 6)  # type: ignore[index]  # as wide, and not beside them
    found = infer_architecture(model, "routed")
    assert found is not None
    config = QConfig(global_quant_config=schemes().load_config("int4_wo_per_channel")(), exclude=list(found.exclude_layers_name))
    names = {row.name.partition(".")[2].partition(".")[2] for row in ModelQuantizer(config).plan(model).quantized}
    assert names >= {"query_key_value", "up_proj", "other", "mixture.pick.wide"}
    assert "mixture.pick.wg" not in names
    named = attrs.evolve(config, exclude=["head"], layer_quant_config={"*.wg": config.global_quant_config})
    assert "blocks.0.mixture.pick.wg" in {row.name for row in ModelQuantizer(named).plan(model).quantized}
