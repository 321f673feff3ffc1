"""Transforms in the pipeline get the right inputs, and their changes reach all later steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import BlockContext, Metrics, OutputError, Rounding, RoundToNearest, Statistic, Transform, Validation, validated
from quark.calibration import block_transforms
from quark.calibration.batches import calls
from quark.calibration.report import CalibrationReport
from quark.config.model import QConfig
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark.plugins.attribution import origin
from quark.runs.quantize_block import quantize_blocks
from quark.runs.sink import InPlaceSink
from quark.torch import LLMTemplate

from ..hand_made_runs import hand_made_run
from .inputs import Inputs

IDS = [torch.arange(3, 19)[None], torch.arange(30, 40)[None], torch.arange(5, 17).reshape(2, 6)]
NORMED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class Scaling(Transform):
    """Divides the norm before attention by powers of two, and keeps the blocks and validations that it
    receives.

    Powers of two change no bit of the result.
    """

    def __init__(self, needs: Sequence[type[Statistic]] = (Inputs,), spoil: float = 0.0) -> None:
        self.needs = needs
        self.spoil = spoil
        self.shown: dict[str, BlockContext] = {}
        self.validations: list[Validation] = []

    def apply_global(self, model: nn.Module) -> None:
        self.outside_of = type(model).__name__

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        self.shown[block.name] = block
        before = block.output_error() if block.output_error else None
        norm = block.module.get_submodule("input_layernorm")
        s = 2.0 ** (torch.arange(norm.weight.shape[0]) % 3)  # type: ignore[union-attr]
        norm.weight = nn.Parameter(norm.weight.data / s, requires_grad=False)  # type: ignore[operator]
        for name in NORMED:
            layer = block.module.get_submodule(name)
            layer.weight = nn.Parameter(layer.weight.data * s + self.spoil, requires_grad=False)  # type: ignore[operator]
        if before is not None and block.output_error is not None:
            self.validations.append(validated([before], [block.output_error()]))
        return {block.name: {"scaled": True}}


def quantized(model: nn.Module, config: QConfig, transform: Any, data: Any = IDS, **options: Any) -> CalibrationReport:
    plan = make_plan(model, config, architecture_of(model))
    rounding = options.pop("rounding", RoundToNearest())
    return quantize_blocks(hand_made_run(model, plan, calls(data), rounding, transform, **options), InPlaceSink(model))


def config(scheme: str) -> QConfig:
    return LLMTemplate.get("llama").get_config(scheme=scheme)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS[0]).logits
    return found


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8"])
def test_a_transform_is_shown_what_the_quantized_blocks_before_give_to_the_block_in_float(scheme: str) -> None:
    model, transform = tiny.tiny_model(), Scaling()
    quantized(model, config(scheme), transform)
    assert list(transform.shown) == [f"model.layers.{i}" for i in range(len(model.model.layers))]
    shown = transform.shown["model.layers.0"]
    expected: list[Tensor] = []
    plain = tiny.tiny_model()
    plain.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, args: expected.append(args[0].flatten(0, 1)))
    for ids in IDS:
        with torch.no_grad():
            plain(ids)
    calibrated = [x[~call.held_out.flatten()] for x, call in zip(expected, calls(IDS), strict=True)]  # type: ignore[operator]
    seen = shown.statistics["self_attn.q_proj"][Inputs]
    assert isinstance(seen, Inputs)
    assert all(torch.equal(a, b) for a, b in zip(seen.seen, calibrated, strict=True)), "the end of each is held out"
    assert shown.statistics["self_attn.k_proj"] is shown.statistics["self_attn.q_proj"]


def test_weights_that_are_rounded_are_those_that_the_transform_has_left() -> None:
    model, by_hand = tiny.tiny_model(), tiny.tiny_model()
    quantized(model, config("int4_wo_32"), Scaling())
    facts = architecture_of(by_hand)
    assert facts is not None
    for i, block in enumerate(by_hand.model.layers):
        Scaling().apply(BlockContext(f"model.layers.{i}", block, facts, {}, {}))
    plan = make_plan(by_hand, config("int4_wo_32"), facts)
    quantize_blocks(hand_made_run(by_hand, plan), InPlaceSink(by_hand))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), by_hand.state_dict().values(), strict=True))


def test_without_statistics_no_forward_is_run() -> None:
    model, transform = tiny.tiny_model(), Scaling(needs=())
    count = [0]
    model.model.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    report = quantized(model, config("int4_wo_32"), transform, data=[IDS[0]])
    assert count == [0]
    assert transform.outside_of == "LlamaForCausalLM"
    assert report.transformed["model.layers.1"] == {"scaled": True}


@pytest.mark.parametrize("is_called_twice", [False, True])
def test_forwards_that_are_not_compared_end_where_all_inputs_have_been_seen(is_called_twice: bool) -> None:
    """The test counts products of the last layer.

    A layer that is called twice may be called again after the last layer.
    """
    model, transform, data = tiny.tiny_model(), Scaling(), tiny.calibration_batches(8, 16)
    block = model.model.layers[0]
    products = 0

    def count(*_: Any) -> None:
        nonlocal products
        products += not transform.shown

    block.mlp.down_proj.register_forward_hook(count)
    if is_called_twice:
        once = block.mlp.forward
        block.mlp.forward = lambda x: once(x) + 0 * block.mlp.gate_proj(x).sum()
    quantized(model, config("int4_wo_32"), transform, data)
    assert products == (8 if is_called_twice else 3)  # of the first and of the two that are held out
    assert [s.tokens for s in (transform.shown["model.layers.0"].statistics["mlp.down_proj"][Inputs],)] == [6 * 16]


class SampledInputs(Inputs):
    one_in = 4


@pytest.mark.parametrize("kind", ["tokens", "with a mask", "another last layer"])
def test_an_mlp_computes_the_tokens_alone_that_statistics_take(kind: str) -> None:
    """This is about forwards that end inside the MLP; statistics see the same tokens."""

    def seen(needs: type[Statistic]) -> tuple[list[Tensor], int]:
        model, transform, rows = tiny.tiny_model(), Scaling([needs]), [0]
        block = model.model.layers[0]
        block.mlp.gate_proj.register_forward_hook(
            lambda _, args, __: rows.__setitem__(0, rows[0] + args[0].shape[1] * (not transform.shown))
        )
        if kind == "another last layer":
            plain = block.forward
            block.forward = lambda x, *args, **kwargs: plain(x, *args, **kwargs) + 0 * block.self_attn.o_proj(x)
        batches: Any = tiny.calibration_batches(8, 16)
        data = batches
        if kind == "with a mask":
            data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches]
        quantized(model, config("int4_wo_32"), transform, data)
        statistic = transform.shown["model.layers.0"].statistics["mlp.down_proj"][needs]
        assert isinstance(statistic, Inputs)
        return statistic.seen, rows[0]

    sampled, few = seen(SampledInputs)
    whole, all_rows = seen(Inputs)
    assert all_rows == 8 * 16
    # The first forward shows which layers come last, and two are held out.
    assert few == (3 * 16 + 5 * 4 if kind in ("tokens", "with a mask") else all_rows)
    torch.testing.assert_close(torch.cat(sampled), torch.cat([x[::4] for x in whole]))


class Measuring(Scaling):
    """Keeps the output error and the output of each block on arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[OutputError] = []
        self.outputs: list[Tensor] = []

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        assert block.output_error is not None
        assert block.output is not None
        self.errors.append(block.output_error())
        self.outputs.append(block.output())
        return super().apply(block)


