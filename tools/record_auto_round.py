"""Record golden files from AutoRound: checkpoints in the forms of GPTQ, AutoRound and AWQ, and their logits.

    python tools/record_auto_round.py TINY_MODEL plugins/quark_exporters/tests/gptq/golden

``TINY_MODEL`` is a folder with a tokenizer. The script needs torch, transformers and auto-round 0.16.
AutoRound rounds, packs and writes each checkpoint. AutoRound's own layers compute the logits on a CPU, in
float32. In two of the forms some layers have 2, 3 or 8 bits. ``MANIFEST.json`` has versions and hashes, and
the tests check the files against it.
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

import torch
from auto_round import AutoRound
from auto_round.utils import get_module, set_module
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

PACKAGES = ("torch", "transformers", "safetensors", "auto-round")
GROUP = 32
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
OTHER_BITS = {
    "model.layers.0.mlp.down_proj": {"bits": 8},
    "model.layers.1.mlp.down_proj": {"bits": 3},
    "model.layers.1.self_attn.q_proj": {"bits": 2},
    "model.layers.0.self_attn.o_proj": {"bits": 16},
}
FORMS = {"auto_gptq": ("auto_gptq", True), "auto_round": ("auto_round", False), "awq": ("auto_round:auto_awq", False)}
"""Folder → AutoRound's name of the format, and whether the codes are symmetric."""


def main() -> int:
    """Record the files, and write them to the folder that the command line names."""
    tokenizer, out = AutoTokenizer.from_pretrained(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1, 0.1)  # biases that are not zero
    for name, (form, symmetric) in FORMS.items():
        record(copy.deepcopy(model).half(), tokenizer, form, symmetric, out / name)
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file() and path.name != "MANIFEST.json")
    hashes = {file: hashlib.sha256((out / file).read_bytes()).hexdigest() for file in files}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    manifest = {"script": "tools/record_auto_round.py", "versions": versions, "sha256": hashes}
    (out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


def record(model: Qwen2ForCausalLM, tokenizer: object, form: str, symmetric: bool, out: Path) -> None:
    """Write the checkpoint in one form, and the logits that AutoRound's layers compute."""
    bits = {} if "awq" in form else copy.deepcopy(OTHER_BITS)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"bits": 4, "group_size": GROUP, "sym": symmetric, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
        AutoRound(copy.deepcopy(model), tokenizer, layer_config=bits, **settings).quantize_and_save(output_dir=folder, format=form)
        (config,) = Path(folder).rglob("config.json")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        tensors = {name: tensor for path in config.parent.glob("*.safetensors") for name, tensor in load_file(path).items()}
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        shutil.copy(config, out / "config.json")
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    model = model.float()
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}, strict=False)
    for name in sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".qweight")}):
        own = {leaf.rpartition(".")[2]: tensor for leaf, tensor in tensors.items() if leaf.rpartition(".")[0] == name}
        set_module(model, name, loaded(form, block, own, get_module(model, name)))
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits.contiguous()}, out / "expected.safetensors")


def loaded(form: str, block: dict, own: dict[str, torch.Tensor], linear: torch.nn.Linear) -> torch.nn.Module:
    """Return AutoRound's layer for a CPU, with the stored tensors."""
    if "awq" in form:
        from auto_round.export.export_to_awq.utils import WQLinear_GEMM

        layer = WQLinear_GEMM(4, GROUP, linear.in_features, linear.out_features, linear.bias is not None, "cpu")
    else:
        from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

        packing = block.get("packing_format", "auto_gptq")
        kind = qlinear_torch_zp.QuantLinear if "gptq" in packing else qlinear_torch.QuantLinear
        bits = own["qzeros"].shape[1] * 32 // linear.out_features
        layer = kind(bits, GROUP, linear.in_features, linear.out_features, linear.bias is not None)
        own.pop("g_idx", None)  # AutoRound uses the order only for square layers; groups are contiguous
    layer.load_state_dict(own)
    return layer


if __name__ == "__main__":
    sys.exit(main())
