"""A quantized checkpoint as a source.

The result has the bytes of that of a float checkpoint with the same values.

The float checkpoint is made of the quantized one by numpy in the tests' own code, or by transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quark.checkpoint import export_safetensors, import_model_from_safetensors
from quark.errors import CheckpointError, ConfigError
from quark.models.hf.skeleton import meta_model
from quark.runs import quantize_checkpoint
from quark.runs.selected_algorithms import Algorithms
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.weight_convert import Chunk, WeightConverter
from quark_devkit.small_models import batches
from quark_tiny_model import tiny_model_dir

DTYPE = torch.bfloat16
ODD = LlamaConfig(
    vocab_size=96,
    hidden_size=160,
    intermediate_size=200,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=40,
    tie_word_embeddings=False,
)
"""A model whose matrices blocks of 128 do not divide."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float checkpoint in bfloat16, in two files."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("llama") / "float"
    LlamaForCausalLM(ODD).to(DTYPE).save_pretrained(directory, max_shard_size="500KB")
    return directory


def rewritten(source: Path, out: Path, change: Callable[[str, Tensor], dict[str, Tensor]], block: dict[str, Any] | None) -> Path:
    """A copy of a checkpoint with each tensor replaced by others, in one file.

    It has that ``quantization_config``.
    """
    out.mkdir()
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors |= change(name, tensor)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | ({} if block is None else {"quantization_config": block})))
    return out


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight") and "layers.1.mlp.up_proj" not in name


def fp8_blocks(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 codes with a scale for each block of 128 x 128, and their values.

    These are computed in float64 block by block.
    """
    codes, scale = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty([-(-n // 128) for n in tensor.shape])
    values = np.empty(tensor.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = tensor[at].float().abs().max() / 448
            codes[at] = (tensor[at].float() / scale[i, j]).to(torch.float8_e4m3fn)
            values[at] = codes[at].float().double().numpy() * float(scale[i, j])
    return {name: codes, f"{name}_scale_inv": scale}, torch.from_numpy(values.astype(np.float32)).to(tensor.dtype)


def fp8_tensor(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = tensor.float().abs().max() / 448
    codes = (tensor.float() / scale).to(torch.float8_e4m3fn)
    beside = {f"{name}_scale": scale, name.replace("weight", "input_scale"): torch.ones(())}
    return {name: codes, **beside}, torch.from_numpy((codes.double().numpy() * float(scale)).astype(np.float32)).to(tensor.dtype)


def int4_groups(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Asymmetric codes of 4 bits in groups of 8 columns, packed by numpy."""
    rows, columns = tensor.shape
    groups = tensor.float().numpy().reshape(rows, -1, 8)
    scale = ((groups.max(-1) - groups.min(-1)) / 15).astype(np.float32)
    zero = np.clip(np.round(-groups.min(-1) / scale) - 8, -8, 7)
    codes = np.clip(np.round(groups / scale[..., None]) + zero[..., None], -8, 7)
    values = (codes - zero[..., None]).astype(np.float64) * scale[..., None]

    def packed(matrix: np.ndarray) -> np.ndarray:
        padded = np.pad(matrix + 8, ((0, 0), (0, -matrix.shape[1] % 8))).astype(np.uint64).reshape(len(matrix), -1, 8)
        return (padded << (4 * np.arange(8, dtype=np.uint64))).sum(-1).astype(np.uint32).view(np.int32)

    stored = {
        f"{name}_packed": torch.from_numpy(packed(codes.reshape(rows, columns))),
        f"{name}_scale": torch.from_numpy(scale),
        f"{name}_zero_point": torch.from_numpy(np.ascontiguousarray(packed(zero.T).T)),
        f"{name}_shape": torch.tensor([rows, columns]),
    }
    return stored, torch.from_numpy(values.reshape(rows, columns).astype(np.float32)).to(tensor.dtype)


INT4_BLOCK = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False}}
    },
    "ignore": ["lm_head", "model.layers.1.mlp.up_proj"],
}
SOURCES: dict[str, tuple[Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]], dict[str, Any]]] = {
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}),
    "fp8 tensors": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "compressed-tensors int4": (int4_groups, INT4_BLOCK),
}


