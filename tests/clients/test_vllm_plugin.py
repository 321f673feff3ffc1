"""vLLM with quark-vllm serves every scheme, a stranger's too, and kinds of models that it does not load by itself.

Run with ``make clients VLLM_PYTHON=/path/to/python``; `vllm_comparison` says how results are compared.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch

import quark
from quark.checkpoint.inspection import inspect_checkpoint
from quark.torch import export_safetensors
from quark_tiny_model import tiny_tokenizer

from .client_process import ClientError, ClientProcess
from .results import Results, compared, quantized_tiny_model
from .served_models import KINDS, export_kind
from .shown_packages import shown_packages
from .test_vllm_layouts import of_the_last_text
from .vllm_comparison import dtype_for, is_computed_by_vllm
from .vllm_on_cpu import PROMPTS, environment, generate, interpreter

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1600)]
CLIENT = "vLLM with quark-vllm"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/acme_quant"
EXPORT_IN_ACME = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from quark.torch import export_safetensors
from quark_tiny_model import tiny_tokenizer
from tests.clients.results import quantized_tiny_model
export_safetensors(quantized_tiny_model("acme_nf3_g64", torch.bfloat16), sys.argv[1])
tiny_tokenizer().save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def versions(vllm: ClientProcess) -> dict[str, str]:
    found: dict[str, str] = vllm.ask(folder=None, cache="", dtype="", out="", prompts=[])
    return found


def exported(scheme: str, out: Path) -> Path:
    export_safetensors(quantized_tiny_model(scheme, torch.bfloat16), out)
    tiny_tokenizer().save_pretrained(out)
    return out


def is_loaded_by_vllm(out: Path) -> bool:
    (support,) = [one for one in inspect_checkpoint(out).runtimes if one.runtime == "vllm_cpu"]
    return support.loads


@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_vllm_serves_every_scheme(
    scheme: str, tmp_path: Path, results: Results, vllm_with_quark: ClientProcess, versions: dict[str, str]
) -> None:
    out = exported(scheme, tmp_path / "out")
    own_layers, dtype = not is_loaded_by_vllm(out), dtype_for(scheme)
    texts = is_computed_by_vllm(vllm_with_quark, out, "auto", torch.bfloat16 if own_layers else dtype, own_layers=own_layers)
    note = {} if own_layers else {"note": "by vLLM itself"}
    results.add(CLIENT, "safetensors", scheme, versions, **compared(*of_the_last_text(texts, out)), **note)


@pytest.mark.parametrize("method", ["quark_simulate", "quark_packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_serves_models_of_many_kinds(kind: str, method: str, tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    export_kind(kind, tmp_path / "out")
    is_computed_by_vllm(vllm_with_quark, tmp_path / "out", "auto", torch.bfloat16, own_layers=True, quantization=method)


def test_what_vllm_caches_in_fp8_has_the_scales_of_the_checkpoint(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    export_kind("cache in fp8", tmp_path / "out")
    is_computed_by_vllm(vllm_with_quark, tmp_path / "out", "fp8", torch.bfloat16, own_layers=True)


def test_compiled_models_compute_the_same(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    export_kind("rotations that run", tmp_path / "out")
    is_computed_by_vllm(vllm_with_quark, tmp_path / "out", "auto", torch.bfloat16, own_layers=True, enforce_eager=False)


def test_a_checkpoint_of_another_layout_is_served_where_that_is_asked_for(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    export_safetensors(quantized_tiny_model("fp8", torch.bfloat16), tmp_path / "out", "compressed_tensors")
    tiny_tokenizer().save_pretrained(tmp_path / "out")
    with pytest.raises(ClientError, match="static_scaled_fp8_quant"):
        generate(vllm_with_quark, tmp_path / "out", "auto", torch.bfloat16)
    is_computed_by_vllm(vllm_with_quark, tmp_path / "out", "auto", torch.bfloat16, own_layers=True, quantization="quark_simulate")


def test_a_third_partys_scheme_is_served_where_its_distribution_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_with_quark: ClientProcess
) -> None:
    metadata, root = tmp_path / "acme/acme_quant-0.1.0.dist-info", EXAMPLE.parents[1]
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-quant\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[quark]\nacme = acme_quant.plugin\n")
    (metadata.parent / "acme_quant").symlink_to(EXAMPLE / "src/acme_quant")
    out, path = tmp_path / "out", {**os.environ, "PYTHONPATH": str(metadata.parent)}
    subprocess.run([sys.executable, "-c", EXPORT_IN_ACME, str(out), str(root)], env=path, check=True, capture_output=True)
    with pytest.raises(ClientError, match=r"was written with the format 'acme_nf3' of acme-quant 0\.1\.0: install that"):
        generate(vllm_with_quark, out, "auto", torch.bfloat16)
    site = shown_packages(tmp_path / "site")
    environ = {**vllm_with_quark.environment, "PYTHONPATH": f"{site}{os.pathsep}{metadata.parent}"}
    client = ClientProcess(vllm_with_quark.command, environ, tmp_path / "log")
    try:
        texts = generate(client, out, "auto", torch.bfloat16)
    finally:
        client.close()
    command = [sys.executable, "-c", LOGPROBS_IN_ACME, str(out), json.dumps(texts.tokens[-1].tolist()), str(tmp_path / "expected.pt")]
    subprocess.run(command, env=path, check=True, capture_output=True)
    expected = torch.load(tmp_path / "expected.pt")
    assert compared(texts.logprobs[1 - len(texts.tokens[-1]) :], expected)["error"] < 0.02


LOGPROBS_IN_ACME = """
import json, sys, torch
from quark.torch import import_model_from_safetensors
model = import_model_from_safetensors(None, sys.argv[1]).float()
with torch.no_grad():
    torch.save(model(torch.tensor([json.loads(sys.argv[2])])).logits[0, :-1].log_softmax(-1), sys.argv[3])
