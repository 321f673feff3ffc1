"""transformers loads our exports through its own loader, in a process of its own, and computes the same as the model in memory."""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quark
from quark.torch import export_safetensors
from quark_tiny_model import tiny_tokenizer

from .client_process import ClientProcess, client_process
from .results import Results, compared, logits_of, quantized_tiny_model, text_ids

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
CODE = """
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
def serve(folder, ids):
    assert AutoTokenizer.from_pretrained(folder)("And God said")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        save_file({"logits": model(torch.tensor([ids])).logits[0].float().contiguous()}, folder + "/found")
"""


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientProcess]:
    folder = tmp_path_factory.mktemp("transformers")
    with client_process(sys.executable, CODE, folder, PYTHONPATH=os.environ.get("PYTHONPATH", "")) as client:
        yield client


@pytest.mark.parametrize("cache", [None, "fp8"])
@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_another_process_gives_the_same_logits(
    scheme: str, cache: str | None, transformers: ClientProcess, tmp_path: Path, results: Results
) -> None:
    model, ids, out = quantized_tiny_model(scheme, torch.bfloat16, cache), text_ids(), tmp_path / "out"
    export_safetensors(model, out)
    tiny_tokenizer().save_pretrained(out)
    transformers.ask(folder=str(out), ids=ids)
    found, expected = load_file(out / "found")["logits"], logits_of(model, ids)
    if cache is None:
        versions = {package: version(package) for package in ("transformers", "torch")}
        results.add("transformers", "safetensors", scheme, versions, **compared(found, expected))
    assert torch.equal(found, expected)
