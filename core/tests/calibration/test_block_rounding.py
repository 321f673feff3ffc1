"""Calibrated rounding in lock-step.

Each token takes one forward. A layer's statistics come from the inputs that it gets in the finished model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import CrossMoment, Hessian, Metrics, RoundingTask, RoundToNearest, Statistic
from quark.base.ranks import Ranks
from quark.calibration.batches import calls
from quark.calibration.report import CalibrationReport
from quark.config.architecture import Architecture
from quark.config.model import QConfig
from quark.errors import CalibrationError
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark.runs import ModelQuantizer
from quark.runs.quantize_block import quantize_blocks
from quark.runs.selected_algorithms import Algorithms
from quark.runs.sink import InPlaceSink
from quark.torch import LLMTemplate
from quark_devkit.small_models import batches, run_config, small_model, with_cache
from quark_devkit.threads import in_threads

from ..hand_made_runs import hand_made_run

IDS = [torch.arange(3, 19)[None], torch.arange(30, 40)[None], torch.arange(5, 17).reshape(2, 6)]


class Inputs(Statistic):
    """Keeps the tokens themselves."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.seen: list[Tensor] = []
        self.float_seen: list[Tensor] = []

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self.seen.append(x.clone())
        self.float_seen += [] if reference is None else [reference.clone()]

    def add(self, other: Inputs) -> None:
        self.seen += other.seen


class FloatInputs(Inputs):
    wants_float = True


class Spy(RoundToNearest):
    """Rounds to nearest, and keeps the tasks that it receives."""

    def __init__(self, kind: type[Statistic] = Inputs, only: str = "") -> None:
        self.needs = (kind,)
        self.kind = kind
        self.only = only
        self.tasks: list[RoundingTask] = []

    def applies_to(self, name: str) -> bool:
        return name.endswith(self.only)

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        self.tasks.append(task)
        super().round(task)
        return {name: {"seen": True} for name in task.layers}

    def inputs(self) -> dict[str, list[Tensor]]:
        return {name: p.statistic(Inputs).seen for p in self.tasks for name in p.layers}


def quantized(
    model: nn.Module, config: QConfig, rounding: Any, data: Any = IDS, architecture: Architecture | str | None = ""
) -> CalibrationReport:
    facts = architecture_of(model) if isinstance(architecture, str) else architecture
    return quantize_blocks(hand_made_run(model, make_plan(model, config, facts), calls(data), rounding), InPlaceSink(model))


def config(scheme: str = "int4_wo_32") -> QConfig:
    return LLMTemplate.get("llama").get_config(scheme=scheme)


def forwards(model: nn.Module) -> list[int]:
    """Counts, in the one element of the list, the tokens times blocks that forwards of ``model`` pass."""
    count = [0]
    for block in model.model.layers:  # type: ignore[union-attr]
        block.register_forward_hook(lambda m, a, o: count.__setitem__(0, count[0] + a[0].shape[0] * a[0].shape[1]))
    return count


