"""A tuning sees the inputs, targets and outputs of a block; a change that raises the error is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import quark_tiny_model as tiny
from quark.algorithms import Metrics, OutputError, RoundedBlock, Tuning
from quark.algorithms.validation import channel_factors
from quark.base.ranks import Ranks
from quark.calibration.batches import calls
from quark.errors import PluginError, UnsupportedError
from quark.runs.quantize_block import quantize_blocks
from quark.runs.run import plan_run
from quark.runs.sink import InPlaceSink
from quark.torch import LLMTemplate

from ..hand_made_runs import hand_made_run

Quantized = Callable[..., nn.Module]
KIND = "block_tuning"
IDS = [torch.arange(3, 35)[None], torch.arange(40, 72)[None]]
FIRST = "model.layers.0"


class Sees(Tuning):
    """Keeps the blocks that it receives, and their outputs."""

    def __init__(self) -> None:
        self.blocks: list[RoundedBlock] = []
        self.outputs: list[torch.Tensor] = []

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        self.blocks.append(block)
        self.outputs.append(torch.cat([block.output(sample, None) for sample in block.samples]))
        return {"": {"seen": len(block.samples)}}


def run(tuning: Tuning, *, two_passes: bool = False, scheme: str = "int4_wo_32") -> tuple[Any, Any]:
    """Return the tiny model, rounded to nearest and tuned, and its report."""
    model: Any = tiny.tiny_model()
    plan = plan_run(model, LLMTemplate.get("llama").get_config(scheme=scheme)).plan
    started = hand_made_run(model, plan, calls(IDS, model=model), tunings={"test": tuning}, two_passes=two_passes)
    return model, quantize_blocks(started, InPlaceSink(model))


def hidden_states(model: Any, block: int) -> torch.Tensor:
    """Return the outputs of a block, ``[tokens, channels]``."""
    seen: list[torch.Tensor] = []
    handle = model.model.layers[block].register_forward_hook(lambda *a: seen.append((a[2] if torch.is_tensor(a[2]) else a[2][0])[0]))
    with torch.no_grad():
        for ids in IDS:
            model(ids)
    handle.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("two_passes", [False, True])
def test_targets_are_those_of_the_float_model_and_outputs_those_of_the_rounded_one(two_passes: bool) -> None:
    tuning = Sees()
    tuning.wants_float = True
    model, report = run(tuning, two_passes=two_passes)
    plain = tiny.tiny_model()
    assert [block.name for block in tuning.blocks] == [f"model.layers.{i}" for i in range(len(model.model.layers))]
    for number, block in enumerate(tuning.blocks):
        target = torch.cat([sample.target for sample in block.samples])
        torch.testing.assert_close(target, hidden_states(plain, number))
        torch.testing.assert_close(tuning.outputs[number], hidden_states(model, number))
    assert report.tuned[FIRST]["test"]["seen"] == 2
    assert report.tuned[FIRST]["test"]["applied"] is False  # nothing was changed
    assert [int(s.is_held_out.sum()) for s in tuning.blocks[0].samples] == [2, 2]


def test_targets_may_be_those_of_the_float_block_behind_rounded_ones() -> None:
    tuning = Sees()
    run(tuning)
    plain: Any = tiny.tiny_model()
    first, second = (torch.cat([s.target for s in block.samples]) for block in tuning.blocks[:2])
    torch.testing.assert_close(first, hidden_states(plain, 0))
    assert float((second - hidden_states(plain, 1)).abs().max()) > 1e-3  # of another input


@pytest.mark.parametrize("scheme", ["int4_wo_32", "int8"])
def test_gradients_reach_every_weight_through_quantized_activations(scheme: str) -> None:
    norms: dict[str, float] = {}

    class Differentiates(Sees):
        def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
            tensors = {f"{name}.weight": layer.weight.detach().bfloat16().requires_grad_() for name, layer in block.layers.items()}
            tensors |= {name: parameter.detach().clone().requires_grad_() for name, parameter in block.parameters.items()}
            with torch.enable_grad(), block.substituted(tensors):
                output = block.output(block.samples[0], torch.bfloat16)
                (output.float() - block.samples[0].target).square().sum().backward()
            norms.update({f"{block.name}.{name}": float(tensor.grad.norm()) for name, tensor in tensors.items() if tensor.grad is not None})
            return {}

    model, _ = run(Differentiates(), scheme=scheme)
    expected = [name for name, p in model.model.layers.named_parameters() if p.ndim < 3]
    assert sorted(norms) == sorted(f"model.layers.{name}" for name in expected)
    assert all(norm > 0 for norm in norms.values())
    assert not torch.is_grad_enabled() or all(not p.requires_grad or p.grad is None for p in model.parameters())


class Scales(Sees):
    """Multiplies the norms by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        for parameter in block.parameters.values():
            parameter.mul_(self.factor)
        return {}


class Compares(Sees):
    """Returns the error on held-out tokens for given factors of the targets' channels."""

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        channels = channel_factors(sample.target for sample in block.samples)
        errors = [OutputError.of(block.output(sample, None), sample.target, channels=channels) for sample in block.samples]
        held_out = torch.cat([error.relative[sample.is_held_out] for error, sample in zip(errors, block.samples, strict=True)])
        return {"": {"error": float(held_out.mean())}}