"""


def test_a_damaged_checkpoint_is_refused_in_a_sentence(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    from safetensors.torch import load_file, save_file

    out = exported("mx6", tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ClientError, match=r"lacks 1 tensor\(s\): model\.layers\.1\.mlp\.up_proj"):
        generate(vllm_with_quark, out, "auto", torch.bfloat16)


def test_two_ranks_compute_what_one_does(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    for kind in ("rotations that run", "embedding and head", "mixture of experts"):
        out = tmp_path / kind.partition(" ")[0]
        export_kind(kind, out)
        is_computed_by_vllm(vllm_with_quark, out, "auto", torch.bfloat16, own_layers=True, tensor_parallel_size=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of vLLM's server, which serves a scheme that vLLM does not know."""
    folder = tmp_path_factory.mktemp("server")
    out = exported("mx6", folder / "out")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {**os.environ, **environment(folder), "PYTHONPATH": str(shown_packages(folder / "site"))}
    # The program `vllm serve` of the wheels for CPUs looks for the metadata of the wheel for GPUs; this is what it starts.
    command = [interpreter(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(out), "--port", str(port), "--max-model-len", "256"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, env=environ, stdout=log, stderr=log) as process:
        try:
            for _ in range(600):
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                try:
                    urlopen(f"http://127.0.0.1:{port}/health").close()
                    break
                except URLError:
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            process.terminate()
            process.wait(60)


def complete(server: str, prompt: str, *, stream: bool = False) -> str:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": stream}
    with urlopen(Request(server, json.dumps(body).encode(), {"Content-Type": "application/json"})) as answer:
        text = answer.read().decode()
    pieces: list[Any] = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")] if stream else []
    return "".join(piece["choices"][0]["text"] for piece in pieces or [json.loads(text)])


def test_the_server_answers_several_at_once_as_one_after_the_other(server: str) -> None:
    alone = [complete(server, prompt) for prompt in PROMPTS]
    assert all(alone)
    assert [complete(server, prompt, stream=True) for prompt in PROMPTS] == alone
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS * 2))
    # Sums over more rows may be in another order, which changes few tokens.
    same = sum(a == b for a, b in zip(together, alone * 2, strict=True))
    assert same >= len(together) / 2
