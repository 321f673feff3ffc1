"""Laws of the state of torch around a run: what the caller, or another thread, has set changes no byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch

import quark_tiny_model as tiny
from quark.base import torch_state
from quark.plugins import algorithms
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate

SCHEMES = {"rotation": "mxfp4", "smoothquant": "int8", "quarot": "mxfp4"}
"""Schemes of algorithms that need others than int4."""
STEPS = {"autoround": pytest.mark.thorough}
"""Algorithms that take seconds, because they make many steps."""
RUNS = [
    ("int4_wo_64", None),
    ("fp8", None),
    ("nvfp4", "gptq"),
    *(pytest.param(SCHEMES.get(name, "int4_wo_64"), name, marks=STEPS.get(name, ())) for name in algorithms().names()),
]
DATA = [torch.arange(3, 67)[None]] * 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16: transformers sets that default dtype while it builds the model."""
    out = tmp_path_factory.mktemp("bfloat16")
    tiny.tiny_model(blocks=1).to(torch.bfloat16).save_pretrained(out)
    return out


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def digest(source: Path, out: Path, scheme: str, algorithm: str | None) -> str:
    config = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=[algorithm] if algorithm else [])
    quantize_checkpoint(source, out, config, DATA)
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


@cache
def plain(source: Path, scheme: str, algorithm: str | None) -> str:
    return digest(source, source.parent / f"plain-{scheme}-{algorithm}", scheme, algorithm)


@pytest.mark.parametrize(("scheme", "algorithm"), RUNS)
def test_the_state_of_the_caller_changes_no_byte_and_is_put_back(source: Path, tmp_path: Path, scheme: str, algorithm: str | None) -> None:
    expected = plain(source, scheme, algorithm)
    with ExitStack() as stack:
        for state in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), default_dtype(torch.float64), torch.device("meta")):
            stack.enter_context(state)
        assert digest(source, tmp_path / "out", scheme, algorithm) == expected
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() is torch.float64
        assert torch.get_default_device().type == "meta"


@pytest.mark.parametrize(("scheme", "algorithm"), RUNS)
def test_no_byte_depends_on_the_default_dtype_that_another_thread_sets(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, algorithm: str | None
) -> None:
    expected = plain(source, scheme, algorithm)
    monkeypatch.setattr(torch_state, "_float32_by_default", nullcontext)
    with default_dtype(torch.bfloat16):
        assert digest(source, tmp_path / "out", scheme, algorithm) == expected
