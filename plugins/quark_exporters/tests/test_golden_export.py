"""A whole export of the recorded model equals the reference's, tensor for tensor, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import quark
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

GOLDEN = Path(__file__).resolve().parents[3] / "tests" / "golden"
RECORDED_WITH_CACHE = ("fp8", "mxfp4", "ptpc_fp8")


@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_the_export_equals_the_recording(scheme: str, tmp_path: Path) -> None:
    inputs = load_file(GOLDEN / "inputs.safetensors")
    model = LlamaForCausalLM(LlamaConfig(**json.loads((GOLDEN / "model_config.json").read_text()))).eval()
    model.load_state_dict({k.removeprefix("state."): v for k, v in inputs.items() if k.startswith("state.")})
    config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme="fp8" if scheme in RECORDED_WITH_CACHE else None)
    ModelQuantizer(config).quantize_model(model, list(inputs["calib_ids"].split(1)))
    export_safetensors(model, tmp_path / "out")
    ours = {k: v for k, v in load_file(tmp_path / "out" / "model.safetensors").items() if "proj" in k}
    theirs = {
        k.removeprefix("export."): v for k, v in load_file(GOLDEN / scheme / "outputs.safetensors").items() if k.startswith("export.")
    }
    assert ours.keys() == theirs.keys()
    assert [k for k in ours if ours[k].dtype != theirs[k].dtype or ours[k].shape != theirs[k].shape] == []
    assert [k for k in ours if not torch.equal(ours[k].reshape(-1).view(torch.uint8), theirs[k].reshape(-1).view(torch.uint8))] == []
