"""Measured divergence is that of the quantized model; predicted losses are near it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from quark.algorithms import RoundingTask, RoundToNearest
from quark.calibration.batches import calls
from quark.torch import ModelQuantizer
from quark_tiny_model import tiny_model
from quark_workbench.evaluate import compare
from quark_workbench.mixed_precision import FLOAT
from quark_workbench.mixed_precision.by_sensitivity.fisher import divergences
from quark_workbench.mixed_precision.by_sensitivity.measure import limited, measured_kl
from quark_workbench.mixed_precision.by_sensitivity.selector import SENSITIVITIES, losses_of, output_errors

from .problems import problem_of


def test_it_is_the_divergence_of_the_quantized_model() -> None:
    # Dynamic inputs: scales of static ones come from all batches, those here from each.
    problem = problem_of("mxfp4", "ptpc_fp8", "bf16")
    names = list(problem.sizes)
    choices = {name: ("mxfp4", "ptpc_fp8", FLOAT)[i % 3] for i, name in enumerate(names)}
    from quark_tiny_model import tiny_template
    from quark_workbench.mixed_precision.select import configuration

    base = tiny_template().get_config(scheme="mxfp4")
    model = tiny_model()
    rows = ModelQuantizer(base).plan(model).rows
    chosen = {layer: problem.candidates[choices[group.name]] for group in problem.groups for layer in group.layers}
    ModelQuantizer(configuration(base, rows, chosen)).quantize_model(model)
    # `compare` reads all but the last token of each row, `measured_kl` all tokens.
    rows_of_tokens = [torch.cat([call.args[0], call.args[0][:, :1]], dim=1) for call in problem.data]
    wanted = compare(model, tiny_model(), rows_of_tokens).mean_kl
    (found,) = measured_kl(problem, [choices], 10**6)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_several_choices_together_are_what_each_is_alone() -> None:
    problem = problem_of("mxfp4", "fp8")
    one, other = (dict.fromkeys(problem.sizes, scheme) for scheme in ("mxfp4", "fp8"))
    assert measured_kl(problem, [one, other, {}], 128) == [*measured_kl(problem, [one], 128), *measured_kl(problem, [other], 128), 0.0]


@pytest.mark.parametrize("sensitivity", SENSITIVITIES)
def test_padding_is_not_counted(sensitivity: str) -> None:
    problem = problem_of("mxfp4", "fp8", sequences=2)
    rows = [call.args[0][:, :length] for call, length in zip(problem.data, (40, 25), strict=True)]
    width = max(row.shape[1] for row in rows)
    padded = {
        "input_ids": torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0), value=7) for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - row.shape[1]) + [1] * row.shape[1] for row in rows]),
    }
    found, expected = (losses_of(attrs.evolve(problem, data=calls(data)), sensitivity, 10**6) for data in ([padded], rows))
    assert found == expected


def test_predicted_divergence_of_one_group_is_near_the_measured_one() -> None:
    problem = problem_of("mxfp4", "fp8")
    predicted, measured = (losses_of(problem, sensitivity, 256) for sensitivity in ("fisher", "kl"))
    pairs = [(predicted[group][name], measured[group][name]) for group in predicted for name in predicted[group]]
    total = [sum(values) for values in zip(*pairs, strict=True)]
    # One drawn token for each of 256: the sum over 24 choices is known to some ten percent, and the curvature
    # is that of small errors.
    assert total[0] == pytest.approx(total[1], rel=0.5)
    order = torch.tensor(pairs).argsort(0).argsort(0).double()
    assert float(torch.corrcoef(order.T)[0, 1]) > 0.8  # Spearman


def test_output_errors_are_those_of_a_forward() -> None:
    problem = problem_of("int4_wo_64", "bf16", sequences=2)
    found = output_errors(problem, problem.data)
    name = "model.layers.0.self_attn.q_proj"  # its input is that of the float model in any case
    model, inputs = tiny_model(), []
    model.get_submodule(name).register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    for call in problem.data:
        call.run(model)
    quantized = ModelQuantizer(attrs.evolve(_weight_only())).quantize_model(tiny_model())
    delta = (quantized.get_submodule(name).weight - model.get_submodule(name).weight).detach()
    x = torch.cat([x.flatten(0, 1) for x in inputs])
    hessian = x.T @ x
    assert found[name]["int4_wo_64"] == pytest.approx(float(torch.trace(delta @ hessian @ delta.T)) / len(x), rel=1e-3)


def _weight_only():  # type: ignore[no-untyped-def]
    from quark_tiny_model import tiny_template

    return tiny_template().get_config(scheme="int4_wo_64")


def test_a_float_layer_loses_nothing() -> None:
    problem = problem_of("mxfp4", "bf16", sequences=1)
    for sensitivity in SENSITIVITIES:
        losses = losses_of(problem, sensitivity, 64)
        assert {own[FLOAT] for own in losses.values()} == {0.0}
        assert all(own["mxfp4"] > 0 for own in losses.values())


def test_fisher_rounds_each_layer_once_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("fp8", "mxfp4")
    layers = sum(len(group.layers) for group in problem.groups)
    rounded: list[str] = []
    plain = RoundToNearest.round

    def counted(self: RoundToNearest, task: RoundingTask) -> Any:
        rounded.extend(task.layers)
        return plain(self, task)

    monkeypatch.setattr(RoundToNearest, "round", counted)
    kept = divergences(problem, problem.data)
    assert len(rounded) == 2 * layers
    rounded.clear()
    assert divergences(problem, problem.data, room=0) == kept
    assert len(rounded) == 2 * layers * len(problem.data)


def test_layers_before_the_token_embeddings_have_a_predicted_divergence() -> None:
    """An encoder does not begin at the embeddings of the decoder's tokens."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    speech = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **speech, **tokens)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    data = [{"input_features": torch.randn(1, 8, 32), "decoder_input_ids": torch.randint(64, (1, 32))} for _ in range(64)]
    problem = problem_of("int4_wo_32", "bf16", model=model, data=data)
    predicted, measured = (losses_of(problem, sensitivity, 10**6) for sensitivity in ("fisher", "kl"))
    before = [group for group in predicted if ".encoder." in group or "encoder_attn.q_proj" in group or "encoder_attn.k_proj" in group]
    assert len(before) == 5
    for group in before:
        # A square of one sum for each of 64 sounds has a standard error of √(2 / 64) = 18 %.
        assert predicted[group]["int4_wo_32"] == pytest.approx(measured[group]["int4_wo_32"], rel=0.5), group


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_parameters_stay_frozen_and_the_others_trainable(fails: bool) -> None:
    problem = problem_of("mxfp4", "fp8", sequences=1)
    for number, parameter in enumerate(problem.model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    before = {name: parameter.requires_grad for name, parameter in problem.model.named_parameters()}
    hooks = len(problem.model.get_input_embeddings()._forward_hooks)
    if fails:
        problem.model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            divergences(problem, problem.data)
    else:
        divergences(problem, problem.data)
    assert {name: parameter.requires_grad for name, parameter in problem.model.named_parameters()} == before
    assert set(before.values()) == {False, True}
    assert len(problem.model.get_input_embeddings()._forward_hooks) == hooks
    assert all(parameter.grad is None for parameter in problem.model.parameters())


def test_data_are_limited_to_whole_forwards() -> None:
    data = problem_of("mxfp4", "fp8").data
    assert [len(limited(data, tokens)) for tokens in (1, 64, 65, 10**6)] == [1, 1, 2, 4]
