"""vLLM with quark-vllm serves every scheme, a stranger's too, and kinds of models that it does not load by itself.

Run with ``make clients VLLM_PYTHON=/path/to/python``; `vllm_comparison` says how results are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quark
from quark.checkpoint.inspection import inspect_checkpoint
from quark.torch import export_safetensors
from quark_tiny_model import tiny_tokenizer

from .client_process import ClientError, ClientProcess
from .results import Results, compared, quantized_tiny_model
from .served_models import KINDS, export_kind
from .shown_packages import shown_packages
from .test_vllm_layouts import of_the_last_text
from .vllm_comparison import FARTHER, dtype_for, is_computed_by_vllm
from .vllm_on_cpu import PROMPTS, environment, generate, interpreter, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1600)]
CLIENT = "vLLM with quark-vllm"
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/acme_quant"
TASKS = ROOT / "tests/data/tasks"
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

ASK = """
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI
address, prompts, out = sys.argv[1:]
client = OpenAI(base_url=address, api_key="none")
(model,) = client.models.list().data
options = {"model": model.id, "max_tokens": 16, "temperature": 0}
def complete(prompt):
    return client.completions.create(prompt=prompt, **options).choices[0].text
def stream(prompt):
    return "".join(part.choices[0].text for part in client.completions.create(prompt=prompt, stream=True, **options))
prompts = json.loads(prompts)
answers = {"alone": [complete(p) for p in prompts], "streamed": [stream(p) for p in prompts]}
with ThreadPoolExecutor(6) as pool:
    answers["together"] = list(pool.map(complete, prompts * 2))
with open(out, "w") as file:
    json.dump(answers, file)
"""
OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

class OwnConfig(LlamaConfig):
    model_type = "own_code"

class OwnModel(LlamaModel):
    config_class = OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
METHODS = """
import json
import os
import sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
llm = LLM(model=sys.argv[1], enforce_eager=True, max_model_len=256)
def methods_of(model):
    return {name: type(getattr(layer, "quant_method", None)).__name__ for name, layer in model.named_modules()}
(methods,) = llm.apply_model(methods_of)
with open(sys.argv[2], "w") as file:
    json.dump(methods, file)
"""
EVALUATE = """
import json
import os
import sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
address, directory, tasks, root, out = sys.argv[1:]
os.chdir(root)
options = {"base_url": f"{address}/completions", "model": directory, "tokenizer_backend": "huggingface", "num_concurrent": 2}
results = simple_evaluate("local-completions", options, ["quark_completions"], task_manager=TaskManager(include_path=tasks))
samples = results["samples"]["quark_completions"]
with open(out, "w") as file:
    json.dump([[float(score) for score, _ in sample["filtered_resps"]] for sample in sorted(samples, key=lambda s: s["doc_id"])], file)
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


