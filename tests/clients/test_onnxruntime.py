"""onnxruntime loads ONNX exports of every scheme, in a process of its own, and computes what the model in memory computes.

Run with ``make clients``; ``ORT_PYTHON=/path/to/python`` names another interpreter that has onnxruntime and numpy. Nothing else is needed
there: functions of the domain ``quark`` are in the file.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import quark
from quark.testing.tiny import calibration_batches, tiny_model
from quark.torch import LLMTemplate, ModelQuantizer, export_onnx

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
IDS = torch.arange(80).reshape(2, 40)
SHARE = 0.05
"""Share of what quantization changes in the logits by which onnxruntime may differ: sums in another order move some values over the edge
of a step, and where inputs are quantized the layers after them amplify that."""
CODE = """
import sys, numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
np.save(sys.argv[3], session.run(None, {"input_ids": np.load(sys.argv[2])})[0])
"""


@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_onnxruntime_computes_the_logits_of_each_scheme(scheme: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme="fp8")
    model = ModelQuantizer(config).quantize_model(tiny_model(), calibration_batches(2, 128))
    export_onnx(model, tmp_path / "out")
    np.save(tmp_path / "ids.npy", IDS.numpy())
    command = [os.environ.get("ORT_PYTHON", sys.executable), "-c", CODE]
    command += [str(tmp_path / "out/quark_model.onnx"), str(tmp_path / "ids.npy"), str(tmp_path / "logits.npy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    with torch.no_grad():
        expected, exact = model(IDS).logits, tiny_model()(IDS).logits
    assert float((found - expected).norm()) <= SHARE * float((expected - exact).norm())
