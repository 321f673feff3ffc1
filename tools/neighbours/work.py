"""Steps in the environment of a neighbour with the tiny model: quantize, evaluate, load, serve."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from tools.neighbours.environments import Environment, FailedCommandError

__all__ = ["MOST_NATS", "PAGE", "compared_over_http", "work"]

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/serve-anything.md"
"""The page that compares a server with the model; a step runs its code."""
SCHEMES = ("int4_wo_64", "mx6")
MOST_NATS = 0.02
"""Largest mean difference of vLLM's log-probabilities for the tiny model in mx6 and float32.

Summation in another order gives 0.005, inputs that are not rounded give 0.05, and the float model 0.06.
"""
_SCALES_IN_BFLOAT16 = 2.0**-6
"""Largest relative error of the logits: compressed-tensors rounds scales to the model's dtype."""

_LOADED = """
import sys, torch
from transformers import AutoModelForCausalLM
directory, reader, most = sys.argv[1:]
ids = torch.arange(64)[None]
with torch.no_grad():
    found = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")(ids).logits
    assert reader == "quark" or not any(name.partition(".")[0] == "quark" for name in sys.modules)
    from quark.torch import import_model_from_safetensors
    expected = import_model_from_safetensors(None, directory)(ids).logits
error = float((found - expected).float().norm() / expected.float().norm())
assert error <= float(most), f"the logits differ by {error:.2%}"
print("the same logits" if error == 0 else f"logits differ by {error:.1%}")
"""
_MIXTURE = """
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, shared_expert_intermediate_size=64)
heads = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **heads)).save_pretrained("mixture")
"""
_WRITTEN_BY_LLM_COMPRESSOR = """
import sys
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
oneshot(model=sys.argv[1], recipe=recipe, output_dir=sys.argv[2])
"""


def work(name: str, environment: Environment, folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the steps of a neighbour: a description, and a function that returns the step's result.

    Args:
        name: One of `NEIGHBOURS`.
        environment: Environment of the neighbour, with our wheels.
        folder: An empty folder for checkpoints.
    """
    tiny = environment.run("-c", "from quark_tiny_model import tiny_model_dir; print(tiny_model_dir())").strip()

    def quantize() -> str:
        for scheme in SCHEMES:
            environment.quark("quantize", tiny, scheme, "--scheme", scheme, cwd=folder)
        return ", ".join(SCHEMES)

    def evaluate() -> str:
        printed = environment.quark("evaluate", SCHEMES[-1], "--reference", tiny, "--limit", "2", "--json", cwd=folder)
        return f"perplexity {perplexity(printed):.2f}"

    def load() -> str:
        (said,) = {loaded(environment, folder, scheme, "quark") for scheme in SCHEMES}
        return said

    yield "quantize", quantize
    yield "evaluate", evaluate
    yield "load in transformers", load
    yield "load a mixture in transformers", lambda: _mixture(environment, folder)
    yield from _OF_NEIGHBOUR[name](environment, folder, tiny)


def loaded(environment: Environment, folder: Path, checkpoint: str, reader: str, most: float = 0) -> str:
    """Load a checkpoint with transformers and with quark, and return the difference of the logits.

    Raises:
        FailedCommandError: The relative error of the logits is larger than ``most``.
    """
    return environment.run("-c", _LOADED, checkpoint, reader, str(most), cwd=folder).strip().splitlines()[-1]


def _mixture(environment: Environment, folder: Path) -> str:
    """Quantize a random mixture of experts, and load the checkpoint, since releases of transformers load
    experts differently."""
    environment.run("-c", _MIXTURE, cwd=folder)
    for scheme in SCHEMES:
        environment.quark("quantize", "mixture", f"mixture-{scheme}", "--scheme", scheme, cwd=folder)
    (said,) = {loaded(environment, folder, f"mixture-{scheme}", "quark") for scheme in SCHEMES}
    return said


def perplexity(printed: str) -> float:
    """Return the perplexity in the output of ``quark evaluate --json``."""
    return float(re.findall(r'"perplexity": ?([\d.]+)', printed)[0])


def _vllm(environment: Environment, folder: Path, tiny: str) -> Iterator[tuple[str, Callable[[], str]]]:
    def serve() -> str:
        for scheme in SCHEMES:
            with served(environment, folder, scheme) as address:
                assert len(complete(address, scheme, "And God said, Let there be")) > 0
        return ", ".join(SCHEMES)

    yield "serve over HTTP", serve
    yield "compare with the model in float32", lambda: compared_over_http(environment, folder)


def _llmcompressor(environment: Environment, folder: Path, tiny: str) -> Iterator[tuple[str, Callable[[], str]]]:
    def read() -> str:
        environment.run("-c", _WRITTEN_BY_LLM_COMPRESSOR, tiny, "written", cwd=folder)
        return loaded(environment, folder, "written", "compressed-tensors")

    yield "load by compressed-tensors", lambda: _by_compressed_tensors(environment, folder, tiny)
    yield "read what it writes", read


def _sglang(environment: Environment, folder: Path, tiny: str) -> Iterator[tuple[str, Callable[[], str]]]:
    def start() -> str:
        environment.run("-c", "import quark.torch; from sglang.srt.server_args import ServerArgs; import sglang.srt.configs", cwd=folder)
        return "is only imported; its server needs a GPU"

    yield "load by compressed-tensors", lambda: _by_compressed_tensors(environment, folder, tiny)
    yield "serve over HTTP", start


def _by_compressed_tensors(environment: Environment, folder: Path, tiny: str) -> str:
    options = ("--scheme", "int4_wo_64", "--exporter", "compressed_tensors")
    environment.quark("quantize", tiny, "exported", *options, cwd=folder)
    return loaded(environment, folder, "exported", "compressed-tensors", most=_SCALES_IN_BFLOAT16)


_OF_NEIGHBOUR = {"vllm": _vllm, "llmcompressor": _llmcompressor, "sglang": _sglang}


def compared_over_http(environment: Environment, folder: Path) -> str:
    """Run the comparison that a page of the documentation shows, and return its output.

    Raises:
        FailedCommandError: The comparison fails, or the difference is larger than another order of summation
            can cause.
    """
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    (folder / "text.txt").write_text(environment.run("-c", "import quark_tiny_model as m; print(m.held_out_text()[:2000])"))
    (folder / "served").symlink_to(SCHEMES[-1])
    with served(environment, folder, "served", "--quantization", "quark_simulate", "--dtype", "float32") as address:
        said = environment.run("-c", code.replace("http://127.0.0.1:8000", address), cwd=folder).strip()
    if float(re.findall(r"[\d.]+", said)[0]) > MOST_NATS:
        raise FailedCommandError(f"the results of vLLM differ from those of quark: {said}")
    return said


@contextmanager
def served(environment: Environment, folder: Path, model: str, *options: str) -> Iterator[str]:
    """Serve a checkpoint with vLLM while the body runs, and yield the address of the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = ("-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", str(port))
    command = [str(environment.python), *program, "--max-model-len", "512", "--enforce-eager", *options]
    log = folder / "server.log"
    with log.open("w") as file, subprocess.Popen(command, cwd=folder, env=environment.variables(), stdout=file, stderr=file) as process:
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    for _ in range(900):
        if process.poll() is not None:
            break
        try:
            urlopen(f"{address}/health").close()
        except URLError:
            time.sleep(1)
        else:
            return
    raise FailedCommandError(f"the server does not start:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}")


def complete(address: str, model: str, prompt: str) -> str:
    """Request 16 tokens from a server, and return the text."""
    question = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    request = Request(f"{address}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text
