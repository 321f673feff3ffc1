"""Broken branches: each ends the run with an error that names plugin, version, algorithm and layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import Branching, BranchSite, BranchTask
from quark.errors import PluginError
from quark.models.layers import Branch
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate

Quantized = Callable[..., nn.Module]
KIND = "branch"
WHO = "the algorithm 'breaking' of broken-quant 0.3"


class Shift(Branch):
    """Adds a vector."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shift


class Sound(Branching):
    """A correct branch, which adds zeros; subclasses break it."""

    def branch(self, site: BranchSite) -> Branch | None:
        return Shift(site.shape[0], site.dtype)

    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        return {"shift": torch.zeros(task.site.shape[0], dtype=task.site.dtype)}


class OtherShape(Sound):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        return {"shift": torch.zeros(3)}


class OtherDtype(Sound):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        return {"shift": torch.zeros(task.site.shape[0], dtype=torch.float64)}


class OtherNames(Sound):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        return {"offset": torch.zeros(task.site.shape[0])}


class NotANumber(Sound):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        return {"shift": torch.full((task.site.shape[0],), torch.nan, dtype=task.site.dtype)}


class RoundsAnother(Sound):
    def weight_to_round(self, task: BranchTask) -> Tensor:
        return task.weight[:2]


class Raises(Sound):
    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        raise RuntimeError("boom")


class NoBranch(Sound):
    def branch(self, site: BranchSite) -> Any:
        return nn.Linear(1, 1)


class WithValues(Sound):
    def branch(self, site: BranchSite) -> Branch | None:
        branch = Shift(site.shape[0], site.dtype)
        branch.shift = nn.Parameter(torch.zeros(site.shape[0], device="cpu"), requires_grad=False)
        return branch


class OutsideTheState(Sound):
    def branch(self, site: BranchSite) -> Branch | None:
        branch = Shift(site.shape[0], site.dtype)
        branch.register_buffer("hidden", torch.empty(3), persistent=False)
        return branch


MADE = {
    OtherShape: r"makes 'shift' for 'model.layers.0.self_attn.q_proj' as torch.float32\[3\], but has declared torch.float32\[256\]",
    OtherDtype: r"as torch.float64\[256\], but has declared torch.float32\[256\]: return tensors of the declared",
    OtherNames: "makes 'offset' for the branch of 'model.layers.0.self_attn.q_proj', but has declared 'shift'",
    NotANumber: "makes a 'shift' for 'model.layers.0.self_attn.q_proj' that holds NaN or Inf",
    RoundsAnother: r"makes 'weight' for 'model.layers.0.self_attn.q_proj' as torch.float32\[2, 256\]",
    Raises: "raised RuntimeError: boom",
}
DECLARED = {
    NoBranch: "instead of a branch: return a quark.models.layers.Branch",
    WithValues: "a branch whose tensor 'shift' is not on the meta device",
    OutsideTheState: "a branch whose tensor 'hidden' is not on the meta device, or not in its state_dict",
}


@pytest.mark.parametrize("broken", [*MADE, *DECLARED], ids=lambda kind: kind.__name__)
def test_what_is_wrong_is_said_with_plugin_and_layer(broken: type[Sound], quantized: Quantized) -> None:
    with pytest.raises(PluginError, match={**MADE, **DECLARED}[broken]) as caught:
        quantized(broken, runs=True)
    assert str(caught.value).startswith(WHO)


@pytest.mark.parametrize("broken", [*MADE, *DECLARED], ids=lambda kind: kind.__name__)
@pytest.mark.usefixtures("quantized")
def test_nothing_of_a_block_is_written_whose_branches_are_not_those_declared(broken: type[Sound], tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
    config.algo_config = [globals()["BreakingConfig"](mutant=broken, runs=True)]
    with pytest.raises(PluginError):
        quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "out", config)
    assert list(tmp_path.iterdir()) == []


def test_a_sound_one_is_none_of_them(quantized: Quantized) -> None:
    model: Any = quantized(Sound, runs=True)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.branch.shift, torch.zeros(256))


def test_settings_that_do_not_say_what_runs_are_refused_in_the_plan(quantized: Quantized) -> None:
    with pytest.raises(PluginError, match=r"has settings whose runs_with_model\(\) is False"):
        quantized(Sound)


def test_another_object_than_a_branching_is_refused_in_the_plan(quantized: Quantized) -> None:
    with pytest.raises(PluginError, match=r"which is not a branching: derive its class from quark\.algorithms\.Branching"):
        quantized(object, runs=True)
