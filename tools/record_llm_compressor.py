"""Record golden files from llm-compressor: small checkpoints, and their logits in transformers.

    python tools/record_llm_compressor.py plugins/quark_exporters/tests/compressed_tensors/golden_checkpoints

Run it on a CPU in a separate environment with ``llmcompressor==0.14.0.1``, which also installs torch and
transformers. It writes a folder for each scheme with ``config.json``, ``model.safetensors`` and
``expected.safetensors``. ``expected.safetensors`` has ``ids``, and the ``logits`` of the model that
transformers loads. Logits are float32. For FP4 weights, they are bfloat16, since the packages decompress such
weights only to bfloat16. ``MANIFEST.json`` has versions and hashes, and the tests check the files against it.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGES = ("llmcompressor", "compressed-tensors", "torch", "transformers", "safetensors")
CALIBRATED = ("FP8", "NVFP4")
"""Schemes with static scales of activations."""
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A8", *CALIBRATED, "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4")
SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 64}


def small_model() -> LlamaForCausalLM:
    """Return a random Llama of one block, in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer, which calibration requires but does not use."""
    words = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0")


def record(scheme: str, out: Path) -> None:
    """Record one scheme."""
    ids = torch.randint(0, SIZES["vocab_size"], (4, 32), generator=torch.Generator().manual_seed(1))
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    with TemporaryDirectory() as directory:
        small_model().save_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        calibration = (
            {"dataset": data, "processor": tokenizer(), "num_calibration_samples": len(ids), "max_seq_length": 32}
            if scheme in CALIBRATED
            else {}
        )
        oneshot(model=model, recipe=recipe, **calibration)
        model.save_pretrained(out, save_compressed=True)
    del model
    gc.collect()
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16 if "FP4" in scheme else torch.float32)
    with torch.no_grad():
        logits = loaded(ids[:1]).logits.float().contiguous()
    save_file({"ids": ids[:1].contiguous(), "logits": logits}, out / "expected.safetensors")
    for path in out.iterdir():
        if path.name not in ("config.json", "model.safetensors", "expected.safetensors"):
            path.unlink()


def main() -> int:
    """Record all schemes, and write the files to the folder that the command line names."""
    out = Path(sys.argv[1])
    schemes, refused = sys.argv[2:] or SCHEMES, {}
    for scheme in schemes:
        try:
            record(scheme, out / scheme)
        except Exception as error:  # record only schemes that the packages themselves support
            refused[scheme] = f"{type(error).__name__}: {error}"
            for path in (out / scheme).glob("*"):
                path.unlink()
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "MANIFEST.json")
    hashes = {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    manifest = {"script": "tools/record_llm_compressor.py", "versions": versions, "refused": refused, "sha256": hashes}
    (out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
