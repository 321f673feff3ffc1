"""Kernels compile for NVIDIA's and AMD's GPUs, without one too, to exact and fast code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quark.numbers import quantizer_for
from tests.kit.kernel_specs import CASES

pytestmark = pytest.mark.thorough

pytest.importorskip("triton", reason="Triton is not installed: make kernels")
ROOT = Path(__file__).resolve().parents[2]


def compiled(target: str, cache: Path, cases: str = "kinds") -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.compile_kernels", target, cases],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ROCm linker" in done.stderr:
        pytest.skip("this Triton comes without a linker for AMD's GPUs")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def has_device_code(name: str) -> bool:
    spec, activation = CASES[name]
    level = quantizer_for(spec, activation=activation).stored_level
    return level.format.device_code(level.spec) is not None


def test_every_spec_compiles_to_exact_code(tmp_path: Path) -> None:
    """The interpreter cannot tell: it computes with Python's numbers where the compiler has none."""
    kernels = compiled("cuda:90", tmp_path, "specs")
    assert {one["case"].partition(",")[0] for one in kernels} == {name for name in CASES if has_device_code(name)}
    for one in kernels:
        assert (one["spills"], "div.full" in one["text"], "fma.rn.f32" in one["text"]) == (0, False, False), one["case"]


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
def test_code_for_nvidia_is_exact_wide_and_in_registers(target: str, tmp_path: Path) -> None:
    kernels = compiled(target, tmp_path)
    assert {one["kernel"] for one in kernels} == {"round_runs", "pack_words", "unpack_words", "_round_columns"}
    for one in kernels:
        text, case = one["text"], (one["kernel"], one["case"])
        assert one["spills"] == 0, case
        assert ".local" not in text, case
        assert "div.full" not in text, case  # division that is off by up to 2 units in the last place
        if one["kernel"] == "round_runs" and "bfp16" in one["case"]:
            assert "fma.rn.f32" not in text, case  # blocks of 8 values, which are less than threads load at once
        elif one["kernel"] == "round_runs":
            assert "fma.rn.f32" not in text, case  # a product and a sum that are rounded once
            assert "ld.global.v4.b32" in text, case
            assert re.search(r"st\.global\.v[24]\.b32", text), case
            assert ("cvt.rn.bf16" in text) == ("codes" not in one["case"]), case


def test_code_for_amd_needs_no_memory_for_registers(tmp_path: Path) -> None:
    kernels = compiled("hip:gfx942", tmp_path)
    assert {one["kernel"] for one in kernels} == {"round_runs", "pack_words", "unpack_words", "_round_columns"}
    assert all(".private_segment_fixed_size: 0" in one["text"] for one in kernels)