def inputs_of(model: nn.Module, names: list[str], data: list[Tensor]) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def see(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, args: found[name].append(args[0].reshape(-1, args[0].shape[-1]))

    hooks = [model.get_submodule(name).register_forward_pre_hook(see(name)) for name in names]
    with torch.no_grad():
        for ids in data:
            model(ids)
    for hook in hooks:
        hook.remove()
    return found


def test_each_token_passes_each_block_once() -> None:
    model, spy = tiny.tiny_model(), Spy()
    count = forwards(model)
    quantized(model, config(), spy)
    assert count[0] == sum(ids.numel() for ids in IDS) * len(model.model.layers)


def test_with_a_float_stream_it_passes_twice() -> None:
    model, spy = tiny.tiny_model(), Spy(FloatInputs)
    count = forwards(model)
    quantized(model, config(), spy)
    assert count[0] == 2 * sum(ids.numel() for ids in IDS) * len(model.model.layers)


def test_layers_that_share_an_input_are_one_problem() -> None:
    model, spy = tiny.tiny_model(), Spy()
    quantized(model, config(), spy)
    first = [sorted(name.rsplit(".", 1)[1] for name in p.layers) for p in spy.tasks[:4]]
    assert first == [["k_proj", "q_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert len(spy.tasks) == 4 * len(model.model.layers)


def test_what_a_layer_is_rounded_for_is_what_the_finished_model_gives_it() -> None:
    model, spy = tiny.tiny_model(), Spy()
    quantized(model, config(), spy)
    shown = spy.inputs()
    for name, expected in inputs_of(model, list(shown), IDS).items():
        assert all(torch.equal(a, b) for a, b in zip(shown[name], expected, strict=True)), name


def test_the_float_stream_is_what_the_float_model_gives_it() -> None:
    model, spy = tiny.tiny_model(), Spy(FloatInputs)
    quantized(model, config(), spy)
    found = {name: p.statistic(FloatInputs).float_seen for p in spy.tasks for name in p.layers}
    for name, expected in inputs_of(tiny.tiny_model(), list(found), IDS).items():
        assert all(torch.equal(a, b) for a, b in zip(found[name], expected, strict=True)), name


def test_an_unknown_family_gets_the_same_weights_and_shows_by_its_first_block_which_layers_share_an_input() -> None:
    known, unknown, spy = tiny.tiny_model(), tiny.tiny_model(), Spy()
    facts = Architecture(model_type="llama", decoder_blocks="model.layers")
    quantized(known, config(), Spy())
    quantized(unknown, config(), spy, architecture=facts)
    assert all(torch.equal(a, b) for a, b in zip(known.state_dict().values(), unknown.state_dict().values(), strict=True))
    sizes = [len(p.layers) for p in spy.tasks]
    assert sizes[:7] == [1] * 7
    assert sizes[7:] == [3, 1, 2, 1] * (len(known.model.layers) - 1)


def test_layers_that_were_wrongly_said_to_share_an_input_are_rounded_for_their_own() -> None:
    model, spy = tiny.tiny_model(), Spy()
    facts = architecture_of(model)
    assert facts is not None
    wrong = attrs.evolve(facts, attention_inputs=(*facts.attention_inputs, "self_attn.o_proj"))
    quantized(model, config(), spy, architecture=wrong)
    shown = spy.inputs()  # of each layer, the last time it was rounded
    for name, expected in inputs_of(model, list(shown), IDS).items():
        assert all(torch.equal(a, b) for a, b in zip(shown[name], expected, strict=True)), name


def test_a_layer_that_is_rounded_anew_is_rounded_from_its_float_weight() -> None:
    class Started(Spy):
        """Keeps the weights that each rounding starts from."""

        def __init__(self) -> None:
            super().__init__()
            self.begun: list[tuple[str, Tensor]] = []

        def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
            self.begun += [(name, layer.weight.detach().clone()) for name, layer in task.layers.items()]
            return super().round(task)

    model, plain, spy = tiny.tiny_model(), tiny.tiny_model(), Started()
    facts = architecture_of(model)
    assert facts is not None
    wrong = attrs.evolve(facts, attention_inputs=(*facts.attention_inputs, "self_attn.o_proj"))
    quantized(model, config(), spy, architecture=wrong)
    names = [name for name, _ in spy.begun]
    assert names.count("model.layers.0.self_attn.o_proj") == 2
    assert all(torch.equal(weight, plain.get_submodule(name).weight) for name, weight in spy.begun)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_a_layer_that_is_rounded_anew_has_the_scales_of_the_tensor_that_it_reads(scheme: str) -> None:
    """This holds whether or not the architecture first says that the layer reads another tensor."""

    def input_scales(**options: Any) -> dict[str, Tensor]:
        model = tiny.tiny_model()
        quantized(model, config(scheme), Spy(), **options)
        return {name: tensor for name, tensor in model.state_dict().items() if "input_quantizer" in name and "scale" in name}

    facts = architecture_of(tiny.tiny_model())
    assert facts is not None
    expected = input_scales()
    found = input_scales(architecture=attrs.evolve(facts, attention_inputs=(*facts.attention_inputs, "self_attn.o_proj")))
    assert any("o_proj" in name for name in expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], scale) for name, scale in expected.items())


def test_tokens_that_a_mask_leaves_out_do_not_count() -> None:
    spy = Spy()
    ids = torch.arange(3, 15).reshape(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    quantized(tiny.tiny_model(), config(), spy, [{"input_ids": ids, "attention_mask": mask}])
    assert {tuple(len(x) for x in seen) for seen in spy.inputs().values()} == {(6, 4)}


def test_dynamic_activations_are_quantized_before_statistics_are_taken() -> None:
    model, spy = tiny.tiny_model(), Spy()
    quantized(model, config("mxfp4"), spy)
    task = spy.tasks[0]
    layer = next(iter(task.layers.values()))
    assert layer.input_quantizer is not None
    for x in task.statistic(Inputs).seen:
        assert torch.equal(layer.input_quantizer(x), x)


def test_static_activations_have_their_scale_before_statistics_are_taken() -> None:
    model, spy = tiny.tiny_model(), Spy()
    quantized(model, config("fp8"), spy)
    for task in spy.tasks:
        layer = next(iter(task.layers.values()))
        assert layer.input_quantizer is not None
        assert all(torch.equal(layer.input_quantizer(x), x) for x in task.statistic(Inputs).seen)


def test_layers_that_the_rounding_does_not_take_are_rounded_to_nearest() -> None:
    model, plain, spy = tiny.tiny_model(), tiny.tiny_model(), Spy(only="down_proj")
    report = quantized(model, config(), spy)
    ModelQuantizer(config()).quantize_model(plain)
    assert {name.rsplit(".", 1)[1] for name in report.layers} == {"down_proj"}
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_findings_tell_the_tokens_of_each_layer() -> None:
    report = quantized(tiny.tiny_model(), config(), Spy())
    assert {f["tokens"] for f in report.layers.values()} == {sum(ids.numel() for ids in IDS)}
    assert list(report.lines()) == []


@contextmanager
def failing(spy: Spy, at: int) -> Iterator[None]:
    plain = spy.round

    def fail(task: RoundingTask) -> Mapping[str, Metrics]:
        if len(spy.tasks) == at:
            raise RuntimeError("the solver broke")
        return plain(task)

    spy.round = fail  # type: ignore[method-assign]
    yield


def test_a_failure_leaves_the_layers_their_own_forwards() -> None:
    model, spy = tiny.tiny_model(), Spy()
    with failing(spy, 5), pytest.raises(RuntimeError, match="the solver broke"):
        quantized(model, config(), spy)
    assert not any("forward" in m.__dict__ for m in model.modules())
    with torch.no_grad():
        assert torch.isfinite(model(IDS[0]).logits).all()


def test_without_data_the_error_names_the_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.runs.run.algorithms_of", lambda _: Algorithms(rounding=Spy()))
    with pytest.raises(CalibrationError, match="needed by the algorithm 'Spy'"):
        ModelQuantizer(config()).quantize_model(tiny.tiny_model())


def moments(x: Tensor, reference: Tensor) -> tuple[Hessian, CrossMoment]:
    second, cross = Hessian(x.shape[1], x.device), CrossMoment(x.shape[1], x.device)
    second.update(x)
    cross.update(x, reference)
    return second, cross


@pytest.mark.parametrize("columns", [48, 300, 1000])
def test_moments_are_the_sums_of_their_definition_and_merge(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, f = torch.randn(2, 64, columns, generator=generator)
    (second, cross), (more_second, more_cross) = moments(x[:40], f[:40]), moments(x[40:], f[40:])
    assert torch.equal(second.matrix(), second.matrix().t())
    second.merge(more_second)
    cross.merge(more_cross)
    torch.testing.assert_close(second.matrix().double(), x.double().t() @ x.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cross.matrix().double(), (f - x).double().t() @ x.double(), rtol=1e-4, atol=1e-4)
    assert second.tokens == cross.tokens == 64


def two_passes(model: nn.Module, spy: Spy, data: Any = IDS, scheme: str = "int4_wo_32") -> None:
    plan = make_plan(model, config(scheme), architecture_of(model))
    quantize_blocks(hand_made_run(model, plan, calls(data), spy, two_passes=True), InPlaceSink(model))


def test_two_passes_show_what_the_rounded_blocks_before_give_to_the_block_in_float() -> None:
    model, spy = tiny.tiny_model(), Spy()
    two_passes(model, spy)
    shown = spy.inputs()
    mixed = tiny.tiny_model()
    last = len(mixed.model.layers) - 1
    for i in range(last):
        mixed.model.layers[i] = model.model.layers[i]
    names = [name for name in shown if f".{last}." in name]
    assert len(names) == 7
    for name, expected in inputs_of(mixed, names, IDS).items():
        assert all(torch.equal(a, b) for a, b in zip(shown[name], expected, strict=True)), name


def test_two_passes_pass_each_block_twice_and_find_shared_inputs() -> None:
    model, spy = tiny.tiny_model(), Spy()
    count = [0]
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, o: count.__setitem__(0, count[0] + a[0].shape[0] * a[0].shape[1]))
    two_passes(model, spy)
    assert count[0] == 2 * sum(ids.numel() for ids in IDS)
    assert [len(p.layers) for p in spy.tasks] == [3, 1, 2, 1] * len(model.model.layers)


def test_two_passes_compare_with_the_float_model() -> None:
    model, spy = tiny.tiny_model(), Spy(FloatInputs)
    two_passes(model, spy)
    found = {name: p.statistic(FloatInputs).float_seen for p in spy.tasks for name in p.layers}
    for name, expected in inputs_of(tiny.tiny_model(), list(found), IDS).items():
        assert all(torch.equal(a, b) for a, b in zip(found[name], expected, strict=True)), name


@pytest.mark.parametrize("scheme", ["mxfp4", "fp8", "nvfp4"])
def test_two_passes_settle_the_scales_of_activations(scheme: str) -> None:
    model = tiny.tiny_model()
    two_passes(model, Spy(), scheme=scheme)
    with torch.no_grad():
        assert torch.isfinite(model(IDS[0]).logits).all()


def test_too_little_memory_for_activations_means_two_passes_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.runs.run.algorithms_of", lambda _: Algorithms(rounding=Spy()))
    for memory, expected in ((0, 1), (1 << 40, 0), (None, 0)):
        model = ModelQuantizer(attrs.evolve(config(), activation_memory=memory)).quantize_model(tiny.tiny_model(), IDS)
        assert sum("runs twice" in note for note in model.quark_plan.notes) == expected


def test_a_rank_that_no_token_reaches_sets_the_scales_inside_attention_that_the_others_set() -> None:
    class Calibrated(RoundToNearest):
        needs = (Hessian,)

    def scales(ranks: Ranks) -> dict[str, Tensor]:
        model = small_model()
        started = hand_made_run(model, make_plan(model, with_cache(run_config("int4_wo_32")), architecture_of(model)), data, Calibrated())
        quantize_blocks(attrs.evolve(started, run=attrs.evolve(started.run, ranks=ranks)), InPlaceSink(model))
        return {name: tensor for name, tensor in model.state_dict().items() if name.endswith("scale")}

    data = calls(batches(1))
    (alone,), found = in_threads(scales, 1), in_threads(scales, 2)
    assert any("key_quantizer" in name for name in alone)
    for one in found:
        assert one.keys() == alone.keys()
        assert all(torch.equal(one[name], tensor) for name, tensor in alone.items())