def test_layers_that_vllm_has_kernels_for_are_computed_by_these(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    out = tmp_path / "out"
    export_kind("kernels for some layers", out)
    assert not is_loaded_by_vllm(out)
    is_computed_by_vllm(vllm_with_quark, out, "auto", torch.bfloat16, own_layers=True)
    run(METHODS, tmp_path, str(out), str(tmp_path / "methods.json"), PYTHONPATH=str(shown_packages(tmp_path / "site")))
    methods = json.loads((tmp_path / "methods.json").read_text())
    by_vllm, own = (
        {name.rpartition(".")[2] for name, method in methods.items() if method == of} for of in ("QuarkLinearMethod", "ServedLinear")
    )
    assert (by_vllm, own) == ({"qkv_proj", "o_proj"}, {"gate_up_proj", "down_proj"})


def test_what_vllm_caches_in_fp8_has_the_scales_of_the_checkpoint(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    export_kind("cache in fp8", tmp_path / "out")
    is_computed_by_vllm(vllm_with_quark, tmp_path / "out", "fp8", torch.bfloat16, own_layers=True)


def test_compiled_models_compute_the_same(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    export_kind("rotations that run", tmp_path / "out")
    is_computed_by_vllm(vllm_with_quark, tmp_path / "out", "auto", torch.bfloat16, own_layers=True, enforce_eager=False)


def test_checkpoints_of_other_layouts_are_served_where_that_is_asked_for(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    for scheme, layout in (("fp8", "compressed_tensors"), ("int4_wo_32", "compressed_tensors"), ("uint4_wo_32", "awq")):
        out = tmp_path / f"{scheme} {layout}"
        export_safetensors(quantized_tiny_model(scheme, torch.bfloat16), out, layout)
        tiny_tokenizer().save_pretrained(out)
        if scheme == "fp8":
            with pytest.raises(ClientError, match="static_scaled_fp8_quant"):
                generate(vllm_with_quark, out, "auto", torch.bfloat16)
        for method in ("quark_simulate", "quark_packed"):
            is_computed_by_vllm(vllm_with_quark, out, "auto", torch.bfloat16, own_layers=True, quantization=method)


def test_a_model_with_its_own_code_is_served_if_that_is_allowed(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    plain, out = exported("mx6", tmp_path / "plain"), tmp_path / "out"
    shutil.copytree(plain, out)
    (out / "modeling_own.py").write_text(OWN_CODE)
    config = json.loads((out / "config.json").read_text())
    kinds = {"Config": "Config", "Model": "Model", "ModelForCausalLM": "ForCausalLM"}
    own = {f"Auto{kind}": f"modeling_own.Own{name}" for kind, name in kinds.items()}
    config |= {"model_type": "own_code", "architectures": ["OwnForCausalLM"], "auto_map": own}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClientError, match="trust_remote_code"):
        generate(vllm_with_quark, out, "auto", torch.bfloat16)
    texts = generate(vllm_with_quark, out, "auto", torch.float32, trust_remote_code=True)
    assert compared(*of_the_last_text(texts, plain))["error"] < 0.001


def test_damage_is_told_even_if_the_checkpoint_names_code_that_it_does_not_need(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    out = exported("fp8", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "modeling_own.OwnConfig"}}))
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ClientError, match=r"the checkpoint is damaged: .*up_proj"):
        generate(vllm_with_quark, out, "auto", torch.bfloat16)


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
    with pytest.raises(ClientError, match=r"was written with the format 'acme_nf3' of acme-quant 0\.1\.0\. Install that"):
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


def test_a_checkpoint_of_a_newer_layout_is_refused_with_the_upgrade_that_reads_it(tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    out = exported("mx6", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["plugins"]["formats"]["mx6"]["layout_version"] += 1
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClientError, match=r"holds the format 'mx6' in layout 2.*pip install --upgrade quark-schemes"):
        generate(vllm_with_quark, out, "auto", torch.bfloat16)


@pytest.mark.parametrize("method", ["quark_simulate", "quark_packed"])
def test_two_ranks_compute_what_one_does(method: str, tmp_path: Path, vllm_with_quark: ClientProcess) -> None:
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # of their own, since vLLM gives each rank a node of memory
    client = ClientProcess(vllm_with_quark.command, {**vllm_with_quark.environment, **cores}, tmp_path / "log")
    options: Any = {"own_layers": True, "tensor_parallel_size": 2, "quantization": method}
    try:
        for kind in ("rotations that run", "embedding and head", "mixture of experts", "mixed precision"):
            export_kind(kind, tmp_path / kind)
            is_computed_by_vllm(client, tmp_path / kind, "auto", torch.bfloat16, **options)
    finally:
        client.close()


@attrs.frozen
class Server:
    """A running server.

    Attributes:
        address: Address of its API.
        directory: The checkpoint that it serves.
    """

    address: str
    directory: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's server, which serves a scheme that vLLM does not know."""
    folder = tmp_path_factory.mktemp("server")
    out = exported("mx6", folder / "out")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {**os.environ, **environment(folder), "PYTHONPATH": str(shown_packages(folder / "site"))}
    # The program `vllm serve` of the wheels for CPUs looks for the metadata of the wheel for GPUs; this is what it starts.
    options = ["--model", str(out), "--port", str(port), "--max-model-len", "256"]
    command = [interpreter(), "-m", "vllm.entrypoints.openai.api_server", *options]
    with (folder / "log").open("w") as log, subprocess.Popen(command, env=environ, stdout=log, stderr=log) as process:
        try:
            for _ in range(600):
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                try:
                    urlopen(f"http://127.0.0.1:{port}/health").close()
                    break
                except URLError:
                    time.sleep(1)
            yield Server(f"http://127.0.0.1:{port}/v1", out)
        finally:
            process.terminate()
            process.wait(60)


def test_the_server_answers_several_at_once_as_one_after_the_other(server: Server, tmp_path: Path) -> None:
    run(ASK, tmp_path, server.address, json.dumps(PROMPTS), str(tmp_path / "answers.json"))
    answers = json.loads((tmp_path / "answers.json").read_text())
    alone, together = answers["alone"], answers["together"]
    assert all(alone)
    assert answers["streamed"] == alone
    # Sums over more rows may be in another order, which changes few tokens.
    same = sum(a == b for a, b in zip(together, alone * 2, strict=True))
    assert same >= len(together) / 2


def test_the_server_answers_tasks_of_lm_evaluation_harness_as_the_model_does(server: Server, tmp_path: Path) -> None:
    questions = [json.loads(line) for line in (TASKS / "completions.jsonl").read_text().splitlines()]
    run(EVALUATE, tmp_path, server.address, str(server.directory), str(TASKS), str(ROOT), str(tmp_path / "scores.json"))
    scores = torch.tensor(json.loads((tmp_path / "scores.json").read_text()))
    exact, coarse = (own_scores(dtype, questions) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(scores.argmax(-1), exact.argmax(-1))
    assert (scores - exact).square().mean() <= FARTHER**2 * (coarse - exact).square().mean()


def own_scores(dtype: torch.dtype, questions: list[Any]) -> Tensor:
    """Return the log-probability of each ending of each question, of the model that is served."""
    model, tokenizer = quantized_tiny_model("mx6", dtype), tiny_tokenizer()

    def score(beginning: list[int], ending: list[int]) -> float:
        ids = torch.tensor(beginning + ending)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, len(beginning) - 1 : -1].float().log_softmax(-1)
        return float(logprobs.gather(1, ids[len(beginning) :, None]).sum())

    tokens = [[tokenizer(text)["input_ids"] for text in (one["beginning"], *one["endings"])] for one in questions]
    return torch.tensor([[score(beginning, ending) for ending in endings] for beginning, *endings in tokens])
