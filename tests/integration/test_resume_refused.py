"""A run other than the interrupted one is refused, and the difference is named.

Finished blocks are kept unless asked otherwise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.checkpoint import CheckpointContent, Exporter, ExportOptions
from quark.checkpoint.atomic_directory import JOURNAL, building
from quark.checkpoint.export import export_with
from quark.errors import ConfigError, NonFiniteError, OutputError, ResumeError, UnsupportedError
from quark.models.hf.loading import load_model
from quark.plugins import ExporterRecord, exporters
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.runs.selected_algorithms import Algorithms
from quark.torch import LLMTemplate
from quark_devkit.whole_runs import interrupted_behind

from .interrupted import (
    BLOCKS,
    DATA,
    config,
    files,
    left_behind,
    partial_of,
)


def change_source(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor += 0.01


def add_to_source(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.rotary_emb.inv_freq"] = torch.zeros(2, dtype=torch.bfloat16)  # which the model computes by itself


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another scheme": (
        {"config": LLMTemplate.get("llama").get_config(scheme="int8", algorithm="gptq")},
        r"settings\.configuration\.global_quant",
    ),
    "another setting of the algorithm": (
        {"config": LLMTemplate.get("llama").get_config("int4_wo_32", algorithm="gptq", algorithm_options={"gptq": {"damp_percent": 0.02}})},
        r"settings\.configuration\.algo_config\.0\.damp_percent was 0\.05 and is 0\.02",
    ),
    "other data": ({"data": [DATA[0], DATA[1] + 1]}, r"data\.digest was"),
    "fewer data": ({"data": DATA[:1]}, r"data\.calls was 2 and is 1"),
    "another dtype": ({"dtype": "float32"}, r"settings\.dtype was 'torch\.bfloat16' and is 'torch\.float32'"),
    "another size of files": (
        {"options": ExportOptions(max_shard_bytes=10_000)},
        r"settings\.exporter options\.max_shard_bytes was 5000000000 and is 10000",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_that_is_not_the_same_is_refused_and_the_difference_is_named(change: str, source: Path, tmp_path: Path) -> None:
    partial = left_behind(source, tmp_path / "out", "gptq")
    before = files(partial / "checkpoint")
    arguments, says = CHANGES[change]
    arguments = {"config": config("gptq"), "data": DATA, **arguments}
    with pytest.raises(ResumeError, match=f"differs from this run: {says}.*--restart") as caught:
        quantize_checkpoint(source, tmp_path / "out", resume=True, **arguments)
    assert caught.value.differences
    assert files(partial / "checkpoint") == before
    quantize_checkpoint(source, tmp_path / "out", config("gptq"), DATA, resume=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [(change_source, r"source\.model\.safetensors\.sample was"), (add_to_source, r"source\.model\.safetensors\.bytes was \d+ and is \d+")],
)
def test_another_source_is_refused(change: Callable[[dict[str, torch.Tensor]], None], says: str, source: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))
    left_behind(own, tmp_path / "out")
    tensors = load_file(own / "model.safetensors")
    change(tensors)
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(ResumeError, match=says):
        quantize_checkpoint(own, tmp_path / "out", config(), resume=True)


def test_another_config_of_the_model_and_another_version_are_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))
    left_behind(own, tmp_path / "out")
    text = (own / "config.json").read_text()
    (own / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert (own / "config.json").read_text() != text
    monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(ResumeError, match=r"versions\.torch was .* and is '9\.9'; source\.config\.json was"):
        quantize_checkpoint(own, tmp_path / "out", config(), resume=True)


def test_finished_blocks_are_neither_ignored_nor_removed_unless_that_is_asked_for(
    source: Path, tmp_path: Path, quantized: list[str]
) -> None:
    out = tmp_path / "out"
    partial = left_behind(source, out)
    model = ModelQuantizer(config()).quantize_model(load_model(source))
    for again in (lambda: quantize_checkpoint(source, out, config()), lambda: export_with("safetensors", model, out)):
        with pytest.raises(ResumeError, match=r"2 finished blocks are in .*resume=True \(--resume\).*restart=True \(--restart\)"):
            again()
    assert (partial / JOURNAL).is_file()
    quantized.clear()
    quantize_checkpoint(source, out, config(), restart=True)
    assert len(quantized) == BLOCKS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_run_that_has_not_finished_a_block_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with interrupted_behind(0):
        quantize_checkpoint(source, tmp_path / "out", config())
    assert list(tmp_path.iterdir()) == []


def test_with_nothing_to_resume_a_run_starts_from_the_beginning(source: Path, tmp_path: Path, quantized: list[str]) -> None:
    quantize_checkpoint(source, tmp_path / "out", config(), resume=True)
    assert len(quantized) == BLOCKS


def test_to_resume_and_to_restart_is_a_contradiction(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Set only one of the two"):
        quantize_checkpoint(source, tmp_path / "out", config(), resume=True, restart=True)


def test_a_second_run_on_the_same_output_is_refused_at_once_and_the_first_is_named(source: Path, tmp_path: Path) -> None:
    for choice in ({}, {"resume": True}, {"restart": True}):
        with building(tmp_path / "out"), pytest.raises(OutputError, match=f"process {os.getpid()} is writing to '{tmp_path / 'out'}'"):
            quantize_checkpoint(source, tmp_path / "out", config(), **choice)


def test_the_documented_method_resumes_too(source: Path, tmp_path: Path, quantized: list[str]) -> None:
    left_behind(source, tmp_path / "out")
    quantized.clear()
    quantizer = ModelQuantizer(config())
    with pytest.raises(ResumeError, match="--resume"):
        quantizer.direct_quantize_checkpoint(source, tmp_path / "out", device="cpu")
    quantizer.direct_quantize_checkpoint(source, tmp_path / "out", device="cpu", resume=True)
    assert quantized == ["model.layers.2"]


class WholeModels(Exporter):
    """An exporter that knows nothing of blocks."""

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("algorithm", "exporter", "says"), [("smoothquant", "safetensors", "changes the whole model"), (None, "other", "resumes = True")]
)
def test_a_run_that_cannot_be_resumed_says_so_before_any_work(
    algorithm: str | None, exporter: str, says: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Algorithms, "works_by_block", algorithm is None)
    exporters().register(ExporterRecord(name="other", exporter=f"{__name__}:WholeModels"))
    asked = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", algorithm=algorithm)
    try:
        with pytest.raises(UnsupportedError, match=f"cannot be resumed: .*{says}"):
            quantize_checkpoint(source, tmp_path / "out", asked, DATA, exporter=exporter, resume=True)
    finally:
        exporters().unregister("other")


def test_an_error_in_a_late_block_says_what_is_kept(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Path(shutil.copytree(source, tmp_path / "source"))
    tensors = load_file(own / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][3, 3] = float("nan")
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"layers\.2\.mlp\.down_proj"):
        quantize_checkpoint(own, tmp_path / "out", config())
    assert f"2 finished blocks are in '{partial_of(tmp_path / 'out')}'" in caplog.text
    assert not (tmp_path / "out").exists()


def test_a_finished_output_is_left_as_it_is_and_another_runs_is_replaced_where_that_is_asked_for(
    source: Path, tmp_path: Path, quantized: list[str]
) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(source, out, config("gptq"), DATA)
    before = files(out)
    quantized.clear()
    for options in (ExportOptions(), ExportOptions(overwrite=True)):
        plan = quantize_checkpoint(source, out, config("gptq"), DATA, resume=True, options=options)
        assert {row.algorithm for row in plan.quantized} == {"gptq"}
    assert quantized == []
    assert files(out) == before
    with pytest.raises(ResumeError, match=r"differs from this run: data\.digest was .* or pass overwrite=True") as caught:
        quantize_checkpoint(source, out, config("gptq"), [DATA[0], DATA[1] + 1], resume=True)
    assert len(caught.value.differences) == 1
    quantize_checkpoint(source, out, config(), options=ExportOptions(overwrite=True), resume=True)
    assert len(quantized) == BLOCKS


def test_an_export_of_which_no_run_is_known_is_refused(source: Path, tmp_path: Path) -> None:
    export_with("safetensors", ModelQuantizer(config()).quantize_model(load_model(source)), tmp_path / "out")
    with pytest.raises(OutputError, match="is not empty"):
        quantize_checkpoint(source, tmp_path / "out", config(), resume=True)
