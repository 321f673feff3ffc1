"""The class of a checkpoint's model is the one that config.json names, or an error names the class."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.inspection import inspect_checkpoint
from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.loading import load_model
from quark.models.hf.model_class import is_of_its_config, model_class
from quark.models.hf.model_config import model_config
from quark.models.hf.skeleton import meta_model, skeleton
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import tiny_model_dir
from quark_workbench.planning.planned_run import plan

FILE = Path("config.json")
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("llama", "LlamaModel"),
        ("llama", "LlamaForSequenceClassification"),
        ("mllama", "MllamaForCausalLM"),
        ("mllama", "MllamaForConditionalGeneration"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("t5", "T5EncoderModel"),  # of no Auto class but for encoders of text
        ("vit", "ViTModel"),
        ("clip", "CLIPVisionModelWithProjection"),
        ("wav2vec2", "Wav2Vec2ForCTC"),
    ],
)
def test_the_class_that_a_config_names_is_built(model_type: str, name: str) -> None:
    assert model_class(AutoConfig.for_model(model_type, architectures=[name]), FILE).type is getattr(transformers, name)


@pytest.mark.skipif("internlm3" not in CONFIG_MAPPING, reason="this transformers has no InternLM3")
def test_a_family_may_have_the_class_of_another() -> None:
    config = AutoConfig.for_model("internlm3", architectures=["LlamaForCausalLM"])
    found = model_class(config, FILE)
    assert (found.type, found.config) == (LlamaForCausalLM, config)


def test_of_several_names_the_first_that_is_known_counts() -> None:
    config = AutoConfig.for_model("llama", architectures=["OfSomeoneElse", "LlamaModel", "LlamaForCausalLM"])
    assert model_class(config, FILE).type.__name__ == "LlamaModel"


def test_a_class_for_a_part_of_a_model_gets_the_config_of_that_part() -> None:
    config = AutoConfig.for_model("clip", architectures=["CLIPVisionModelWithProjection"])
    assert type(model_class(config, FILE).config).__name__ == "CLIPVisionConfig"


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("mistral3", "Mistral3ForConditionalGeneration"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTModel"),
    ],
)
def test_without_a_name_it_is_the_whole_model_that_makes_text_or_the_one_without_a_head(model_type: str, name: str) -> None:
    assert model_class(AutoConfig.for_model(model_type), FILE).type.__name__ == name


@pytest.mark.parametrize("name", ["OfSomeoneElse", "BertForMaskedLM", "AutoModel", "LlamaConfig", "torch"])
def test_a_class_that_is_none_of_the_model_type_is_refused_by_its_name(name: str) -> None:
    config = AutoConfig.for_model("llama", architectures=[name])
    with pytest.raises(UnsupportedError, match=rf"'config.json' names the model class '{name}', which transformers .* model type 'llama'"):
        model_class(config, FILE)


def renamed(directory: Path, *names: str) -> Path:
    shutil.copytree(tiny_model_dir(), directory)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"architectures": list(names)}))
    return directory


ASKING: dict[str, Callable[[Path], Any]] = {
    "config": model_config,
    "on meta": meta_model,
    "from disk": lambda path: skeleton(path, "auto", torch.device("cpu")),
    "loaded": load_model,
    "run": lambda path: quantize_checkpoint(path, path.parent / "out", LLMTemplate.get("llama").get_config("int4_wo_64")),
    "imported": lambda path: import_model_from_safetensors(None, path),
}


@pytest.mark.parametrize("asking", ASKING)
def test_whatever_builds_a_model_refuses_an_unknown_class(asking: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="names the model class 'TinyForEverything'"):
        ASKING[asking](renamed(tmp_path / "source", "TinyForEverything"))


def test_a_plan_says_so_too(tmp_path: Path) -> None:
    refusals = plan(renamed(tmp_path / "source", "TinyForEverything"), "int4_wo_64", probing=False).refusals
    assert any("names the model class 'TinyForEverything'" in refusal.message for refusal in refusals)


def test_another_class_of_the_family_is_refused_for_the_tensors_that_it_lacks_and_loses_none(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("ptpc_fp8")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor\(s\) of a LlamaForSequenceClassification: score\.weight"):
        quantize_checkpoint(renamed(tmp_path / "more", "LlamaForSequenceClassification"), tmp_path / "out", config)
    LlamaForSequenceClassification(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "less")
    values = json.loads((tmp_path / "less/config.json").read_text())
    (tmp_path / "less/config.json").write_text(json.dumps(values | {"architectures": ["LlamaModel"]}))
    quantize_checkpoint(tmp_path / "less", tmp_path / "out", config)
    kept, stored = (load_file(tmp_path / name / "model.safetensors")["score.weight"] for name in ("out", "less"))
    assert torch.equal(kept, stored)


def test_an_export_names_the_class_of_the_model_and_not_of_the_checkpoint_that_it_came_from(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "float")
    model = LlamaForSequenceClassification.from_pretrained(tmp_path / "float").eval()
    assert model.config.architectures == ["LlamaForCausalLM"]
    ModelQuantizer(LLMTemplate.get("llama").get_config("ptpc_fp8")).quantize_model(model)
    export_safetensors(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    read = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    assert type(read) is LlamaForSequenceClassification
    assert not inspect_checkpoint(tmp_path / "out").damage


def test_a_subclass_of_the_named_class_keeps_the_name_that_others_can_load(tmp_path: Path) -> None:
    class Own(LlamaForCausalLM):
        pass

    model: PreTrainedModel = Own(LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"])).eval()
    ModelQuantizer(LLMTemplate.get("llama").get_config("ptpc_fp8")).quantize_model(model)
    export_safetensors(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not is_of_its_config(model)
    assert is_of_its_config(import_model_from_safetensors(None, tmp_path / "out", device="cpu"))
