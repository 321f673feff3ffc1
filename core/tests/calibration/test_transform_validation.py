"""Validation.

Transforms of the whole model are tried on copies of blocks. Validation applies the same steps as a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import AbsMax, BlockContext, Metrics, Transform, TransformRun, Validation
from quark.base.log import get_logger
from quark.calibration.batches import calls
from quark.calibration.transform_validation import TransformValidation, validate_transforms
from quark.config.algorithm import AlgoConfig
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import QuantPlan, make_plan
from quark.torch import LLMTemplate

IDS = [torch.arange(3, 19)[None], torch.arange(30, 40)[None]]
MANY = [torch.arange(16 * i, 16 * i + 16)[None] for i in range(12)]


class Turned(Transform):
    """Reverses the channels of the residual stream.

    This changes only their order, unless the transform also spoils the block.
    """

    is_validated = True
    works_by_block = False

    def __init__(self, spoil: float = 0.0) -> None:
        self.spoil = spoil
        self.is_started = False
        self.seen: list[str] = []

    def start(self, model: nn.Module, plan: QuantPlan) -> TransformRun:
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
    """One row of twelve sequences, another order, and one batch.

    Summation in another order can move an input that is rounded to FP8 to the other side of a tie. There its
    error is as large, with the other sign. If this happens to a share s = 1/64 of the inputs, the mean square
    over n = 512 independent errors changes by 2 √s √(2 / n), relative to itself.
    """
    _, found, _ = compare(Turned(), data=MANY)
    for data in (MANY[::-1], [torch.cat(MANY)], list(torch.cat(MANY[5:] + MANY[:5]).split(4))):
        _, other, _ = compare(Turned(), data=data)
        assert other.before == pytest.approx(found.before, rel=2e-2)
        assert max(other.standard_error, found.standard_error) < found.before / 100  # of a difference in ties alone
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


@attrs.define(kw_only=True)
class Named(AlgoConfig):
    name: str = "turned"


class InParts(Turned):
    """A transform in parts: the part named ``good`` changes no error, and the others spoil blocks."""

    def __init__(self, parts: Mapping[str, float] | None = None, spoil: float = 0.0) -> None:
        super().__init__(spoil)
        self.parts = parts or {}
        self.settings = Named(name=f"spoils by {spoil}")

    def alternatives(self) -> Mapping[str, InParts]:
        return {name: InParts(spoil=spoil) for name, spoil in self.parts.items()}


class Follower(Transform):
    """Spoils blocks whose channels are in the original order, and keeps each block's number of tokens."""

    needs = (AbsMax,)

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def start(self, model: nn.Module, plan: QuantPlan) -> TransformRun:
        self.first = [block.input_layernorm.weight.data.clone() for block in model.model.layers]  # type: ignore[union-attr]
        return self

    def apply_global(self, model: nn.Module) -> None:
        raise AssertionError("nothing outside the blocks is changed by a trial")

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        get_logger().warning("heard in the run itself")
        statistic = block.statistic("self_attn.q_proj", AbsMax)
        assert statistic is not None
        assert block.output_error is not None
        self.tokens.append(statistic.tokens)
        norm = block.module.get_submodule("input_layernorm")
        if torch.equal(norm.weight.data, self.first[int(block.name.rpartition(".")[2])]):  # type: ignore[arg-type]
            block.module.get_submodule("mlp.down_proj").weight.data.mul_(1.5)  # type: ignore[operator,union-attr]
        return {}


