"""onnxruntime loads ONNX exports of every scheme, in a process of its own, and computes the same as the model in memory.

Run with ``make clients``; ``ORT_PYTHON=/path/to/python`` names another interpreter that has onnxruntime and
numpy. Nothing else is needed there: functions of the domain ``quark`` are in the file.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

import quark
from quark_tiny_model import tiny_model

from .results import SHARE, Results, changed_by_rounding, compared, logits_of, quantized_tiny_model, text_ids, why_not_exported

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
CODE = """
import sys, numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
options.add_session_config_entry("session.x64quantprecision", "1")
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
np.save(sys.argv[3], session.run(None, {"input_ids": np.load(sys.argv[2])})[0])
print(onnxruntime.__version__)
"""


@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_onnxruntime_computes_the_logits_of_each_scheme(scheme: str, tmp_path: Path, results: Results) -> None:
    model, ids = quantized_tiny_model(scheme, kv_cache_scheme="fp8"), text_ids()
    reason = why_not_exported("onnx", model, tmp_path / "out")
    assert (reason is None) == (not scheme.startswith("vq")), reason
    if reason is not None:
        results.add("onnxruntime", "onnx", scheme, {"onnxruntime": version("onnxruntime")}, refused=reason, by="exporter")
        return
    np.save(tmp_path / "ids.npy", np.array([ids]))
    command = [os.environ.get("ORT_PYTHON", sys.executable), "-c", CODE]
    command += [str(tmp_path / "out/quark_model.onnx"), str(tmp_path / "ids.npy"), str(tmp_path / "logits.npy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.from_numpy(np.load(tmp_path / "logits.npy"))[0]
    expected, exact = logits_of(model, ids), logits_of(tiny_model(), ids)
    results.add("onnxruntime", "onnx", scheme, {"onnxruntime": done.stdout.split()[-1]}, **compared(found, expected))
    assert float((found - expected).norm()) <= max(SHARE * float((expected - exact).norm()), changed_by_rounding(model, ids))
