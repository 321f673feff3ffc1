"""Record golden files from NVIDIA ModelOpt and bitsandbytes: checkpoints, and logits with the dequantized
weights.

    python tools/record_modelopt_bitsandbytes.py plugins/quark_exporters/tests/golden_sources

The script needs torch, transformers, nvidia-modelopt and bitsandbytes. The two libraries round and write the
checkpoints. The logits are computed with the weights that the libraries dequantize, in float32 on a CPU.
``MANIFEST.json`` has versions and hashes, and the tests check the files against it.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
from pathlib import Path

import bitsandbytes.functional
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config, Qwen2ForCausalLM

PACKAGES = ("torch", "transformers", "safetensors", "nvidia-modelopt", "bitsandbytes")
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
IDS = torch.arange(1, 33)[None]


def main() -> int:
    """Record the files, and write them to the folder that the command line names."""
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS, architectures=["Qwen2ForCausalLM"])).to(torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as folder:
        for name, write in {"fp8": fp8, "nvfp4": nvfp4, "int8": int8}.items():
            write(copy.deepcopy(model), Path(folder) / name)
            record(Path(folder) / name, out / name)
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file() and path.name != "MANIFEST.json")
    hashes = {file: hashlib.sha256((out / file).read_bytes()).hexdigest() for file in files}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    manifest = {"script": "tools/record_modelopt_bitsandbytes.py", "versions": versions, "sha256": hashes}
    (out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


def fp8(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Write a checkpoint in FP8 with ModelOpt."""
    export_hf_checkpoint(mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda quantized: quantized(IDS)), export_dir=folder)


def nvfp4(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Write a checkpoint in NVFP4 with ModelOpt. Input scales are not calibrated, since a CPU cannot do this
    and quark ignores these scales."""
    quantized = mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, None)
    for name, module in quantized.named_modules():
        if name.endswith("input_quantizer") and module.is_enabled:
            module.amax = torch.tensor(3.0)
    export_hf_checkpoint(quantized, export_dir=folder)


def int8(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Write a checkpoint in INT8 with transformers and bitsandbytes."""
    with tempfile.TemporaryDirectory() as source:
        model.save_pretrained(source)
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head"])
        quantized = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, device_map="cpu", dtype=torch.bfloat16)
        quantized.save_pretrained(folder)


def record(folder: Path, out: Path) -> None:
    """Copy a checkpoint, and write the logits that a model with the dequantized weights computes."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", out / "config.json")
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS)).eval()
    values = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.itemsize > 1}
    for name, tensor in tensors.items():
        own = {leaf: tensors.get(f"{name.removesuffix('weight')}{leaf}") for leaf in ("weight_scale", "weight_scale_2", "SCB")}
        if name.endswith(".weight") and tensor.itemsize == 1:
            values[name] = dequantized(tensor, own, model.get_parameter(name).shape)
    model.load_state_dict({name: tensor for name, tensor in values.items() if name in model.state_dict()})  # raises if a weight is missing
    with torch.no_grad():
        save_file({"ids": IDS, "logits": model(IDS).logits.contiguous()}, out / "expected.safetensors")


def dequantized(codes: torch.Tensor, own: dict[str, torch.Tensor | None], shape: torch.Size) -> torch.Tensor:
    """Return the weight that bitsandbytes or ModelOpt dequantizes from the codes."""
    if own["SCB"] is not None:
        return bitsandbytes.functional.int8_vectorwise_dequant(codes, own["SCB"])
    if own["weight_scale_2"] is None:
        return codes.float() * own["weight_scale"]
    scales = {"scale": own["weight_scale"], "double_scale": own["weight_scale_2"], "block_sizes": {-1: 16}}
    return NVFP4QTensor(shape, torch.float32, codes).dequantize(torch.float32, **scales)


if __name__ == "__main__":
    sys.exit(main())
