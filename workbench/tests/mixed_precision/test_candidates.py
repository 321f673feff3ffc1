"""Candidates: which there are, and that a layer takes the bytes that an export writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quark.errors import ConfigError, UnknownNameError
from quark.plugins import schemes
from quark.torch import export_safetensors
from quark_devkit.small_models import fitting_schemes, quantized, run_config
from quark_workbench.mixed_precision import FLOAT, Candidate, candidates_of


@pytest.mark.parametrize("scheme", [*fitting_schemes(), "fp8", "int8", "nvfp4"])
def test_a_layer_takes_the_bytes_that_an_export_writes(scheme: str, tmp_path: Path) -> None:
    config = schemes().load_config(scheme)()
    candidate = Candidate(scheme, config)
    model = quantized(run_config(scheme), torch.bfloat16)
    export_safetensors(model, tmp_path / "out")
    stored = {name: tensor.nbytes for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()}
    for row in model.quark_plan.quantized:
        written = sum(size for name, size in stored.items() if name.startswith(f"{row.name}.") and not name.endswith(".bias"))
        assert candidate.stored_bytes(row.shape, torch.bfloat16) == written, row.name


def test_a_float_layer_takes_the_bytes_of_its_dtype() -> None:
    candidate = candidates_of(["fp8", "bf16"])[FLOAT]
    assert candidate.is_float
    assert candidate.stored_bytes((3, 5), torch.bfloat16) == 30
    assert candidate.stored_bytes((3, 5), torch.float32) == 60


def test_what_does_not_fit_a_shape_says_why() -> None:
    candidate = candidates_of(["int4_wo_128", "fp8"])["int4_wo_128"]
    assert candidate.shape_error((64, 576)) is not None
    assert candidate.shape_error((64, 1536)) is None


def test_one_candidate_is_no_choice() -> None:
    for names in (["fp8"], [], ["bf16"]):
        with pytest.raises(ConfigError, match="two candidates or more"):
            candidates_of(names)
    with pytest.raises(ConfigError, match="'bfloat16' is named twice"):
        candidates_of(["fp8", "bf16", "bfloat16"])
    with pytest.raises(UnknownNameError, match="pf8"):
        candidates_of(["pf8", "mxfp4"])


def test_a_runtime_has_to_load_every_candidate() -> None:
    assert list(candidates_of(["fp8", "mxfp4", "bf16"], "vllm")) == ["fp8", "mxfp4", FLOAT]
    with pytest.raises(ConfigError, match=r"'vLLM' does not load the scheme 'int4_wo_per_channel'; runtimes that load it:"):
        candidates_of(["fp8", "int4_wo_per_channel"], "vLLM")
