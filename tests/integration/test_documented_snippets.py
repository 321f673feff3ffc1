"""Code blocks of the documentation, run with another model path, data and device (``snippets/``).

A block is the text of a file there; what is exchanged in it is listed at each test, and has to occur in it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quark
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError, UnknownNameError
from quark.models.layers import is_quantized
from quark.torch import LLMTemplate, ModelQuantizer
from quark_tiny_model import calibration_batches, tiny_model, tiny_model_dir

SNIPPETS = Path(__file__).with_name("snippets")
TEXTS = ["In the beginning was the word, and the word was quantized.", "A second sentence of another length."]


def run(name: str, namespace: dict[str, Any], exchanged: dict[str, str] | None = None) -> dict[str, Any]:
    """Run one block in a namespace, which keeps its definitions."""
    text = (SNIPPETS / f"{name}.py").read_text(encoding="utf-8")
    for old, new in (exchanged or {}).items():
        assert old in text, f"{name} does not contain {old!r}"
        text = text.replace(old, new)
    exec(compile(text, f"{name}.py", "exec"), namespace)
    return namespace


def quantized_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_quantized(module)]


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    yield
    for registry in (quark.schemes(), quark.templates()):
        for name in registry.run_time_names():
            registry.unregister(name)


def test_templates_are_listed_and_make_an_fp8_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    config = run("templates_get", {})["config"]
    assert {"llama", "opt", "mistral"} <= set(json.loads(capsys.readouterr().out.replace("'", '"')))
    assert list(config.kv_cache_quant_config) == ["*k_proj", "*v_proj"]
    model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 32))
    assert len(quantized_names(model)) == 21


def test_the_block_with_every_option_works_and_norms_stay_float(caplog: pytest.LogCaptureFixture) -> None:
    config = run("templates_options", {"nn": nn})["config"]
    assert config.min_kv_scale == 1.0
    assert config.layer_type_quant_config[nn.LayerNorm].weight.dtype.name == "fp8_e4m3"
    assert isinstance(config.softmax_quant_spec, QTensorConfig)
    model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 32))
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "layer_type_quant_config" in r.getMessage())
    assert "layer_type_quant_config names LayerNorm, but this type has no weight matrix" in warning
    plan = model.quark_plan
    assert {r.algorithm for r in plan.quantized} == {"awq"}
    assert {r.config.weight.dtype.name for r in plan.quantized if "mlp" in r.name and r.config} == {"fp4"}  # type: ignore[union-attr]


def test_a_new_template_is_made_with_the_older_keywords() -> None:
    config = run("templates_new", {})["config"]
    assert config.exclude == ["lm_head"]
    assert list(config.kv_cache_quant_config) == ["*kv_b_proj"]
    assert LLMTemplate.get("kimi_k2").kv_layers_name == ["*kv_b_proj"]


def test_a_custom_scheme_is_registered_and_used() -> None:
    config = run("templates_custom_scheme", {})["config"]
    model = ModelQuantizer(config).quantize_model(tiny_model())
    assert len(quantized_names(model)) == 21
    LLMTemplate.unregister_scheme("custom_int8_wo")
    with pytest.raises(UnknownNameError):
        LLMTemplate.get("llama").get_config(scheme="custom_int8_wo")


def test_the_configuration_steps_of_2024_run_from_specs_to_a_quantized_model() -> None:
    # The page uses Config and replace without importing them.
    from quark.torch.quantization.config.config import Config

    namespace: dict[str, Any] = {"Config": Config, "replace": replace}
    for step in (1, 2, 3, 4):
        run(f"config_step_{step}", namespace)
    assert namespace["ALGORITHM_CONFIG"].damp_percent == 0.01
    assert namespace["UINT4_PER_GROUP_ASYM_SPEC"].group_size == 128
    namespace |= {"model": tiny_model(), "calib_dataloader": calibration_batches(2, 16)}
    run("config_step_5", namespace)
    assert len(quantized_names(namespace["quant_model"])) == 22


def test_an_algorithm_object_of_2024_is_taken_and_runs() -> None:
    from quark.torch.quantization.config.config import Config

    namespace: dict[str, Any] = {"Config": Config, "replace": replace}
    for step in (1, 2, 3):
        run(f"config_step_{step}", namespace)
    config = Config(global_quant_config=namespace["W_UINT4_PER_GROUP_CONFIG"], algo_config=namespace["ALGORITHM_CONFIG"])
    assert config.algo_config == [namespace["ALGORITHM_CONFIG"]]
    with pytest.raises(CalibrationError, match="needed by the algorithm 'gptq'"):
        ModelQuantizer(config).quantize_model(tiny_model())
    model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 32))
    by_gptq = {row.name.rsplit(".", 1)[-1] for row in model.quark_plan.rows if row.algorithm == "gptq"}
    assert by_gptq == {name.rsplit(".", 1)[-1] for name in namespace["ALGORITHM_CONFIG"].inside_layer_modules}


@pytest.fixture
def vllm_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The namespace after the page's first three blocks; the algorithm's file is read, as the page has it."""
    monkeypatch.chdir(tmp_path)
    algorithm = tmp_path / "autosmoothquant.json"
    algorithm.write_text(json.dumps({"name": "autosmoothquant", "num_attention_heads": 4, "model_decoder_layers": "model.layers"}))
    (tmp_path / "org").mkdir()
    shutil.copytree(tiny_model_dir(), tmp_path / "org" / "tiny")
    namespace: dict[str, Any] = {"TEXTS": TEXTS}
    run("vllm_1_load", namespace, {"meta-llama/Llama-2-70b-chat-hf": "org/tiny", '    device_map="auto",\n': ""})
    data = {
        "from datasets import load_dataset\n": "",
        'dataset = load_dataset("mit-han-lab/pile-val-backup", split="validation")': 'dataset = {"text": TEXTS}',
    }
    run("vllm_2_data", namespace, data)
    file = "examples/torch/language_modeling/llm_ptq/models/llama/autosmoothquant_config.json"
    return run("vllm_3_config", namespace, {file: str(algorithm)})


def test_the_vllm_page_quantizes_by_its_algorithm_from_a_file_and_exports(vllm_page: dict[str, Any]) -> None:
    from quark.torch import import_model_from_safetensors

    assert [a.name for a in vllm_page["quant_config"].algo_config] == ["autosmoothquant"]
    run("vllm_4_quantize", vllm_page)
    validated = [f for f in vllm_page["quant_model"].quark_report.transformed.values() if "applied" in f]
    assert len(validated) == 3
    folder = Path(vllm_page["EXPORT_DIR"])
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "quark"
    assert written["export"]["kv_cache_group"]
    assert (folder / "tokenizer.json").is_file()
    again = import_model_from_safetensors(None, str(folder), device="cpu")
    ids = calibration_batches(1, 16)[0]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, vllm_page["freezed_model"](ids).logits)


@pytest.fixture
def tiny_opt(tmp_path: Path) -> Path:
    """A randomly initialised OPT on disk, with the bundled tokenizer."""
    from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": 1024, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    AutoTokenizer.from_pretrained(tiny_model_dir()).save_pretrained(tmp_path / "opt")
    return tmp_path / "opt"


def test_the_overviews_basic_example_quantizes_opt_and_says_so(tiny_opt: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quark"):
        namespace = run("overview_basic", {}, {"facebook/opt-125m": str(tiny_opt)})
    assert "Model quantization has been completed." in caplog.text
    assert len(quantized_names(namespace["quant_model"])) == 13
    assert namespace["quant_model"] is namespace["model"]
