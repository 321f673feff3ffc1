"""Judging: transforms of the whole model are tried on copies of blocks, and what is judged is what a run would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from quark.algorithms import BlockAtHand, Figures, Rounding, Statistic
from quark.model.family import architecture_of
from quark.model.plan import QuantPlan, make_plan
from quark.pipeline.batches import calls
from quark.pipeline.judging import Judgement, judged
from quark.pipeline.trial import error_by_token, relative_error
from quark.specs.architecture import Architecture
from quark.testing import tiny
from quark.torch import LLMTemplate

IDS = [torch.arange(3, 19)[None], torch.arange(30, 40)[None]]


class Turned:
    """Reverses the channels of the residual stream: nothing changes but their order, unless it spoils the block."""

    stage = "rotation"
    works_by_block = False
    needs: ClassVar[Sequence[type[Statistic]]] = ()

    def __init__(self, spoil: float = 0.0) -> None:
        self.spoil = spoil
        self.is_prepared = False
        self.seen: list[str] = []

    def prepare(self, model: nn.Module, architecture: Architecture) -> None:
        self.is_prepared = True

    def moved(self, x: Tensor) -> Tensor:
        return x.flip(-1)

    def verdict(self, before: float, after: float) -> bool:
        return after <= before

    def outside(self, model: nn.Module, architecture: Architecture) -> None:
        raise AssertionError("nothing outside the blocks is changed by a trial")

    def apply(self, block: BlockAtHand) -> Mapping[str, Figures]:
        self.seen.append(block.name)
        for name, parameter in block.module.named_parameters():
            reads = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight"))
            axis = -1 if reads else 0
            if "norm" in name or reads or name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data = parameter.data.flip(axis) + self.spoil
        return {}

    def rounding(self) -> Rounding | None:
        return None


def plan_of(model: nn.Module, scheme: str) -> QuantPlan:
    return make_plan(model, LLMTemplate.get("llama").get_config(scheme=scheme), architecture_of(model))


def judge(transform: Turned, scheme: str = "ptpc_fp8") -> tuple[nn.Module, Judgement]:
    model = tiny.tiny_model()
    return model, judged(model, plan_of(model, scheme), {"turned": transform}, calls(IDS))["turned"]


def test_a_change_of_order_has_the_error_that_there_was() -> None:
    transform = Turned()
    _, found = judge(transform)
    assert found.before == pytest.approx(found.after, rel=1e-3)
    assert 0 < found.before < 1e-2
    assert transform.is_prepared
    assert transform.seen == ["model.layers.0", "model.layers.1", "model.layers.2"][: len(transform.seen)]
    assert len(transform.seen) == len(tiny.tiny_model().model.layers)


def test_what_spoils_a_block_is_seen() -> None:
    _, found = judge(Turned(spoil=0.05))
    assert found.after > 10 * found.before
    assert not found.goes_on


def test_the_model_is_what_it_was() -> None:
    model, _ = judge(Turned(spoil=0.05), "fp8")
    expected = tiny.tiny_model()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), expected.state_dict().values(), strict=True))
    assert all("forward" not in m.__dict__ and not m._forward_hooks for m in model.modules())
    assert model.config.use_cache == expected.config.use_cache


def test_without_data_nothing_is_judged() -> None:
    model, transform = tiny.tiny_model(), Turned()
    assert judged(model, plan_of(model, "ptpc_fp8"), {"turned": transform}, []) == {}
    assert not transform.is_prepared


def test_by_token_one_of_enormous_size_does_not_hide_the_errors_of_others() -> None:
    wanted = torch.ones(1, 4, 8)
    wanted[0, 0] = 1000.0
    found = wanted.clone()
    found[0, 1:] += 0.5
    assert error_by_token(found, wanted, calls(IDS)[0]) == pytest.approx(0.75 * 0.25)
    assert relative_error(found, wanted, calls(IDS)[0]) == pytest.approx(0.75 / 1e6, rel=1e-4)


@pytest.mark.parametrize("measure", [error_by_token, relative_error])
def test_tokens_that_a_mask_leaves_out_do_not_count(measure: Callable[..., float]) -> None:
    mask = torch.tensor([[1, 1, 0, 0]])
    call = calls([{"input_ids": IDS[0][:, :4], "attention_mask": mask}])[0]
    wanted, found = torch.ones(1, 4, 8), torch.ones(1, 4, 8)
    found[0, 2:] = torch.nan
    assert measure(found, wanted, call) == 0.0