@pytest.mark.parametrize("kind", ["tokens", "static"])
def test_an_mlp_computes_the_tokens_alone_that_are_compared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in four of the held-out sequences is compared; a static input scale comes from all tokens."""

    def measured(compared: int) -> tuple[Measuring, list[int]]:
        monkeypatch.setattr(block_transforms, "COMPARED", compared)
        model, transform, rows = tiny.tiny_model(), Measuring(), list[int]()
        model.model.layers[0].mlp.register_forward_hook(lambda _, args, output: rows.append(output[..., 0].count_nonzero().item()))
        data: Any = tiny.calibration_batches(8, 16)
        quantized(model, config("int8" if kind == "static" else "int4_wo_32"), transform, data)
        return transform, rows

    few, rows = measured(8)
    every, all_rows = measured(1000)
    assert set(all_rows) == {16}
    step = 4 if kind == "tokens" else 1
    # Two sequences: in the first forward, for the error three times, and for the output.
    assert rows.count(16 // step) == (2 * 5 if step > 1 else len(rows))
    for name in ("squares", "sizes"):
        torch.testing.assert_close(getattr(few.errors[0], name), getattr(every.errors[0], name)[::step])
    torch.testing.assert_close(few.outputs[0], every.outputs[0][::step])


def test_harm_tells_what_a_transform_spoils() -> None:
    good, bad = Scaling(), Scaling(spoil=0.3)
    quantized(tiny.tiny_model(), config("mxfp6_e2m3"), good)
    quantized(tiny.tiny_model(), config("mxfp6_e2m3"), bad)
    assert len(good.validations) == len(bad.validations) == len(tiny.tiny_model().model.layers)
    assert all(v.after < 3 * v.before for v in good.validations)
    assert all(v.after > 10 * v.before and not v.is_improvement for v in bad.validations)


@pytest.mark.parametrize("two_passes", [False, True])
def test_a_calibrated_rounding_behind_it_sees_the_transformed_inputs(two_passes: bool) -> None:
    class Spy(Rounding):
        needs = (Inputs,)

        def __init__(self) -> None:
            self.seen: dict[str, Tensor] = {}

        def round(self, task: Any) -> Mapping[str, Metrics]:
            for name in task.layers:
                self.seen[name] = task.statistic(Inputs).seen[0]
            RoundToNearest().round(task)
            return {name: {} for name in task.layers}

    model, transform, spy = tiny.tiny_model(), Scaling(), Spy()
    quantized(model, config("int4_wo_32"), transform, rounding=spy, two_passes=two_passes)
    before = transform.shown["model.layers.0"].statistics["self_attn.q_proj"][Inputs]
    assert isinstance(before, Inputs)
    s = 2.0 ** (torch.arange(before.columns) % 3)
    calibrated = ~calls(IDS)[0].held_out.flatten()  # type: ignore[operator]
    assert torch.equal((spy.seen["model.layers.0.self_attn.q_proj"] * s)[calibrated], before.seen[0])
    assert torch.isfinite(logits(model)).all()


def test_a_transform_knows_sizes_of_the_model_and_what_changes_the_input_of_a_layer() -> None:
    class Doubling:
        transforms_input = True

        def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (2 * args[0],)

    class Asking(Scaling):
        def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
            names = ("mlp.up_proj", "mlp.down_proj")
            self.asked = {name: block.input_is_transformed(name) for name in names if "layers.1" in block.name} or self.asked
            self.heads = block.model_config.num_key_value_heads
            return {}

        asked: ClassVar[dict[str, bool]] = {}

    model, transform = tiny.tiny_model(), Asking(needs=())
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(Doubling())
    model.model.layers[1].mlp.up_proj.register_forward_pre_hook(lambda *_: None)
    quantized(model, config("int4_wo_32"), transform)
    assert transform.asked == {"mlp.up_proj": False, "mlp.down_proj": True}
    assert transform.heads == model.config.num_key_value_heads == 2


class Finishing(Scaling):
    """Scales, and records when it is called."""

    def __init__(self, name: str, called: list[str], needs: Sequence[type[Statistic]] = ()) -> None:
        super().__init__(needs)
        self.name, self.called = name, called

    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        self.called.append(f"{self.name} applied")
        return super().apply(block)

    def finish(self, block: BlockContext) -> Mapping[str, Metrics]:
        self.called.append(f"{self.name} finished")
        assert not block.statistics
        return {f"{block.name}.mlp.down_proj": {self.name: len(self.called)}}


def test_transforms_finish_a_block_when_all_have_been_applied_the_last_first() -> None:
    model, called = tiny.tiny_model(), list[str]()
    plan = make_plan(model, config("int4_wo_32"), architecture_of(model))
    one, two = Finishing("one", called), Finishing("two", called, (Inputs,))
    run = hand_made_run(model, plan, calls(IDS), RoundToNearest(), one, Scaling(), two)
    for transform in run.transforms[1:]:
        transform.whose = origin("algorithms", "smooth")
    report = quantize_blocks(run, InPlaceSink(model))
    blocks = len(model.model.layers)
    assert called == ["one applied", "two applied", "two finished", "one finished"] * blocks
    assert report.transformed["model.layers.0.mlp.down_proj"] == {"two": 3, "one": 4}
