"""Laws of every scheme with every kind of algorithm: quantizing from disk to disk writes the files that an in-memory run exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quark
import quark_tiny_model as tiny
from quark.checkpoint.export import export_with
from quark.config.model import QConfig
from quark.models.hf.loading import load_model
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.torch import LLMTemplate
from quark_devkit.whole_runs import contents

SCHEMES = quark.schemes().names()
ALGORITHMS = {"rtn": (), "gptq": ("gptq",), "awq": ("awq",)}
QUICK = {("mxfp4_weight_only", "rtn"), ("fp8", "gptq"), ("nvfp4", "gptq"), ("int4_wo_128", "awq"), ("mxfp4_fp8", "awq")}
"""Pairs outside of the slow tests: both levels of scales, static and dynamic inputs.
`tests/integration/test_from_disk.py` has others.
"""


def pairs() -> list[Any]:
    return [
        pytest.param(scheme, algorithm, marks=() if (scheme, algorithm) in QUICK else (pytest.mark.slow,))
        for scheme in SCHEMES
        for algorithm in ALGORITHMS
    ]


def config(scheme: str, algorithm: str) -> QConfig:
    return LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=list(ALGORITHMS[algorithm]))


@pytest.mark.parametrize(("scheme", "algorithm"), pairs())
def test_the_files_from_disk_are_those_of_the_export_from_memory(scheme: str, algorithm: str, tmp_path: Path) -> None:
    source, data = tiny.tiny_model_dir(), tiny.calibration_batches(8, 64)
    plan = quantize_checkpoint(source, tmp_path / "disk", config(scheme, algorithm), data)
    model = ModelQuantizer(config(scheme, algorithm)).quantize_model(load_model(source), data)
    export_with("safetensors", model, tmp_path / "memory")
    assert len(plan.quantized) == 21
    assert {row.algorithm or "rtn" for row in plan.quantized} == {algorithm}
    disk, memory = contents(tmp_path / "disk"), contents(tmp_path / "memory")
    assert {"config.json", "model.safetensors"} <= set(disk)
    assert sorted(disk) == sorted(memory)
    assert [name for name in disk if disk[name] != memory[name]] == []
