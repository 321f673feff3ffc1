"""Record golden files from GPTQModel: quantized layers in three forms of GPTQ's format, and their weights.

    python tools/record_gptqmodel.py plugins/quark_exporters/tests/gptq/golden_gptqmodel

The script needs gptqmodel 7.7. After torch, setuptools and ninja, ``BUILD_CUDA_EXT=0 pip install
--no-build-isolation gptqmodel==7.7.0`` installs gptqmodel without a GPU. On a machine with two CPU cores,
GPTQModel raises an error unless the environment variable ``GPTQMODEL_CPU_WORKERS`` is 2 or more.

GPTQModel rounds, packs and writes each checkpoint on a CPU. The script keeps the tensors of the quantized
layers and the ``quantization_config``. GPTQModel then loads the checkpoint, and its torch kernel dequantizes
the weights in float16. ``MANIFEST.json`` has versions and hashes, and the tests check the files against it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGES = ("torch", "transformers", "safetensors", "gptqmodel")
WORDS = 64
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
FLOAT_LAYERS = {"-:.*(q_proj|o_proj|v_proj|gate_proj|up_proj)": {}}
SETTINGS: dict[str, dict[str, Any]] = {
    "int4_symmetric": {"bits": 4, "sym": True},
    "int4_asymmetric": {"bits": 4, "sym": False},
    "int4_desc_act": {"bits": 4, "sym": False, "desc_act": True, "act_group_aware": False},
    "int8_asymmetric": {"bits": 8, "sym": False},
    "int3_asymmetric": {"bits": 3, "sym": False},
    "int5_asymmetric": {"bits": 5, "sym": False},
    "int6_asymmetric": {"bits": 6, "sym": False},
    "int7_asymmetric": {"bits": 7, "sym": False},
    "int2_asymmetric": {"bits": 2, "sym": False},
}
FORMATS = ("gptq", "gptq_v2", "gptq_p")
PLANAR = (3, 5, 6, 7)
"""The numbers of bits for which ``gptq_p`` packs in another way. For 5 to 7 bits, it is the only format."""


def main() -> int:
    """Record the files, and write them to the folder that the command line names."""
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        write_float_model(Path(folder))
        for name, settings in SETTINGS.items():
            record(Path(folder), settings, out / name)
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file() and path.name != "MANIFEST.json")
    hashes = {file: hashlib.sha256((out / file).read_bytes()).hexdigest() for file in files}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    manifest = {"script": "tools/record_gptqmodel.py", "versions": versions, "sha256": hashes}
    (out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


def write_float_model(folder: Path) -> None:
    """Write a random model with a tokenizer. Many rows are almost positive, so that zero points are 0."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).half().eval()
    block = model.model.layers[0]
    for linear in (block.self_attn.k_proj, block.mlp.down_proj):
        linear.weight.data[::2] += 0.04
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="1", bos_token="2", eos_token="3").save_pretrained(folder)


def record(model: Path, settings: dict[str, Any], out: Path) -> None:
    """Write the quantized layers in each form of the format, and the weights that GPTQModel computes.

    Raises:
        ValueError: GPTQModel computes other weights from one form than from another.
    """
    out.mkdir(parents=True, exist_ok=True)
    recorded: dict[str, torch.Tensor] = {}
    forms = [form for form in FORMATS if settings["bits"] in (PLANAR if form == "gptq_p" else (2, 3, 4, 8))]
    for form in forms:
        with tempfile.TemporaryDirectory() as folder:
            quantize(model, settings | {"format": form}, folder)
            tensors = load_file(Path(folder) / "model.safetensors")
            kept = {name: tensor for name, tensor in tensors.items() if name.endswith((".qweight", ".qzeros", ".scales", ".g_idx"))}
            save_file(kept, out / f"{form}.safetensors", {"format": "pt"})
            block = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
            (out / f"{form}.json").write_text(json.dumps(block, indent=1) + "\n")
            weights = dequantized(folder)
        if recorded and any(not torch.equal(recorded[name], weight) for name, weight in weights.items()):
            raise ValueError(f"GPTQModel computes other weights from {form} in {out.name}. Record the weights of each form")
        recorded = weights
    save_file(recorded, out / "weights.safetensors", {"format": "pt"})


def quantize(model: Path, settings: dict[str, Any], folder: str) -> None:
    """Let GPTQModel quantize the model and write the checkpoint."""
    torch.manual_seed(1)
    samples = [{"input_ids": torch.randint(0, WORDS, (32,)).tolist(), "attention_mask": [1] * 32} for _ in range(16)]
    config = QuantizeConfig(group_size=32, device="cpu", offload_to_disk=False, dynamic=dict(FLOAT_LAYERS), **settings)
    quantized = GPTQModel.load(str(model), config, dtype=torch.float16)
    quantized.quantize(samples, batch_size=4)
    quantized.save(folder)


def dequantized(folder: str) -> dict[str, torch.Tensor]:
    """Return the weights ``[O, I]`` that GPTQModel's torch kernel computes from the checkpoint."""
    model = GPTQModel.load(folder, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16).model.eval()
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "dequantize_weight")}
    with torch.no_grad():
        return {f"{name}.weight": layer.dequantize_weight().t().contiguous() for name, layer in layers.items()}


if __name__ == "__main__":
    sys.exit(main())
