"""llama.cpp loads GGUF exports, splits text into the same tokens, and computes the same as our own simulation.

Run with ``make clients LLAMA_PYTHON=/path/to/python`` of an environment with llama-cpp-python and numpy;
quark need not be installed there.

llama.cpp multiplies codes with inputs that it rounds to Q8_0 first: 8 bits, a scale for each 32. How much
that changes the logits is measured on the simulation, with inputs in INT8 and groups of 32.
"""

import os
import subprocess
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import quark
from quark.checkpoint import ExportOptions
from quark.checkpoint.export import export_with
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.models.layers import QuantizedLayer, QuantizerModule, have_same_weight
from quark.torch import LLMTemplate, ModelQuantizer
from quark_tiny_model import held_out_text, tiny_model, tiny_tokenizer

from .results import Results, compared, logits_of, quantized_tiny_model, text_ids, why_not_exported

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
Q8_0 = QTensorConfig(
    dtype="int8",
    qscheme="per_group",
    is_dynamic=True,
    symmetric=True,
    observer_cls="PerGroupMinMaxObserver",
    ch_axis=-1,
    group_size=32,
)
FARTHER = 2.0
"""How much farther from the model without rounded inputs llama.cpp may be than the simulation with them: both round as often and as
coarsely, so that 1 is expected."""
SURE = 4 * 2**0.5
"""Choices are compared where the best token leads by that many times the root mean square of the differences that rounded inputs make: a
difference of two logits has √2 times their error."""
# use_extra_bufts repacks weights for AMX and the like, where the CPU has it, and changes how inputs are
# rounded.
CODE = """
import sys, numpy as np, llama_cpp
from llama_cpp import Llama
defaults = llama_cpp.llama_model_default_params
def without_repacking():
    parameters = defaults()
    parameters.use_extra_bufts = False
    return parameters
llama_cpp.llama_model_default_params = llama_cpp.llama_cpp.llama_model_default_params = without_repacking
model = Llama(sys.argv[1], n_ctx=256, logits_all=True, verbose=False, n_threads=2)
np.save(sys.argv[4], np.array(model.tokenize(open(sys.argv[2]).read().encode(), add_bos=False, special=True)))
ids = np.load(sys.argv[3]).tolist()
model.eval(ids)
np.save(sys.argv[5], np.array(model.scores[: len(ids)]))
"""
LOADED = (
    *("int4_wa_64", "int4_wo_128", "int4_wo_32", "int4_wo_64", "int4_wo_per_channel", "int8", "int8_wo_32", "int8_wo_per_channel"),
    *("mxfp4", "mxfp4_fp8", "mxfp4_mxfp6_e2m3", "mxfp4_weight_only"),
    *("uint4_wo_128", "uint4_wo_32", "uint4_wo_64", "uint4_wo_per_channel"),
)
"""Schemes whose weights GGML has a type for. How their inputs are quantized is not in the file."""


def interpreter() -> str:
    python = os.environ.get("LLAMA_PYTHON")
    if not python:
        pytest.skip("LLAMA_PYTHON names no interpreter with llama-cpp-python")
    return python


@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_llama_cpp_computes_what_our_simulation_computes(scheme: str, tmp_path: Path, results: Results) -> None:
    python, text, ids = interpreter(), held_out_text()[:400], text_ids()
    model = quantized_tiny_model(scheme)
    reason = why_not_exported("gguf", model, tmp_path / "out", ExportOptions(own={"float_type": "f32"}, tokenizer=tiny_tokenizer()))
    assert (reason is None) == (scheme in LOADED), reason
    if reason is not None:
        results.add("llama.cpp", "gguf", scheme, {"llama-cpp-python": version_of(python)}, refused=reason, by="exporter")
        return
    found = logits_of_llama_cpp(python, tmp_path, text, ids)
    # With the scales of the file, which are rounded to float16.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32).eval()
    exact, coarse = logits_of(loaded, ids), logits_of(with_rounded_inputs(loaded, model), ids)
    note = {"note": "weights alone"} if quark.schemes().load_config(scheme)().input_tensors is not None else {}
    results.add("llama.cpp", "gguf", scheme, {"llama-cpp-python": version_of(python)}, **compared(found, exact), **note)
    refuse_farther(found, exact, coarse)


@pytest.mark.parametrize("scheme", ["int8_wo_32", "uint4_wo_32", "int4_wo_32"])
def test_llama_cpp_reads_a_head_from_the_embeddings(scheme: str, tmp_path: Path) -> None:
    python, text, ids = interpreter(), held_out_text()[:400], text_ids()
    model = ModelQuantizer(both_of_one_scheme(scheme)).quantize_model(tiny_model())
    assert have_same_weight(model.lm_head, model.model.embed_tokens)  # type: ignore[union-attr, arg-type]
    export_with("gguf", model, tmp_path / "out", ExportOptions(own={"float_type": "f32"}, tokenizer=tiny_tokenizer()))
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert "output.weight" not in kinds
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"]
    found = logits_of_llama_cpp(python, tmp_path, text, ids)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32).eval()
    exact, coarse = logits_of(loaded, ids), logits_of(with_rounded_inputs(loaded, model), ids)
    refuse_farther(found, exact, coarse)


def both_of_one_scheme(scheme: str) -> QConfig:
    """Return a configuration that quantizes all layers, the head and the embeddings by one scheme."""
    layer = LLMTemplate.get("llama").get_config(scheme=scheme).global_quant_config
    return QConfig(layer, layer_quant_config={"lm_head": layer, "*embed_tokens": layer})


def logits_of_llama_cpp(python: str, folder: Path, text: str, ids: list[int]) -> torch.Tensor:
    """Return what llama.cpp computes with the export in ``out`` of a folder, if it splits a text as the tokenizer does."""
    (folder / "text").write_text(text, encoding="utf-8")
    np.save(folder / "ids.npy", np.array(ids))
    files = ("out/model.gguf", "text", "ids.npy", "tokens.npy", "logits.npy")
    command = [python, "-c", CODE, *(str(folder / name) for name in files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert np.load(folder / "tokens.npy").tolist() == tiny_tokenizer()(text)["input_ids"]
    return torch.from_numpy(np.load(folder / "logits.npy")).float()


def refuse_farther(found: torch.Tensor, exact: torch.Tensor, coarse: torch.Tensor) -> None:
    """Check that logits differ from exact ones no more than rounded inputs change these, and that sure choices are the same."""
    error = (coarse - exact).square().mean().sqrt()
    assert float((found - exact).square().mean().sqrt()) <= FARTHER * float(error)
    best, second = exact.topk(2, dim=-1).values.T
    sure = best - second > SURE * error
    assert sure.sum() > len(sure) / 4
    assert torch.equal(found.argmax(-1)[sure], exact.argmax(-1)[sure])


@cache
def version_of(python: str) -> str:
    command = [python, "-c", "from importlib.metadata import version; print(version('llama-cpp-python'))"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def with_rounded_inputs(loaded: nn.Module, quantized: nn.Module) -> nn.Module:
    """The model of a file, in which the inputs of the layers that are quantized are rounded."""
    for name, layer in quantized.named_modules():
        if isinstance(layer, QuantizedLayer) and not isinstance(loaded.get_submodule(name), nn.Embedding):
            rounding = QuantizerModule(Q8_0, activation=True)
            loaded.get_submodule(name).register_forward_pre_hook(lambda _, args, rounding=rounding: (rounding(args[0]), *args[1:]))
    return loaded
