"""transformers with AMD Quark in place of our packages loads our exports, and computes what we compute.

Run with ``make clients AMDQ_PYTHON=/path/to/python`` of an environment with amd-quark, where ours is not installed: both own `quark`.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quark
from quark.testing.tiny import calibration_batches, tiny_model
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

pytestmark = pytest.mark.clients
IDS = torch.arange(40).reshape(1, 40)
CODE = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
ids = torch.arange(40).reshape(1, 40)
for name in json.loads(sys.argv[1]):
    with torch.no_grad():
        save_file({"logits": AutoModelForCausalLM.from_pretrained(name)(ids).logits.contiguous()}, name + ".logits")
"""


@pytest.mark.timeout(300)
def test_its_logits_are_ours(tmp_path: Path) -> None:
    """In float32, where the recorded values hold; in 16 bits it rounds activations in 16-bit arithmetic and ours in float32."""
    python = os.environ.get("AMDQ_PYTHON")
    if not python:
        pytest.skip("AMDQ_PYTHON names no interpreter with amd-quark")
    expected = {}
    for scheme in quark.schemes().names():
        config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme="fp8")
        model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 64))
        export_safetensors(model, tmp_path / scheme)
        with torch.no_grad():
            expected[str(tmp_path / scheme)] = model(IDS).logits
    command = [python, "-c", CODE, json.dumps(list(expected))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    different = [name for name, logits in expected.items() if not torch.equal(load_file(f"{name}.logits")["logits"], logits)]
    assert different == []
