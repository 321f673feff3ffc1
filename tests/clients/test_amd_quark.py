"""transformers with AMD Quark instead of our packages loads our exports, and computes the same.

Run with ``make clients AMDQ_PYTHON=/path/to/python`` of an environment with amd-quark and accelerate, where
ours is not installed: both own `quark`.
"""

import json
import os
import subprocess
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

import quark
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import calibration_batches, tiny_model

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


NOT_LOADED_THERE = {
    "nvfp4": "its loader has no place for weight_scale_2",
    "amdfp4_global16": "likewise",
    "amdfp4_global32": "likewise",
    "int4_fp8": "likewise",
    "mx6": "it cannot export them, and so not read them",
    "mx9": "likewise",
    "bfp16": "likewise",
}
QUANTIZE = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from quark.torch import LLMTemplate, ModelQuantizer
calib = list(load_file("calib.safetensors").values())
ids = torch.arange(40).reshape(1, 40)
for scheme in sys.argv[1].split():
    model = AutoModelForCausalLM.from_pretrained("float", dtype=torch.float32).eval()
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme))
    model = quantizer.freeze(quantizer.quantize_model(model, calib))
    with torch.no_grad():
        save_file({"logits": model(ids).logits.contiguous()}, scheme + ".logits")
"""
SCHEMES = """
import json
from quark.torch import LLMTemplate
print(json.dumps(LLMTemplate.get_supported_schemes()))
"""
DIFFERENT_ON_PURPOSE = {
    "ptpc_fp8": "one scale per position there, per token here; the same for a batch of one, but for its calibration",
    "amdfp4": "block scales of 0 there",
    "amdfp4_g32": "likewise",
    "amdfp4_global16": "corrupt there",
    "amdfp4_global32": "likewise",
    "bfp16": "weights are rounded twice there",
    "mx9": "no such scheme there",
}


def interpreter() -> str:
    python = os.environ.get("AMDQ_PYTHON")
    if not python:
        pytest.skip("AMDQ_PYTHON names no interpreter with amd-quark")
    return python


def run(python: str, code: str, argument: str, folder: Path) -> str:
    """Run ``code`` with AMD Quark in ``folder``, which does not find our packages; return what it prints."""
    environment = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "QUARK_DISABLE_COMPILE": "1"}
    command = [python, "-c", code, argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def schemes_of_both(python: str, folder: Path) -> list[str]:
    """Names of the schemes that AMD Quark and our packages have."""
    theirs = json.loads(run(python, SCHEMES, "", folder).splitlines()[-1])
    return [name for name in quark.schemes().names() if name in theirs]


def different(folder: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, logits in expected.items() if not torch.equal(load_file(folder / f"{name}.logits")["logits"], logits)]


@pytest.mark.timeout(600)
def test_its_logits_of_our_exports_are_ours(tmp_path: Path) -> None:
    """In float32, where the recorded values hold; in 16 bits it rounds activations in 16-bit arithmetic and ours in float32.

    Its convention rounds keys as the projection puts them out.
    """
    python, expected = interpreter(), {}
    for scheme in (s for s in schemes_of_both(python, tmp_path) if s not in NOT_LOADED_THERE):
        config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme="fp8", kv_cache_post_rope=False)
        model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 64))
        export_safetensors(model, tmp_path / scheme)
        with torch.no_grad():
            expected[scheme] = model(IDS).logits
    run(python, CODE, json.dumps(list(expected)), tmp_path)
    assert different(tmp_path, expected) == []


@pytest.mark.timeout(600)
def test_a_model_that_it_quantizes_computes_what_ours_computes(tmp_path: Path) -> None:
    python, batches, expected = interpreter(), calibration_batches(2, 64), {}
    tiny_model().save_pretrained(tmp_path / "float")
    save_file({str(i): batch.contiguous() for i, batch in enumerate(batches)}, tmp_path / "calib.safetensors")
    for scheme in (s for s in schemes_of_both(python, tmp_path) if s not in DIFFERENT_ON_PURPOSE):
        model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme)).quantize_model(tiny_model(), batches)
        with torch.no_grad():
            expected[scheme] = model(IDS).logits
    run(python, QUANTIZE, " ".join(expected), tmp_path)
    assert different(tmp_path, expected) == []


ROTATED = """
import json, sys, torch
from safetensors.torch import save_file
from quark.torch import import_model_from_safetensors
ids = torch.arange(40).reshape(1, 40)
for name in json.loads(sys.argv[1]):
    with torch.no_grad():
        save_file({"logits": import_model_from_safetensors(None, name, device="cpu")(ids).logits.contiguous()}, name + ".logits")
"""


@pytest.mark.timeout(600)
def test_it_rotates_inputs_as_we_do(tmp_path: Path) -> None:
    """R4 in blocks, for which it takes the matrix of the checkpoint, and of the full width, 12 · 32, for which it has one of its own.

    Its own reader: transformers' leaves a rotation out there, and fails. It multiplies in float64 and we in
    float32, so that a value on the edge may be rounded to its neighbour.
    """
    python, expected = interpreter(), {}
    for scheme in ("int4_wo_32", "mxfp4", "fp8"):
        for size in (None, 32):
            config = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm="rotation")
            config.algo_config = [attrs.evolve(a, r2=True, r4=True, rotation_size=size) for a in config.algo_config or []]
            model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 64))
            export_safetensors(model, tmp_path / f"{scheme}-{size}")
            with torch.no_grad():
                expected[f"{scheme}-{size}"] = model(IDS).logits
    run(python, ROTATED, json.dumps(list(expected)), tmp_path)
    for name, logits in expected.items():
        found = load_file(tmp_path / f"{name}.logits")["logits"]
        assert float((found - logits).abs().max() / logits.abs().max()) < 1e-3, name
