"""Evaluation block by block gives the figures of one in memory, bit for bit, and holds one block."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from quark.calibration import lockstep
from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark.models.hf.loading import load_model
from quark.runs import quantize_checkpoint
from quark_tiny_model import calibration_batches, held_out_text, tiny_model_dir, tiny_template, tiny_tokenizer
from quark_workbench.commands import evaluate
from quark_workbench.evaluate import Windows, compare, likelihood, protocol_of, scored_windows
from quark_workbench.evaluate.by_block import compare_by_block, likelihood_by_block
from quark_workbench.evaluate.quantized_checkpoint import QuantizedCheckpoint

FLOAT = tiny_model_dir()


def windows(**changes: Any) -> list[Windows]:
    return list(scored_windows(tiny_tokenizer(), held_out_text(), protocol_of("quark", seq_len=64, **changes), 8).split(2))


def quantized(out: Path, scheme: str, **options: Any) -> Path:
    quantize_checkpoint(FLOAT, out, tiny_template().get_config(scheme, **options), calibration_batches(4, 64))
    return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("int4_wo_32", {}),
        ("mxfp4", {}),
        ("fp8", {"kv_cache_scheme": "fp8"}),
        ("int4_wo_64", {"algorithm": "rotation"}),
        ("int8", {"exclude_layers": []}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_comparison_has_the_same_figures(tmp_path: Path, scheme: str, options: dict[str, Any]) -> None:
    out = quantized(tmp_path / "out", scheme, **options)
    expected = compare(load_model(out), load_model(FLOAT), windows(), ["accuracy"])
    assert compare_by_block(out, FLOAT, windows(), ["accuracy"]) == expected
    assert expected.mean_kl > 0


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_perplexity_of_a_float_model_is_the_same(dtype: str) -> None:
    batches = windows(stride=32)
    assert likelihood_by_block(FLOAT, batches, dtype=dtype) == likelihood(load_model(FLOAT, dtype), batches)


def test_one_block_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = quantized(tmp_path / "out", "int4_wo_32")
    loaded: list[int] = []
    release = QuantizedCheckpoint.release

    def counting(self: QuantizedCheckpoint, block: Any) -> None:
        present = [b for b in self.blocks if is_there(b.module) and b in seen]
        seen.append(block)
        loaded.append(len(present))
        release(self, block)
        assert not is_there(block.module)

    def is_there(block: nn.Module) -> bool:
        return any(not tensor.is_meta for tensor in (*block.parameters(), *block.buffers()))

    seen: list[Any] = []
    monkeypatch.setattr(QuantizedCheckpoint, "release", counting)
    likelihood_by_block(out, windows())
    assert loaded == [0, 0, 0]


def test_a_comparison_leaves_no_forward_behind(tmp_path: Path) -> None:
    assert lockstep.current_forward() is None
    with pytest.raises(ConfigError, match="the batches are empty"):
        likelihood_by_block(FLOAT, [])


def test_a_missing_tensor_is_found_before_a_block_is_read(tmp_path: Path) -> None:
    out = quantized(tmp_path / "out", "mxfp4")
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    broken = shutil.copytree(out, tmp_path / "broken")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor\(s\): model\.layers\.2\.mlp\.up_proj"):
        likelihood_by_block(broken, windows())


def test_another_dtype_of_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    out = quantized(tmp_path / "out", "mxfp4")
    with pytest.raises(UnsupportedError, match="use --dtype auto"):
        likelihood_by_block(out, windows(), dtype="float32")


def test_the_command_has_it(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command("evaluate")(evaluate.evaluate)
    app.command("other")(lambda: None)
    out = quantized(tmp_path / "out", "mxfp4")
    command = ["evaluate", str(out), "--reference", str(FLOAT), "--seq-len", "64", "--limit", "4", "--json"]
    results = []
    for flags in ([], ["--by-block"]):
        done = CliRunner().invoke(app, [*command, *flags], catch_exceptions=False)
        results.append({key: value for key, value in json.loads(done.stdout.splitlines()[-1]).items() if key != "seconds"})
    assert results[0] == results[1]