def test_what_follows_in_the_run_is_seen_with_and_without_the_transform(caplog: pytest.LogCaptureFixture) -> None:
    model, follower = tiny.tiny_model(), Follower()
    for i, block in enumerate(model.model.layers):  # so that reversed channels can be told
        block.input_layernorm.weight.data = torch.linspace(0.5, 1.5, block.input_layernorm.weight.numel()) + i
    alone = validate_transforms(model, plan_of(model, "ptpc_fp8"), {"turned": Turned()}, calls(MANY))["turned"].validation
    behind = validate_transforms(model, plan_of(model, "ptpc_fp8"), {"turned": Turned(), "f": follower}, calls(MANY))["turned"]
    assert alone is not None
    assert behind.validation is not None
    assert behind.validation.before > 10 * alone.before
    assert behind.validation.after == pytest.approx(alone.after, rel=1e-3)
    assert behind.is_accepted
    assert set(follower.tokens) == {32}, "those that are held out: both candidates see the same"
    assert not caplog.records


class Measures(Follower):
    """Asks for the error of a block, and changes the block before or afterwards."""

    def __init__(self, *, at_the_end: bool) -> None:
        super().__init__()
        self.at_the_end = at_the_end

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        assert block.output_error is not None
        weight = block.module.get_submodule("mlp.down_proj").weight
        if self.at_the_end:
            weight.data.mul_(1.5)  # type: ignore[operator,union-attr]
        block.output_error()
        if not self.at_the_end:
            weight.data.mul_(1.5)  # type: ignore[operator,union-attr]
        return {}


def test_what_a_transform_behind_has_measured_is_not_measured_again() -> None:
    """This is about a block with the same values: the two runs compare the same blocks."""
    counts, validations = [], []
    for at_the_end in (True, False):
        model, count = tiny.tiny_model(), [0]
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        transforms = {"turned": Turned(), "measures": Measures(at_the_end=at_the_end)}
        found = validate_transforms(model, plan_of(model, "ptpc_fp8"), transforms, calls(MANY))["turned"].validation
        assert found is not None
        counts.append(count[0])
        validations.append((found.before, found.after))
    calls_held_out, candidates = 2, 2
    assert counts[1] - counts[0] == calls_held_out * candidates
    assert validations[0] == pytest.approx(validations[1], rel=1e-4)


def test_of_several_parts_the_one_with_the_smallest_error_is_used() -> None:
    model, follower = tiny.tiny_model(), Follower()
    for i, block in enumerate(model.model.layers):
        block.input_layernorm.weight.data = torch.linspace(0.5, 1.5, block.input_layernorm.weight.numel()) + i
    plan, data = plan_of(model, "ptpc_fp8"), calls(MANY)

    def choice(transform: InParts) -> TransformValidation:
        return validate_transforms(model, plan, {"turned": transform, "f": follower}, data)["turned"]

    found = choice(InParts({"bad": 0.2, "good": 0.0, "as good": 0.0}, spoil=0.1))
    assert (found.chosen, found.is_accepted) == ("good", True), "of two without a difference the first"
    assert found.settings == Named(name="spoils by 0.0")
    assert found.metrics()["chosen"] == "good"
    assert list(found.errors) == ["bad", "good", "as good", "all"]
    assert found.errors["good"] < found.errors["all"] < found.errors["bad"]
    whole = choice(InParts({"bad": 0.2}))
    assert (whole.chosen, whole.settings, whole.is_accepted) == (None, None, True)
    none = choice(InParts({"bad": 9.0}, spoil=9.0))
    assert (none.chosen, none.is_accepted) == (None, False)
    assert none.metrics()["chosen"] == "nothing"


def test_behind_a_rounding_that_compensates_only_activations_count() -> None:
    """A scheme for weights alone counts all errors; one with quantized inputs leaves out weight errors."""
    errors = {}
    for scheme in ("int4_wo_32", "mxfp4"):
        for compensated in (False, True):
            model = tiny.tiny_model()
            found = validate_transforms(model, plan_of(model, scheme), {"t": Turned()}, calls(MANY), compensated=compensated)["t"]
            assert found.validation is not None
            errors[scheme, compensated] = found.validation.before
    assert errors["int4_wo_32", True] == errors["int4_wo_32", False]
    assert errors["mxfp4", True] < 0.8 * errors["mxfp4", False]
