"""Ranks of one run that were asked for different things refuse before any work, and name what differs.

A source that changes for one of them is an error of all. Here ranks are threads.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.base.ranks import Ranks
from quark.errors import CheckpointError, RankError
from quark.runs import identity, quantize_block, quantize_checkpoint
from quark.runs.selected_algorithms import Algorithms
from quark.runs.source import CheckpointSource
from quark_devkit.threads import in_threads

from .interrupted import DATA, config
from .test_changed_source import CHANGES


def zero_weight(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros_like(tensors["model.layers.1.mlp.up_proj.weight"])
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


def other_config(source: Path) -> None:
    file = source / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def unchanged(_: Path) -> None:
    pass


CASES: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "a tensor of the source": (zero_weight, {}, r"source\.model\.safetensors\.sample is '\w+' there and '\w+' here"),
    "the config of the source": (other_config, {}, r"source\.config\.json is"),
    "data": (unchanged, {"data": [tokens + 1 for tokens in DATA]}, r"data\.digest is"),
    "fewer data": (unchanged, {"data": DATA[:1]}, "data.calls is 2 there and 1 here"),
    "an algorithm": (unchanged, {"config": config("round to nearest")}, r"settings\.configuration\.algo_config"),
    "a scheme": (unchanged, {"config": config("two levels of scales")}, r"settings\.configuration\.global_quant_config"),
    "a dtype": (unchanged, {"dtype": "float32"}, "settings.dtype is 'torch.bfloat16' there and 'torch.float32' here"),
    "an exporter": (unchanged, {"exporter": "gguf"}, "settings.exporter is 'safetensors' there and 'gguf' here"),
    "whether it resumes": (unchanged, {"resume": True}, "leftover is 'refuse' there and 'resume' here"),
}


@pytest.fixture
def blocks_read(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    read: list[object] = []
    monkeypatch.setattr(CheckpointSource, "load", lambda self, block: read.append(block))
    monkeypatch.setattr(CheckpointSource, "load_all", lambda self: read.append(None))
    return read


def run(source: Path, out: Path, other: Path, more: dict[str, Any]) -> None:
    def of_rank(ranks: Ranks) -> None:
        settings = {"config": config("gptq"), "data": DATA} | (more if ranks.rank else {})
        quantize_checkpoint(other if ranks.rank else source, out, ranks=ranks, **settings)

    in_threads(of_rank, 2)


@pytest.mark.parametrize("what", CASES)
def test_ranks_that_differ_refuse_before_work(what: str, source: Path, tmp_path: Path, blocks_read: list[object]) -> None:
    change, more, complaint = CASES[what]
    other = tmp_path / "other"
    shutil.copytree(source, other)
    change(other)
    with pytest.raises(RankError, match=rf"Process 1 \(here\) differs from process 0 \(there\): .*{complaint}"):
        run(source, tmp_path / "out", other, more)
    assert not blocks_read
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


def test_ranks_with_other_versions_refuse(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = identity._versions

    def versions(*args: Any) -> dict[str, str]:
        return plain(*args) | ({"torch": "1.0"} if threading.current_thread().name == "rank 1" else {})

    monkeypatch.setattr(identity, "_versions", versions)
    with pytest.raises(RankError, match=r"versions\.torch is '2\.\S+' there and '1\.0' here"):
        run(source, tmp_path / "out", source, {})


def test_ranks_with_copies_of_one_source_are_one_run(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(source, other)
    run(source, tmp_path / "out", other, {})
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", ["round to nearest", "gptq"])
@pytest.mark.parametrize("what", ["replaced", "rewritten with its time"])
def test_a_source_that_changes_for_one_rank_is_an_error_of_all(
    what: str, name: str, is_whole: bool, rank: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [Path(shutil.copytree(source, tmp_path / f"source {number}")) for number in (0, 1)]
    stopped: dict[int, Exception] = {}
    changed = threading.Event()
    plain = quantize_block.quantize_block

    def acting(pipeline: Any, each: Any, *rest: Any) -> None:
        plain(pipeline, each, *rest)
        if threading.current_thread().name == f"rank {rank}" and not changed.is_set():
            CHANGES[what][0](copies[rank])
            changed.set()

    def of_rank(ranks: Ranks) -> None:
        try:
            quantize_checkpoint(copies[ranks.rank], tmp_path / "out", config(name), DATA, ranks=ranks)
        except Exception as error:
            stopped[ranks.rank] = error
            raise

    monkeypatch.setattr(quantize_block, "quantize_block", acting)
    if is_whole:
        monkeypatch.setattr(Algorithms, "works_by_block", False)
    with pytest.raises(CheckpointError, match=rf"source {rank}.* (was|has been) changed"):
        in_threads(of_rank, 2)
    assert changed.is_set()
    assert isinstance(stopped[1 - rank], RankError)
    assert not (tmp_path / "out").exists()
