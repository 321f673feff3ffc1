"""A checkpoint that is cut while it is read is an error about it, and one that changes later changes no model.

A mapped file would end the process, or change the weights of a model that was loaded from it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_utils

from quark.checkpoint.inspection import inspect_checkpoint
from quark.checkpoint.reader import packed_content
from quark.checkpoint.transformers_loading import load_checkpoint
from quark.errors import CheckpointError
from quark.models.hf import file_tensors
from quark.models.hf.loading import load_model
from quark.runs import quantize_checkpoint
from quark.torch import import_model_from_safetensors
from quark_workbench.evaluate import Windows
from quark_workbench.evaluate.by_block import likelihood_by_block
from quark_workbench.evaluate.quantized_checkpoint import QuantizedCheckpoint

from .interrupted import DATA, config

SHARD = "model.safetensors"


def by_block(directory: Path) -> Any:
    checkpoint = QuantizedCheckpoint(directory, torch.device("cpu"))
    for block in (None, *checkpoint.blocks):
        checkpoint.load(block)
    return checkpoint.model


MODELS: dict[str, Callable[[Path], Any]] = {
    "import": lambda directory: import_model_from_safetensors(None, directory),
    "import, packed": lambda directory: import_model_from_safetensors(None, directory, packed=True),
    "by block": by_block,
    "by transformers": load_checkpoint,
    "by transformers, packed": lambda directory: load_checkpoint(directory, packed=True),
    "float": load_model,
}
ROUTES = {
    **MODELS,
    "packed content": packed_content,
    "inspect": inspect_checkpoint,
    "float, by block": lambda directory: likelihood_by_block(directory, [Windows(DATA[0], torch.ones_like(DATA[0], dtype=torch.bool))]),
}


@pytest.fixture(scope="module")
def export(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "out"
    quantize_checkpoint(source, out, config())
    return out


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Returns a copy of the checkpoint that a route is for."""

    def copy(route: str) -> Path:
        return Path(shutil.copytree(request.getfixturevalue("source" if "float" in route else "export"), tmp_path / "checkpoint"))

    return copy


def cut(file: Path) -> None:
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    os.truncate(file, header + 64)


def removed(file: Path) -> None:
    file.unlink()


@pytest.mark.posix("Windows cuts and removes no file that is open")
@pytest.mark.parametrize("change", [cut, removed])
@pytest.mark.parametrize("route", ROUTES)
def test_a_file_that_changes_while_it_is_read_is_an_error_about_it(
    route: str, change: Callable[[Path], None], copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copied(route)
    opened, read_at = modeling_utils.safe_open, file_tensors.read_at

    def act() -> None:
        if (directory / SHARD).is_file():
            change(directory / SHARD)

    def opening(*args: Any, **options: Any) -> Any:
        file = opened(*args, **options)
        act()
        return file

    def reading(*args: Any) -> int:
        count = read_at(*args)
        act()
        return count

    monkeypatch.setattr(modeling_utils, "safe_open", opening)
    monkeypatch.setattr(file_tensors, "read_at", reading)
    if change is removed and "transformers" not in route and "block" not in route and route != "float":
        ROUTES[route](directory)  # its file is open, and holds what was checked
        return
    with pytest.raises(CheckpointError, match=rf"{SHARD}' (has been changed or replaced|cannot be read any more)|from '.*{SHARD}'"):
        ROUTES[route](directory)


@pytest.mark.parametrize("route", MODELS)
def test_a_model_stays_what_it_is_when_its_file_is_written_to(route: str, copied: Callable[[str], Path]) -> None:
    directory = copied(route)
    model = MODELS[route](directory)
    expected = values_of(model)
    data = (directory / SHARD).read_bytes()
    with (directory / SHARD).open("r+b") as file:
        file.write(bytes(len(data)))
    assert len(expected) > 20
    assert all(torch.equal(one, other) for one, other in zip(expected, values_of(model), strict=True))


def values_of(model: Any) -> list[Tensor]:
    return [tensor.reshape(-1).clone() for tensor in model.state_dict().values()]
