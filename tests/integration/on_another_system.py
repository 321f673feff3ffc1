"""A program that quantizes, fails, resumes, replaces, reloads and measures as a user does.

`test_other_systems` runs it on a simulated operating system.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.base.machine import available_bytes, peak_bytes, resident_bytes, total_bytes
from quark.checkpoint import ExportOptions
from quark.checkpoint.atomic_directory import building
from quark.checkpoint.export import export_with
from quark.errors import OutputError
from quark.models.hf.loading import load_model
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.torch import LLMTemplate, load_params, save_params
from quark_devkit.checks.layout import stored_files
from quark_devkit.fresh_process import _context
from quark_devkit.whole_runs import interrupted_behind
from quark_tiny_model import calibration_batches, tiny_model_dir
from quark_workbench.report.contents import machine

TEXT = torch.arange(3, 40)[None]
OPTIONS = ExportOptions(max_shard_bytes=1_000_000)


def interrupted_and_resumed(folder: Path) -> None:
    """Quantize from disk in two runs: the first fails after some blocks, the second resumes."""
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm="gptq")
    asked: Any = (tiny_model_dir(), folder / "resumed", config, calibration_batches(2, 64))
    with interrupted_behind(2):
        quantize_checkpoint(*asked, options=OPTIONS)
    quantize_checkpoint(*asked, options=OPTIONS, resume=True)


def replaced(folder: Path) -> None:
    """Quantize with activations in files, export over an earlier export, and load the result."""
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm="gptq")
    config.activation_memory, config.spill_directory = 0, str(folder)
    model = ModelQuantizer(config).quantize_model(load_model(tiny_model_dir()), calibration_batches(2, 256))
    for overwrite in (False, True):
        (folder / "replaced").mkdir(exist_ok=True)  # the export accepts an empty directory
        export_with("safetensors", model, folder / "replaced", attrs.evolve(OPTIONS, overwrite=overwrite))
    with torch.no_grad():
        logits = model(TEXT).logits
        again = AutoModelForCausalLM.from_pretrained(folder / "replaced")(TEXT).logits
    assert torch.equal(logits, again)
    save_params(model, "tiny", export_dir=folder / "params", compressed=True)
    one, other = (folder / "params" / f"tiny.{ending}" for ending in ("json", "safetensors"))
    loaded = load_params(load_model(tiny_model_dir()), json_path=one, safetensors_path=other)
    with torch.no_grad():
        assert torch.equal(logits, loaded(TEXT).logits)


def held_and_left(folder: Path) -> None:
    """Check that a directory is refused while another process builds it, and accepted after a kill."""
    out = folder / "held"
    with subprocess.Popen(
        [sys.executable, __file__, "hold", str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        with pytest.raises(OutputError, match=f"^process {process.pid} is writing"):
            build(out)
        process.kill()
    build(out)


def build(out: Path) -> None:
    """Build a directory with one file."""
    with building(out) as directory:
        (directory / "a").write_bytes(b"one\ntwo\n")


def hold(out: Path) -> None:
    """Start to build a directory, and wait until the process is killed."""
    with building(out) as directory:
        (directory / "half").write_bytes(b"one\n")
        print("building", flush=True)
        sys.stdin.read()


def asked() -> None:
    """Check the facts of the machine that a run asks for."""
    assert 0 < resident_bytes() <= peak_bytes() <= total_bytes()
    assert 0 < available_bytes() <= total_bytes()
    assert machine()["cores"] > 0
    assert (sys.platform != "win32") == stored_files.CAN_LIMIT
    assert _context().get_start_method() == ("spawn" if sys.platform == "win32" else "forkserver")


def whole(folder: Path) -> None:
    """Run all steps in this process, and leave the files that they write."""
    interrupted_and_resumed(folder)
    replaced(folder)
    asked()


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(Path(sys.argv[2]))
    else:
        assert sys.platform == sys.argv[1]
        whole(Path(sys.argv[2]))
        held_and_left(Path(sys.argv[2]))
