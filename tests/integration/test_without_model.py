"""Checkpoints that are quantized without their models: the same bytes as with the class, and nothing runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quark.checkpoint.inspection import inspect_checkpoint
from quark.errors import CheckpointError, QuarkError
from quark.models.hf.internals import kept_in_float32
from quark.models.hf.skeleton import meta_model
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import architecture_of, template_of
from quark.plugins import templates
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_devkit.whole_runs import interrupted_behind
from quark_tiny_model import tiny_model_dir
from quark_workbench.without_model import named_model, quantize_without_model

from .interrupted import BLOCKS, checkpoint
from .program import run

TEXT: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MIXTURE = {**TEXT, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
IMAGE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
TWO_STACKS = {
    **{"vocab_size": 128, "d_model": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
}


@attrs.frozen
class Family:
    """A family of transformers.

    Attributes:
        model: Its class.
        config: The class of its configuration.
        values: Of the configuration.
        renamed: Beginnings of names in the class, and what they are in its checkpoints.
    """

    model: str
    config: str
    values: Mapping[str, Any]
    renamed: Mapping[str, str] = {}


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", TEXT),
    "qwen 2, with biases": Family("Qwen2ForCausalLM", "Qwen2Config", TEXT),
    "gemma 3, with a tied head": Family("Gemma3ForCausalLM", "Gemma3TextConfig", TEXT),
    "bert, an encoder": Family("BertForMaskedLM", "BertConfig", TEXT),
    "gpt-2, with transposed weights": Family(
        "GPT2LMHeadModel", "GPT2Config", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    ),
    "falcon, with one matrix for queries, keys and values": Family(
        "FalconForCausalLM", "FalconConfig", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ),
    "qwen 3, a mixture stored by expert": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MIXTURE),
    "gpt-oss, a mixture with stacked experts in turns": Family("GptOssForCausalLM", "GptOssConfig", MIXTURE),
    "llama 4, a mixture with stacked experts": Family(
        "Llama4ForCausalLM", "Llama4TextConfig", MIXTURE | {"intermediate_size_mlp": 128, "num_experts_per_tok": 1}
    ),
    "deepseek 3, with dense and sparse blocks": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        MIXTURE
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32}
        | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1},
    ),
    "t5, with an encoder": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "whisper, with sound": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        TWO_STACKS | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    ),
    "llava, with a vision tower": Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **IMAGE}},
        {"lm_head.": "language_model.lm_head.", "model.language_model.": "language_model.model.", "model.": ""},
    ),
}


def stored(family: Family, directory: Path) -> Path:
    """Return a checkpoint of a family with random weights in bfloat16."""
    torch.manual_seed(0)
    model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.values))
    in_float32 = kept_in_float32(model.to(torch.bfloat16), torch.bfloat16)  # as published checkpoints store them
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.float() if name in in_float32 else tensor.data
    model.save_pretrained(directory)
    return directory


def tensors(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def as_stored(name: str, family: Family) -> str:
    stem = next((stem for stem in family.renamed if name.startswith(stem)), "")
    return family.renamed.get(stem, "") + name.removeprefix(stem)


@pytest.mark.parametrize("scheme", ["int4_wo_32", "ptpc_fp8", "mxfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_are_those_that_the_class_gives_byte_by_byte(family: str, scheme: str, tmp_path: Path) -> None:
    one = FAMILIES[family]
    source = stored(one, tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "class", template_of(meta_model(source)).get_config(scheme=scheme))
    quantize_without_model(source, tmp_path / "names", scheme)
    wanted = {as_stored(name, one): tensor for name, tensor in tensors(tmp_path / "class").items()}
    given = tensors(tmp_path / "names")
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (given[name].dtype, given[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(given[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert any(name.endswith("scale") for name in given)  # something is quantized
    configs = [json.loads((tmp_path / out / "config.json").read_text()) for out in ("class", "names")]
    wanted_config, given_config = (config.pop("quantization_config") for config in configs)
    assert given_config["global_quant_config"] == wanted_config["global_quant_config"]
    assert set(given_config["exclude"]) >= {as_stored(name, one) for name in wanted_config["exclude"]} & layers_of(source)


def test_of_a_tied_head_too_no_memory_is_taken_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stored(FAMILIES["gemma 3, with a tied head"], tmp_path / "source")
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda layer: pytest.fail("memory") if not layer.weight.is_meta else None)
    model = named_model(source)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def layers_of(source: Path) -> set[str]:
    return {name.removesuffix(".weight") for name in tensors(source)}


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """A checkpoint with two towers, stacked experts and a layer that predicts ahead, of code of its own."""
    source, generator = tmp_path / "unknown", torch.Generator().manual_seed(0)
    block = {"attn.q.weight": (64, 64), "attn.q_norm.weight": (64,), "mlp.experts.w13_weight": (4, 128, 64), "mlp.router.weight": (4, 64)}
    block |= {"mlp.experts.w2_weight": (4, 64, 64), "mlp.score.weight": (4, 64), "mlp.shared.gate.weight": (1, 64)}
    shapes: dict[str, tuple[int, ...]] = {"lm.tok_embeddings.weight": (128, 64), "lm.norm.weight": (64,), "output.weight": (128, 64)}
    shapes |= {f"lm.blocks.{number}.{name}": shape for number in range(3) for name, shape in block.items()}
    shapes |= {f"image_encoder.layers.{number}.fc1.weight": (64, 64) for number in range(2)}
    shapes |= {"mtp.fc.weight": (64, 128), "projector.weight": (64, 64), "lm.conv.weight": (64, 1, 4)}
    source.mkdir()
    values = {name: torch.randn(shape, generator=generator, dtype=torch.bfloat16) for name, shape in shapes.items()}
    values |= {"lm.router_bias": torch.randn(4, generator=generator), "lm.position_ids": torch.arange(8)}
    save_file(values, source / "model.safetensors")
    config = {
        **{"model_type": "day_zero", "architectures": ["DayZeroForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64},
        **{"vocab_size": 128, "dtype": "bfloat16", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}},
        **{"attn_implementation": "owner/kernel", "tie_word_embeddings": False},
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "code.py").write_text(f"open({str(tmp_path / 'it has run')!r}, 'w')")
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.T", None]}}))
    return source


EXPERTS = [f"mlp.experts.{number}.{name}" for number in range(4) for name in ("w13", "w2")]
QUANTIZED = {f"lm.blocks.{number}.{name}" for number in range(2) for name in ("attn.q", *EXPERTS)}
STACKED = tuple(f"lm.blocks.{number}.mlp.experts" for number in range(2))


def test_of_an_unknown_family_what_is_sure_to_multiply_is_quantized_and_no_code_runs(unknown: Path, tmp_path: Path) -> None:
    plan = quantize_without_model(unknown, tmp_path / "out", "int4_wo_32")
    assert {row.name for row in plan.quantized} == QUANTIZED
    result, source = tensors(tmp_path / "out"), tensors(unknown)
    for name in (name for name in source if name.removesuffix(".weight") not in QUANTIZED and not name.startswith(STACKED)):
        assert torch.equal(result[name], source[name]), name
        assert result[name].dtype == source[name].dtype, name
    config, before = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "out", unknown))
    exclude = config.pop("quantization_config")["exclude"]
    assert config == before
    assert {"output", "projector", "mtp.fc", "lm.blocks.0.mlp.router", "lm.blocks.0.mlp.score", "lm.blocks.2.attn.q"} <= set(exclude)
    assert (tmp_path / "out" / "code.py").is_file()
    assert not (tmp_path / "it has run").exists()


def test_a_result_is_inspected_by_names_and_shapes(
    unknown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    quantize_without_model(unknown, out, "int4_wo_32")
    assert run("inspect", out, "--without-model", monkeypatch=monkeypatch) == 0
    assert "vllm_cuda" in capsys.readouterr().out
    assert run("inspect", out, "--without-model", "--trust-remote-code", monkeypatch=monkeypatch) != 0
    assert "leave out --trust-remote-code" in capsys.readouterr().err
    assert run("inspect", out, monkeypatch=monkeypatch) != 0
    assert "give --trust-remote-code" in capsys.readouterr().err
    stored = load_file(out / "model.safetensors")
    del stored["lm.blocks.0.attn.q.weight_scale"]
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    assert run("inspect", out, "--without-model", monkeypatch=monkeypatch) != 0
    assert "lm.blocks.0.attn.q.weight_scale" in capsys.readouterr().err
    assert not (tmp_path / "it has run").exists()


@pytest.mark.parametrize("scheme", ["int4_wo_32", "mxfp4", "ptpc_fp8"])
def test_an_inspection_by_names_finds_what_that_of_the_class_does(scheme: str, tmp_path: Path) -> None:
    quantize_without_model(tiny_model_dir(), tmp_path / "out", scheme)
    by_class, by_names = (inspect_checkpoint(tmp_path / "out", build=build) for build in (None, named_model))
    assert not by_names.damage
    assert by_class.runtimes
    told = [[(one.runtime, {*one.methods}, one.loads, one.own_layers) for one in found.runtimes] for found in (by_class, by_names)]
    assert told[0] == told[1]  # layers are in the order of the files there


def test_the_plan_says_what_names_do_not_tell(unknown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run("plan", unknown, "--scheme", "int4_wo_32", "--without-model", "--no-probe", monkeypatch=monkeypatch) == 0
    text = capsys.readouterr().out
    assert "taken for embeddings: lm.tok_embeddings; for the head: output" in text
    assert "predict more tokens, and stay float unless --layer names them: mtp*, lm.blocks.2.*" in text
    assert "(no matrix called weight): lm.conv.weight" in text
    assert "towers for images and sound stay float" in text


def test_layers_that_predict_ahead_are_quantized_on_request(unknown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ("--layer", "mtp.*=ptpc_fp8", "--layer", "lm.blocks.2.*=ptpc_fp8", "--no-report")
    assert run("quantize", unknown, tmp_path / "out", "--scheme", "int4_wo_32", "--without-model", *layers, monkeypatch=monkeypatch) == 0
    result = tensors(tmp_path / "out")
    assert result["mtp.fc.weight"].dtype == result["lm.blocks.2.attn.q.weight"].dtype == torch.float8_e4m3fn


def test_each_block_is_in_memory_by_itself_those_of_towers_too(unknown: Path) -> None:
    model = named_model(unknown)
    names = [block.name for block in decoder_blocks(model, architecture_of(model))]
    assert names == ["image_encoder.layers.0", "image_encoder.layers.1", "lm.blocks.0", "lm.blocks.1", "lm.blocks.2"]


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    quantize_without_model(source, tmp_path / "once", "int4_wo_32")
    with interrupted_behind(BLOCKS - 1):
        quantize_without_model(source, tmp_path / "out", "int4_wo_32")
    quantize_without_model(source, tmp_path / "out", "int4_wo_32", resume=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "once" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("exporter", ["safetensors", "compressed-tensors", "awq"])
def test_every_layout_that_can_hold_the_layers_takes_them(exporter: str, tmp_path: Path) -> None:
    scheme = "uint4_wo_32" if exporter == "awq" else "int4_wo_32"
    source = checkpoint(tmp_path / "source", hidden_size=128, intermediate_size=256, num_attention_heads=8)
    config = template_of(meta_model(source)).get_config(scheme=scheme)
    quantize_checkpoint(source, tmp_path / "class", config, exporter=exporter)
    quantize_without_model(source, tmp_path / "names", config, exporter=exporter)
    wanted, given = tensors(tmp_path / "class"), tensors(tmp_path / "names")
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8)) for name, t in wanted.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheme", "fp8"), "needs calibration forward passes for activations with static scales"),
        (("--scheme", "int4_wo_32", "--algorithm", "gptq"), "the algorithm 'gptq' needs the outputs of the model"),
        (("--scheme", "int4_wo_32", "--algorithm", "rotation"), "the algorithm 'rotation' needs the outputs of the model"),
        (("--scheme", "int4_wo_32", "--trust-remote-code"), "leave out --mixed"),
        (("--mixed", "int4_wo_32,ptpc_fp8", "--kl-budget", "0.1"), "leave out --mixed"),
    ],
)
def test_what_needs_forwards_is_refused_before_any_work(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    source = checkpoint(tmp_path / "source")
    assert run("quantize", source, tmp_path / "out", "--without-model", *options, monkeypatch=monkeypatch) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_plan_lists_what_refuses_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    source = checkpoint(tmp_path / "source")
    assert run("plan", source, "--without-model", "--scheme", "fp8", "--no-probe", monkeypatch=monkeypatch) == 2
    assert "needs calibration forward passes for activations with static scales" in capsys.readouterr().err


def _without(path: Path) -> None:
    (path / "config.json").unlink()


def _broken(path: Path) -> None:
    (path / "config.json").write_text("{")


def _of_another_type(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": 3}')


def _with_a_name(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "model.safetensors"
        save_file({**load_file(file), name: torch.ones(2, 2)}, file)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, "has no config.json"),
        (_broken, "is no JSON file"),
        (_of_another_type, "has model_type = 3"),
        (_with_a_name(".".join("a" * 40)), "tensors with invalid names"),
        (_with_a_name("model.norm"), "tensors with invalid names"),
        (_with_a_name("model..weight"), "tensors with invalid names"),
        (_with_a_name("config.weight"), "tensors with invalid names"),
        (_with_a_name("training"), "tensors with invalid names"),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    damage(source)
    with pytest.raises(CheckpointError, match=message):
        quantize_without_model(source, tmp_path / "out", "int4_wo_32")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def own_templates() -> Iterator[None]:
    """Unregister what a test has registered."""
    before = set(templates().run_time_names())
    yield
    for name in set(templates().run_time_names()) - before:
        templates().unregister(name)


@pytest.mark.usefixtures("own_templates")
def test_a_template_file_says_what_stays_float(unknown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "template.json"
    file.write_text(json.dumps({"model_type": "day_zero", "exclude_layers_name": ["*.attn.q", "output", "projector"]}))
    arguments = ("--scheme", "int4_wo_32", "--without-model", "--template-file", file, "--no-report")
    assert run("quantize", unknown, tmp_path / "out", *arguments, monkeypatch=monkeypatch) == 0
    assert tensors(tmp_path / "out")["lm.blocks.0.attn.q.weight"].dtype == torch.bfloat16
    assert tensors(tmp_path / "out")["image_encoder.layers.0.fc1.weight"].dtype == torch.int32


def test_a_dtype_is_for_tensors_in_the_main_one(unknown: Path, tmp_path: Path) -> None:
    quantize_without_model(unknown, tmp_path / "out", "int4_wo_32", dtype="float32")
    result = tensors(tmp_path / "out")
    assert result["output.weight"].dtype == torch.float32
    assert result["lm.position_ids"].dtype == torch.int64
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_a_quantized_checkpoint_is_quantized_anew(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    quantize_without_model(source, tmp_path / "fp8", "ptpc_fp8")
    quantize_checkpoint(tmp_path / "fp8", tmp_path / "class", LLMTemplate.get("llama").get_config(scheme="int4_wo_32"))
    quantize_without_model(tmp_path / "fp8", tmp_path / "names", "int4_wo_32")
    wanted, given = tensors(tmp_path / "class"), tensors(tmp_path / "names")
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in wanted.items())


def test_a_gguf_file_has_the_tensors_that_the_class_gives(tmp_path: Path) -> None:
    reader = pytest.importorskip("gguf", reason="the extra quark-exporters[gguf] is not installed").GGUFReader
    source = Path(tiny_model_dir())
    config = template_of(meta_model(source)).get_config(scheme="int4_wo_32")
    quantize_checkpoint(source, tmp_path / "class", config, exporter="gguf")
    quantize_without_model(source, tmp_path / "names", config, exporter="gguf")
    wanted, given = ({t.name: t for t in reader(tmp_path / out / "model.gguf").tensors} for out in ("class", "names"))
    assert given.keys() == wanted.keys()
    assert all(given[name].data.tobytes() == tensor.data.tobytes() for name, tensor in wanted.items())


def test_a_layout_that_is_a_graph_is_refused_before_any_work(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="the extra quark-exporters[onnx] is not installed")
    with pytest.raises(QuarkError, match="without-model"):
        quantize_without_model(tiny_model_dir(), tmp_path / "out", "int4_wo_32", exporter="onnx")
    assert not (tmp_path / "out").exists()
