"""transformers loads our exports through its own loader, in a process of its own, and computes what the model in memory computed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quark
from quark.testing.tiny import calibration_batches, tiny_model, tiny_tokenizer
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

pytestmark = pytest.mark.clients
CODE = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
ids = AutoTokenizer.from_pretrained(sys.argv[1])("And God said, Let there be", return_tensors="pt")["input_ids"]
with torch.no_grad():
    save_file({"ids": ids, "logits": model(ids).logits.contiguous()}, sys.argv[2])
"""


@pytest.mark.parametrize("cache", [None, "fp8"])
@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_a_fresh_process_gives_the_same_logits(scheme: str, cache: str | None, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme=cache)
    model = ModelQuantizer(config).quantize_model(tiny_model(torch.bfloat16), calibration_batches(2, 128))
    export_safetensors(model, tmp_path / "out")
    tiny_tokenizer().save_pretrained(tmp_path / "out")
    subprocess.run([sys.executable, "-c", CODE, str(tmp_path / "out"), str(tmp_path / "result")], check=True, capture_output=True)
    result = load_file(tmp_path / "result")
    with torch.no_grad():
        assert torch.equal(result["logits"], model(result["ids"]).logits)
