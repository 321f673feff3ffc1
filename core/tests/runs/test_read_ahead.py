"""`quark.runs.source.ReadAhead`, and the blocks that `CheckpointSource` reads ahead.

It reads one block ahead, raises errors when the block is loaded, and leaves no thread behind.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from quark.errors import CheckpointError
from quark.models.hf.stored_tensors import StoredTensors
from quark.models.plan.decoder_blocks import Block
from quark.runs import quantize_checkpoint, source
from quark.runs.source import CheckpointSource, ReadAhead
from quark.torch import LLMTemplate
from quark_tiny_model import tiny_model_dir


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("quark-read-ahead")]


def test_a_thing_is_read_once_in_a_thread_and_taken() -> None:
    seen: list[tuple[int, bool]] = []
    ahead = ReadAhead[int, int](lambda key: seen.append((key, threading.current_thread() is threading.main_thread())) or 2 * key)
    assert ahead.take(1) == 2
    ahead.start(3)
    assert ahead.take(3) == 6
    assert seen == [(1, True), (3, False)]


def test_what_was_read_ahead_for_nothing_is_dropped() -> None:
    ahead = ReadAhead[int, int](lambda key: key)
    ahead.start(1)
    assert ahead.take(2) == 2
    ahead.start(3)
    ahead.start(4)
    ahead.stop()
    ahead.stop()
    assert ahead.take(3) == 3


def test_an_error_of_the_thread_comes_out_where_the_thing_is_taken_and_only_there() -> None:
    def fail(key: int) -> int:
        raise CheckpointError(f"{key} is damaged")

    ahead = ReadAhead[int, int](fail)
    ahead.start(1)
    with pytest.raises(CheckpointError, match="1 is damaged"):
        ahead.take(1)
    ahead.start(2)
    ahead.stop()


def test_one_block_is_read_ahead_and_no_thread_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str | None] = []
    plain = ReadAhead.start
    monkeypatch.setattr(ReadAhead, "start", lambda self, key: (started.append(key), plain(self, key))[1])
    quantize_checkpoint(tiny_model_dir(), tmp_path / "out", LLMTemplate.get("llama").get_config("int4_wo_64"))
    assert started == [f"model.layers.{i}" for i in range(3)]
    assert threads() == []


def test_nothing_is_read_ahead_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = sum(p.numel() * p.itemsize for name, p in tensors_of_a_block())
    config = LLMTemplate.get("llama").get_config("int4_wo_64")
    started: list[str | None] = []
    monkeypatch.setattr(ReadAhead, "start", lambda self, key: started.append(key))
    for free in (None, source.LEAST_ROOM * block - 1):
        monkeypatch.setattr(source, "free_bytes", lambda _, free=free: free)
        quantize_checkpoint(tiny_model_dir(), tmp_path / f"out{free}", config)
        assert started == []
    monkeypatch.setattr(source, "free_bytes", lambda _: source.LEAST_ROOM * block)
    quantize_checkpoint(tiny_model_dir(), tmp_path / "out", config)
    assert len(started) == 3


def tensors_of_a_block() -> list[tuple[str, torch.Tensor]]:
    from quark.models.hf.skeleton import meta_model

    return [(name, p) for name, p in meta_model(tiny_model_dir()).named_parameters() if name.startswith("model.layers.0.")]


def test_an_error_while_reading_ahead_names_the_block_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str | None] = []
    load, read = CheckpointSource.load, StoredTensors.read

    def noted(self: CheckpointSource, block: Block | None) -> None:
        loaded.append(None if block is None else block.name)
        load(self, block)

    def failing(self: StoredTensors, recipes: object, *args: object) -> object:
        recipes = list(recipes)  # type: ignore[call-overload]
        if any("layers.1." in target and "proj" in target for recipe in recipes for target in recipe.targets):
            raise CheckpointError("layer 1 is damaged")
        return read(self, recipes, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointSource, "load", noted)
    monkeypatch.setattr(StoredTensors, "read", failing)
    with pytest.raises(CheckpointError, match="layer 1 is damaged"):
        quantize_checkpoint(tiny_model_dir(), tmp_path / "out", LLMTemplate.get("llama").get_config("int4_wo_64"))
    assert loaded == [None, "model.layers.0", "model.layers.1"]
    assert threads() == []
    assert not (tmp_path / "out").exists()