def pair(kind: str, source: Path, directory: Path) -> tuple[Path, Path]:
    """A quantized checkpoint, and the float one with its values."""
    quantize, block = SOURCES[kind]
    codes = rewritten(source, directory / "codes", lambda n, t: quantize(n, t)[0] if is_quantized(n) else {n: t}, block)
    floats = rewritten(source, directory / "floats", lambda n, t: {n: quantize(n, t)[1] if is_quantized(n) else t}, None)
    return codes, floats


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "quark_run.json"}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("algorithm", [None, "gptq"])
def test_the_result_is_that_of_the_float_checkpoint_with_its_values(
    kind: str, algorithm: str | None, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes, floats = pair(kind, llama, tmp_path)
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_per_channel", algorithm=algorithm)
    data = batches() if algorithm else None
    quantize_checkpoint(codes, tmp_path / "from_codes", config, data)
    assert "no place for" not in caplog.text, "scales are taken for tensors of the model"
    quantize_checkpoint(floats, tmp_path / "from_floats", config, data)
    assert contents(tmp_path / "from_codes") == contents(tmp_path / "from_floats")


def test_the_whole_model_is_read_likewise_where_it_has_to_be_in_memory(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Algorithms, "works_by_block", property(lambda _: False))
    codes, floats = pair("fp8 blocks", llama, tmp_path)
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_per_channel")
    for source in (codes, floats):
        quantize_checkpoint(source, tmp_path / f"{source.name}_out", config)
    assert contents(tmp_path / "codes_out") == contents(tmp_path / "floats_out")


def test_nothing_of_the_source_is_left_in_the_config(llama: Path, tmp_path: Path) -> None:
    codes, _ = pair("fp8 blocks", llama, tmp_path)
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_per_channel")
    quantize_checkpoint(codes, tmp_path / "out", config)
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block["quant_method"] == "quark"
    assert not block.keys() & {"weight_block_size", "modules_to_not_convert"}
    assert not hasattr(meta_model(codes).config, "quantization_config")


def test_the_values_are_those_that_transformers_loads(llama: Path, tmp_path: Path) -> None:
    """FP8 in blocks that divide: transformers refuses others."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**ODD.to_dict() | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64})).save_pretrained(
        tmp_path / "even"
    )
    codes, floats = pair("fp8 blocks", tmp_path / "even", tmp_path)
    pytest.importorskip("accelerate", reason="transformers wants it to load FP8")
    loaded = AutoModelForCausalLM.from_pretrained(codes).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in load_file(floats / "model.safetensors").items())


def test_experts_of_gpt_oss_are_dequantized(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    model = GptOssForCausalLM(GptOssConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)).to(DTYPE)
    model.save_pretrained(tmp_path / "float")
    generator = torch.Generator().manual_seed(0)

    def packed(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:-1], generator=generator).byte()
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales, dtype=tensor.dtype)

    is_expert = {n: packed(n, t) for n, t in model.state_dict().items() if n.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(is_expert) == 4
    block = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    codes = rewritten(tmp_path / "float", tmp_path / "codes", lambda n, t: is_expert[n][0] if n in is_expert else {n: t}, block)
    floats = rewritten(tmp_path / "float", tmp_path / "floats", lambda n, t: {n: is_expert[n][1] if n in is_expert else t}, None)
    config = LLMTemplate.get("gpt_oss").get_config(scheme="fp8")
    for source in (codes, floats):
        quantize_checkpoint(source, tmp_path / f"{source.name}_out", config, batches())
    assert contents(tmp_path / "codes_out") == contents(tmp_path / "floats_out")


def test_an_export_can_be_quantized_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (LLMTemplate.get("llama").get_config(scheme=scheme) for scheme in ("int4_wo_64", "ptpc_fp8"))
    quantize_checkpoint(tiny_model_dir(), tmp_path / "first", first)
    quantize_checkpoint(tmp_path / "first", tmp_path / "second", second)
    assert "a second rounding adds to this error" in caplog.text
    loaded = import_model_from_safetensors(None, tmp_path / "first", device="cpu").state_dict()
    rounded = AutoModelForCausalLM.from_pretrained(tiny_model_dir(), dtype="auto")
    rounded.load_state_dict({name: loaded[name] for name in rounded.state_dict()})
    export_safetensors(ModelQuantizer(second).quantize_model(rounded), tmp_path / "expected")
    expected, result = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "second"))
    assert expected.keys() == result.keys()
    assert all(torch.equal(tensor.view(torch.uint8), result[name].view(torch.uint8)) for name, tensor in expected.items())


def test_weight_converters_are_applied_to_the_float_tensors(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gate and up are stored as one FP8 matrix.

    Each of the two comes out as its part of the dequantized one, quantized or not.
    """
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = {name: tensor for file in llama.glob("*.safetensors") for name, tensor in load_file(file).items()}
    parts = {name: tensor for name, tensor in tensors.items() if name.endswith(("gate_proj.weight", "up_proj.weight"))}

    def fused(name: str, _: Tensor) -> tuple[str, Tensor]:
        stem = name.replace("gate_proj.weight", "")
        return f"{stem}gate_up_proj.weight", torch.cat([parts[name], parts[f"{stem}up_proj.weight"]])

    def codes_of(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name.endswith("up_proj.weight"):
            return {}
        return fp8_blocks(*fused(name, tensor))[0] if name in parts else {name: tensor}

    def floats_of(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name.endswith("up_proj.weight"):
            return {}
        if name not in parts:
            return {name: tensor}
        gate, up = fp8_blocks(*fused(name, tensor))[1].chunk(2)
        return {name: gate, name.replace("gate_proj", "up_proj"): up.clone()}

    codes = rewritten(llama, tmp_path / "codes", codes_of, block)
    floats = rewritten(llama, tmp_path / "floats", floats_of, None)
    converter = WeightConverter("gate_up_proj.weight", ["gate_proj.weight", "up_proj.weight"], operations=[Chunk(dim=0)])
    for name, exclude in (("all", ["lm_head"]), ("without_gate", ["lm_head", "*gate_proj"])):
        config = LLMTemplate.get("llama").get_config(scheme="int4_wo_per_channel", exclude_layers=exclude)
        quantizer = ModelQuantizer(config)
        quantizer.direct_quantize_checkpoint(codes, tmp_path / name, True, device="cpu", weight_converters=[converter])
        quantizer.direct_quantize_checkpoint(floats, tmp_path / f"{name}_from_floats", True, device="cpu")
        assert contents(tmp_path / name) == contents(tmp_path / f"{name}_from_floats")
    assert "layer(s) are quantized in the source but written dequantized" in caplog.text


@pytest.mark.parametrize("where", ["config", "text_config"])
def test_an_unknown_method_is_refused_with_those_that_are_known(where: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir(), tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    block = {"quantization_config": {"quant_method": "aqlm"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | (block if where == "config" else {"text_config": block})))
    with pytest.raises(ConfigError, match=r"quant_method 'aqlm', which no installed layout dequantizes .*'compressed-tensors'.*'fp8'"):
        meta_model(tmp_path / "source")


def test_codes_without_scales_are_refused(llama: Path, tmp_path: Path) -> None:
    def without(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor.to(torch.float8_e4m3fn)} if name == "model.layers.1.mlp.up_proj.weight" else {name: tensor}

    source = rewritten(llama, tmp_path / "codes", without, {"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.1\.mlp\.up_proj\.weight as codes of 8 bits, but no scales"):
        quantize_checkpoint(source, tmp_path / "out", LLMTemplate.get("llama").get_config(scheme="int4_wo_per_channel"))
    assert not (tmp_path / "out").exists()
