"""Record golden files from AutoAWQ: a small checkpoint, and the logits of its dequantized weights.

    python tools/record_autoawq.py SOURCES plugins/quark_exporters/tests/awq/golden

``SOURCES`` is the unpacked source distribution of AutoAWQ
(``pip download --no-deps --no-binary :all: autoawq==0.2.9``). On a CPU, the script runs AutoAWQ's rounding
(``AwqQuantizer.pseudo_quantize_tensor``), layer (``WQLinear_GEMM``), configuration (``AwqConfig``) and
``dequantize_gemm``. The whole package cannot be imported with current versions of transformers. The script
needs torch, transformers, tqdm and safetensors. ``MANIFEST.json`` has versions and hashes, and the tests
check the files against it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

PACKAGES = ("torch", "transformers", "safetensors")
GROUP = 32
LEFT_OUT = ["self_attn.o_proj"]
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}


def autoawq(sources: Path) -> tuple[Any, Any, Any, Any]:
    """Return ``pseudo_quantize_tensor``, ``WQLinear_GEMM``, ``AwqConfig``, ``dequantize_gemm``."""
    # These packages import everything. Declared as plain folders, they allow imports of single modules.
    for name in ("awq", "awq.quantize", "awq.modules", "awq.modules.linear", "awq.models", "awq.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(sources / name.replace(".", "/"))]
        sys.modules[name] = package
    names = ("awq.quantize.scale", "awq.utils.calib_data")  # the quantizer imports it, but rounding does not use it
    for name, members in zip(names, (("apply_scale", "apply_clip"), ("get_calib_dataset",)), strict=True):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(dict.fromkeys(members))
    sys.modules["awq.modules.linear"].__dict__.update(
        dict.fromkeys(("WQLinear_Exllama", "WQLinear_ExllamaV2", "WQLinear_Marlin", "WQLinear_GEMV", "WQLinear_GEMVFast"))
    )
    layer = importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM
    sys.modules["awq.modules.linear"].__dict__["WQLinear_GEMM"] = layer
    rounding = importlib.import_module("awq.quantize.quantizer").AwqQuantizer.pseudo_quantize_tensor
    config = importlib.import_module("awq.models._config").AwqConfig
    return rounding, layer, config, importlib.import_module("awq.utils.packing_utils").dequantize_gemm


def main() -> int:
    """Record the files, and write them to the folder that the command line names."""
    sources, out = Path(sys.argv[1]), Path(sys.argv[2])
    rounding, layer, config, dequantized = autoawq(sources)
    torch.manual_seed(0)
    sizes = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)).half().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1, 0.1)  # biases that are not zero
    tensors = dict(model.state_dict())
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or name == "lm_head" or any(key in name for key in LEFT_OUT):
            continue
        settings = SimpleNamespace(group_size=GROUP, w_bit=4, zero_point=True)
        linear.weight.data, scales, zeros = rounding(settings, linear.weight.data.float())
        packed = layer.from_linear(linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in packed.state_dict().items()}
        linear.weight.data = dequantized(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).t().contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    block = config(q_group_size=GROUP, modules_to_not_convert=LEFT_OUT).to_transformers_dict()
    (out / "config.json").write_text(json.dumps(model.config.to_dict() | {"quantization_config": block}, indent=1) + "\n")
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        save_file({"ids": ids, "logits": model.float()(ids).logits.contiguous()}, out / "expected.safetensors")
    files = sorted(path for path in out.iterdir() if path.name != "MANIFEST.json")
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    versions = {"autoawq": sources.name.removeprefix("autoawq-")} | {package: importlib.metadata.version(package) for package in PACKAGES}
    manifest = {"script": "tools/record_autoawq.py", "versions": versions, "sha256": hashes}
    (out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
