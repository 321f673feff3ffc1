"""vLLM loads the layouts of AutoAWQ and of compressed-tensors that we write, and computes what our own simulation computes.

Run with ``make clients VLLM_PYTHON=/path/to/python``; `test_vllm` says how results are compared. FP8 with one scale, NVFP4 and MXFP4 have
no kernel for CPUs in vLLM 0.32: `quark inspect` says so, and which GPUs have one.
"""

from pathlib import Path

import pytest
import torch

from quark.checkpoint.export import export_with
from quark.testing.tiny import calibration_batches, tiny_model, tiny_tokenizer
from quark.torch import LLMTemplate, ModelQuantizer

from .test_vllm import is_computed_by_vllm

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1600)]
CASES = [
    ("awq", "int4_wo_128", torch.float16),
    ("awq", "uint4_wo_64", torch.float16),
    ("compressed_tensors", "int4_wo_128", torch.float16),
    ("compressed_tensors", "uint4_wo_64", torch.float16),
    ("compressed_tensors", "int8", torch.bfloat16),
    ("compressed_tensors", "ptpc_fp8", torch.bfloat16),
]


@pytest.mark.parametrize(("layout", "scheme", "dtype"), CASES)
def test_vllm_computes_what_our_simulation_computes(layout: str, scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    cache = "fp8" if layout == "compressed_tensors" else None
    config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme=cache)
    model = ModelQuantizer(config).quantize_model(tiny_model(torch.bfloat16), calibration_batches(2, 128))
    export_with(layout, model, tmp_path / "out")
    tiny_tokenizer().save_pretrained(tmp_path / "out")
    is_computed_by_vllm(tmp_path / "out", cache or "auto", dtype)
