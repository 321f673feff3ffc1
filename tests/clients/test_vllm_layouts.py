"""vLLM loads every scheme in every layout that `quark inspect` says it loads on CPUs, and computes the same as our simulation.

Run with ``make clients VLLM_PYTHON=/path/to/python``; `vllm_comparison` says how results are compared.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quark
from quark.checkpoint.inspection import inspect_checkpoint
from quark.torch import import_model_from_safetensors
from quark_tiny_model import tiny_tokenizer

from .client_process import ClientError, ClientProcess
from .results import Results, compared, logits_of, quantized_tiny_model, why_not_exported
from .vllm_comparison import dtype_for, is_computed_by_vllm
from .vllm_on_cpu import Texts, generate

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1600)]
CLIENT, LAYOUTS = "vLLM on a CPU", ("safetensors", "compressed_tensors", "awq", "fp8")


@pytest.mark.parametrize("scheme", quark.schemes().names())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_loads_what_inspection_says(
    layout: str, scheme: str, tmp_path: Path, results: Results, request: pytest.FixtureRequest, versions: dict[str, str]
) -> None:
    out, dtype = tmp_path / "out", dtype_for(scheme)
    if (reason := why_not_exported(layout, quantized_tiny_model(scheme, torch.bfloat16), out)) is not None:
        results.add(CLIENT, layout, scheme, versions, refused=reason, by="exporter")
        return
    tiny_tokenizer().save_pretrained(out)
    (support,) = [one for one in inspect_checkpoint(out).runtimes if one.runtime == "vllm_cpu"]
    needs_quark = any("with a package quark" in method for method in support.methods)
    vllm: ClientProcess = request.getfixturevalue("vllm_with_quark" if needs_quark else "vllm")
    if not support.loads:
        with pytest.raises(ClientError) as refusal:
            generate(vllm, out, "auto", dtype)
        words = re.split(r"\. |; | Reasons:", " ".join(str(refusal.value).split()))[0]
        results.add(CLIENT, layout, scheme, versions, refused=words, by="client")
        return
    texts = is_computed_by_vllm(vllm, out, "auto", dtype)
    note = {"note": "with quark beside it"} if needs_quark else {}
    results.add(CLIENT, layout, scheme, versions, **compared(*of_the_last_text(texts, out)), **note)


@pytest.fixture(scope="module")
def versions(vllm: ClientProcess) -> dict[str, str]:
    found: dict[str, str] = vllm.ask(folder=None, cache="", dtype="", out="", prompts=[])
    return found


def of_the_last_text(texts: Texts, directory: Path) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the text by vLLM, and by the checkpoint's model in float32 as it is."""
    tokens = texts.tokens[-1].tolist()
    model = import_model_from_safetensors(None, directory).float()
    return texts.logprobs[1 - len(tokens) :], logits_of(model, tokens)[:-1].log_softmax(-1)
