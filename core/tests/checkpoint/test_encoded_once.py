"""A run encodes each weight once, with any algorithm, and a model in memory keeps no codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.models.hf.loading import load_model
from quark.models.layers import QuantizedLayer
from quark.numbers import QParams, on_grid
from quark.numbers.single_level import SingleLevelQuantizer
from quark.plugins import algorithms
from quark.plugins.attribution import Origin
from quark.plugins.catalog import catalog
from quark.plugins.discovery import Source
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.torch import LLMTemplate

IDS = [torch.randint(0, 200, (1, 64), generator=torch.Generator().manual_seed(i)) for i in range(6)]
CASES = [
    ("int4_wo_64", ()),
    ("int4_wo_64", ("gptq",)),
    ("uint4_wo_64", ("awq", "gptq")),
    ("fp8", ("gptq",)),
    ("mxfp4", ("gptq",)),
    ("nvfp4", ()),
    ("nvfp4", ("gptq",)),
    pytest.param("int4_wo_64", ("autoround",), marks=pytest.mark.slow),
    pytest.param("nvfp4", ("autoround",), marks=pytest.mark.slow),
]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of elements of each weight that is encoded.

    Samples of rows, and formats that check themselves, do not count.
    """
    counts: list[int] = []
    shapes = {layer.weight.shape for layer in quantized_layers()}
    quantize = SingleLevelQuantizer.quantize

    def counted(self: SingleLevelQuantizer, x: Tensor, qparams: QParams) -> Tensor:
        if x.shape in shapes and not x.is_meta:
            counts.append(x.numel())
        return quantize(self, x, qparams)

    monkeypatch.setattr(on_grid, "SAMPLE", 1)
    monkeypatch.setattr(SingleLevelQuantizer, "quantize", counted)
    return counts


def config(scheme: str, names: tuple[str, ...]) -> Any:
    return LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=list(names) or None)


def quantized_layers() -> list[nn.Linear]:
    """Return the float layers that are quantized."""
    modules = load_model(tiny.tiny_model_dir()).named_modules()
    return [m for name, m in modules if isinstance(m, nn.Linear) and name != "lm_head"]


def elements() -> int:
    """Return the number of elements of their weights."""
    return sum(layer.weight.numel() for layer in quantized_layers())


@pytest.mark.parametrize(("scheme", "names"), CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x))
def test_a_run_from_disk_encodes_each_weight_once(scheme: str, names: tuple[str, ...], tmp_path: Path, encoded: list[int]) -> None:
    quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "out", config(scheme, names), IDS)
    assert sum(encoded) == elements()


def test_codes_by_which_a_weight_was_checked_whole_are_stored(tmp_path: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog(), "is_strict", True)
    whole: list[int] = []
    complaint = on_grid.off_grid

    def checked(values: Tensor, decoded: Tensor) -> str | None:
        whole.append(values.numel() if len(values) > 1 else 0)
        return complaint(values, decoded)

    monkeypatch.setattr(on_grid, "off_grid", checked)
    quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "out", config("int4_wo_64", ("gptq",)), IDS)
    assert sum(encoded) == elements()
    assert sum(whole) == elements()


def test_a_model_in_memory_keeps_no_codes() -> None:
    model = ModelQuantizer(config("nvfp4", ("gptq",))).quantize_model(load_model(tiny.tiny_model_dir()), IDS)
    modules = [m.weight_quantizer for m in model.modules() if isinstance(m, QuantizedLayer)]
    assert modules
    assert all(module is not None and module.codes is None for module in modules)


def test_results_of_other_projects_are_checked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = algorithms().source("gptq"), Source("acme-quant", "1.0")
    monkeypatch.setattr(catalog(), "is_strict", False)
    assert not Origin("gptq", own).is_checked_whole
    assert Origin("weighted", other).is_checked_whole
    monkeypatch.setattr(catalog(), "is_strict", True)
    assert Origin("gptq", own).is_checked_whole