def test_outputs_are_compared_by_the_factors_of_their_channels() -> None:
    _, report = run(Compares())
    metrics = [metrics["test"] for metrics in report.tuned.values()]
    assert [values["error_before"] for values in metrics] == pytest.approx([values["error"] for values in metrics])


def test_what_makes_the_output_worse_is_taken_back() -> None:
    model, report = run(Scales(1.5))
    plain = tiny.tiny_model()
    assert all(metrics["test"]["applied"] is False for metrics in report.tuned.values())
    norms = {name: p for name, p in model.named_parameters() if p.ndim == 1}
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in norms.items())


class Fits(Sees):
    """Fits the first norm to the held-out tokens, at which a tuning must not look."""

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        name, norm = next(iter(block.parameters.items()))
        for step in (0.02, 0.01, 0.01, 0.005, 0.005):
            leaf = norm.detach().clone().requires_grad_()
            with torch.enable_grad(), block.substituted({name: leaf}):
                found = [(OutputError.of(block.output(s, None), s.target, channels=block.channels), s.is_held_out) for s in block.samples]
                torch.stack([(error.squares / error.sizes)[held_out].sum() for error, held_out in found]).sum().backward()
            assert leaf.grad is not None
            norm.sub_(leaf.grad.sign(), alpha=step)
        return {"": {"norm": norm.tolist()}}


def test_what_makes_the_output_better_is_kept_and_reported() -> None:
    model, report = run(Fits())
    plain = tiny.tiny_model()
    applied = {name: metrics["test"] for name, metrics in report.tuned.items() if metrics["test"]["applied"]}
    assert applied
    for name, metrics in applied.items():
        norms = [next(p for n, p in m.get_submodule(name).named_parameters() if p.ndim == 1) for m in (model, plain)]
        assert norms[0].tolist() == metrics["norm"] != norms[1].tolist()
        assert metrics["error_after"] < metrics["error_before"]
    assert type(report).from_dict(report.to_dict()).tuned == report.tuned


class BreaksNorms(Scales):
    def __init__(self) -> None:
        super().__init__(float("nan"))


class BreaksWeights(Sees):
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        for layer in block.layers.values():
            layer.weight = nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)
        return {}


@pytest.mark.parametrize(
    ("mutant", "message"),
    [(BreaksNorms, r"now holds NaN or Inf"), (BreaksWeights, r"'self_attn.q_proj' now holds values that no code represents")],
)
def test_a_broken_tuning_ends_the_run_with_its_name(quantized: Quantized, mutant: Any, message: str) -> None:
    with pytest.raises(PluginError, match=rf"'breaking' of .*broken-quant 0\.3.* has tuned '{FIRST}', in which .*{message}"):
        quantized(mutant)


def test_several_processes_are_refused_before_any_work() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", algorithm=["tuning"])
    model = tiny.tiny_model()
    planned = plan_run(model, config)
    with pytest.raises(UnsupportedError, match="'tuning' tunes each block on all calibration samples, but 2 processes divide the samples"):
        planned.with_data(model, IDS, torch.device("cpu"), Ranks(size=2))


class ShowsAndFits(Fits):
    """Keeps the blocks on arrival, and then changes them."""

    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        Sees.tune(self, block)
        return super().tune(block)


def test_the_next_block_sees_the_outputs_of_the_tuned_one() -> None:
    tuning = ShowsAndFits()
    model, report = run(tuning)
    last = len(tuning.blocks) - 1
    assert any(report.tuned[block.name]["test"]["applied"] for block in tuning.blocks[:last])
    plain: Any = tiny.tiny_model()
    for number, block in enumerate(tuning.blocks):
        tuned = model.model.layers[number]
        model.model.layers[number] = plain.model.layers[number]
        expected = hidden_states(model, number)  # of the float block, behind those that are tuned
        model.model.layers[number] = tuned
        torch.testing.assert_close(torch.cat([sample.target for sample in block.samples]), expected)


def test_each_of_two_tunings_sees_what_the_one_before_it_has_left() -> None:
    first, second = Fits(), Sees()
    model: Any = tiny.tiny_model()
    plan = plan_run(model, LLMTemplate.get("llama").get_config(scheme="int4_wo_32")).plan
    tunings = {"first": first, "second": second}
    report = quantize_blocks(hand_made_run(model, plan, calls(IDS, model=model), tunings=tunings), InPlaceSink(model))
    assert any(metrics["first"]["applied"] for metrics in report.tuned.values())
    for number, output in enumerate(second.outputs):
        torch.testing.assert_close(output, hidden_states(model, number))


def test_an_output_leaves_the_mode_of_gradients_as_it_found_it() -> None:
    seen: list[tuple[bool, bool, bool]] = []

    class Looks(Sees):
        def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
            for wanted in (True, False):
                with torch.set_grad_enabled(wanted):
                    output = block.output(block.samples[0], None)
                    seen.append((wanted, torch.is_grad_enabled(), output.requires_grad))
            return {}

    run(Looks())
    assert {(wanted, after) for wanted, after, _ in seen} == {(True, True), (False, False)}
    assert not any(has_gradient for wanted, _, has_gradient in seen if not wanted)
