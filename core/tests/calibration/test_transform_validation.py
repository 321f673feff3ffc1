"""Validation: transforms of the whole model are tried on copies of blocks, and what is validated is what a run would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from quark.algorithms import BlockContext, Metrics, Rounding, Statistic, ValidatedRun, Validation
from quark.calibration.batches import calls
from quark.calibration.transform_validation import TransformValidation, validate_transforms
from quark.planning.family import architecture_of
from quark.planning.plan import QuantPlan, make_plan
from quark.testing import tiny
from quark.torch import LLMTemplate

IDS = [torch.arange(3, 19)[None], torch.arange(30, 40)[None]]
MANY = [torch.arange(16 * i, 16 * i + 16)[None] for i in range(12)]


class Turned:
    """Reverses the channels of the residual stream: nothing changes but their order, unless it spoils the block."""

    works_by_block = False
    needs: ClassVar[Sequence[type[Statistic]]] = ()

    def __init__(self, spoil: float = 0.0) -> None:
        self.spoil = spoil
        self.is_started = False
        self.seen: list[str] = []

    def start(self, model: nn.Module, plan: QuantPlan) -> ValidatedRun:
        self.is_started = True
        return self

    def transformed_stream(self, x: Tensor) -> Tensor:
        return x.flip(-1)

    def accepts(self, validation: Validation | None) -> bool:
        return validation is not None and validation.is_improvement

    def apply_global(self, model: nn.Module) -> None:
        raise AssertionError("nothing outside the blocks is changed by a trial")

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
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


def compare(transform: Turned, scheme: str = "ptpc_fp8", data: Sequence[Tensor] = IDS) -> tuple[nn.Module, Validation, TransformValidation]:
    model = tiny.tiny_model()
    result = validate_transforms(model, plan_of(model, scheme), {"turned": transform}, calls(data))["turned"]
    assert result.validation is not None
    return model, result.validation, result


def test_a_change_of_order_has_the_error_that_there_was() -> None:
    transform = Turned()
    _, found, _ = compare(transform)
    assert found.before == pytest.approx(found.after, rel=1e-3)
    assert 0 < found.before < 1e-2
    assert found.tokens == 2 + 1, "of sixteen and of ten"
    assert transform.is_started
    assert transform.seen == ["model.layers.0", "model.layers.1", "model.layers.2"][: len(transform.seen)]
    assert len(transform.seen) == len(tiny.tiny_model().model.layers)


def test_what_spoils_a_block_is_seen() -> None:
    _, found, result = compare(Turned(spoil=0.05))
    assert found.after > 10 * found.before
    assert not result.is_accepted


def test_the_model_is_what_it_was() -> None:
    model, *_ = compare(Turned(spoil=0.05), "fp8")
    expected = tiny.tiny_model()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), expected.state_dict().values(), strict=True))
    assert all("forward" not in m.__dict__ and not m._forward_hooks for m in model.modules())
    assert model.config.use_cache == expected.config.use_cache


def test_without_data_nothing_is_compared() -> None:
    model, transform = tiny.tiny_model(), Turned()
    validations = validate_transforms(model, plan_of(model, "ptpc_fp8"), {"turned": transform}, [])
    assert validations == {"turned": TransformValidation(None, is_accepted=False)}, "the transform decides, without a validation"
    assert validations["turned"].metrics() == {}
    assert not transform.is_started


def test_the_validation_does_not_depend_on_the_order_of_samples_nor_on_batches() -> None:
    """One row of twelve sequences, another order, and one batch: sums in another order differ by rounding."""
    _, found, _ = compare(Turned(), data=MANY)
    for data in (MANY[::-1], [torch.cat(MANY)], list(torch.cat(MANY[5:] + MANY[:5]).split(4))):
        _, other, _ = compare(Turned(), data=data)
        assert other.before == pytest.approx(found.before, rel=1e-4)
        assert other.standard_error == pytest.approx(found.standard_error, rel=1e-2)
        assert other.tokens == found.tokens == 32


def test_only_calls_with_held_out_tokens_are_run() -> None:
    model, count = tiny.tiny_model(), [0]
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    validate_transforms(model, plan_of(model, "ptpc_fp8"), {"turned": Turned()}, calls(MANY))
    float_, rounded, changed = 2, 2, 2
    assert count == [float_ + rounded + changed]


def test_where_nothing_can_be_held_out_all_tokens_tell_and_that_is_said() -> None:
    _, found, result = compare(Turned(), data=[torch.tensor([[5, 6]])])
    assert found.tokens == 2
    assert result.metrics()["held_out"] is False
