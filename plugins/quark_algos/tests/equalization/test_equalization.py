"""SmoothQuant, AutoSmoothQuant and AWQ in whole runs.

On every scheme, in any order, by hand, from disk, and never in silence.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark
import quark_tiny_model as tiny
from quark.algorithms import AbsMax, BlockContext, Validation
from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.errors import CalibrationError, ConfigError, UnsupportedError
from quark.runs import quantize_checkpoint
from quark.runs.selected_algorithms import settings_told
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_algos.equalization import awq as awq_transform
from quark_algos.equalization import search
from quark_algos.equalization.awq import Awq
from quark_algos.equalization.config import AWQConfig, SmoothQuantConfig
from quark_algos.equalization.equalization import EqualizationRun
from quark_algos.equalization.inputs import SAMPLE, TokenSample
from quark_algos.equalization.search import ActivationErrors, Choice, Part
from quark_algos.mappings.mapping import mappings_of
from quark_algos.mappings.user_mappings import Condition

from ..runs import layers

SCHEMES = [n for n in quark.schemes().names() if quark.schemes().load_config(n)().weight is not None]
NAMES = ["awq", "smoothquant", "autosmoothquant"]
DATA = tiny.calibration_batches(4, 96)
BLOCKS = 2


def config(algorithm: Any, scheme: str = "int4_wo_128", **changes: Any) -> QConfig:
    made = LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=algorithm)
    made.algo_config = [attrs.evolve(a, **changes) for a in made.algo_config or []] if changes else made.algo_config
    return made


def float_model(blocks: int = BLOCKS) -> nn.Module:
    return tiny.tiny_model(blocks=blocks)


def quantized(algorithm: Any, scheme: str = "int4_wo_128", *, blocks: int = BLOCKS, **changes: Any) -> nn.Module:
    return ModelQuantizer(config(algorithm, scheme, **changes)).quantize_model(float_model(blocks), DATA)


def validated(model: nn.Module) -> dict[str, Any]:
    return {n: f for n, f in model.quark_report.transformed.items() if "error_after" in f}


def applied(model: nn.Module) -> dict[str, bool]:
    return {n: f["applied"] for n, f in model.quark_report.transformed.items() if "applied" in f}


def scales(model: nn.Module) -> dict[str, float]:
    """Return the largest scale of each mapping whose scale was kept."""
    return {n: f["scale_max"] for n, f in model.quark_report.transformed.items() if "scale_max" in f}


def logits(model: nn.Module, ids: Tensor = DATA[0]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


def error(model: nn.Module) -> float:
    """On tokens that were not calibrated on."""
    text = torch.tensor(tiny.tiny_tokenizer()(tiny.held_out_text(), verbose=False)["input_ids"])[-2048:].view(16, 128)
    return float((logits(model, text) - logits(float_model(), text)).square().mean())


@pytest.mark.one_in(7)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_can_be_smoothed_and_the_block_is_not_left_worse(name: str, scheme: str) -> None:
    if name == "awq" and scheme.startswith("vq"):
        with pytest.raises(UnsupportedError, match="'awq' chooses the elements of a weight one by one"):
            quantized(name, scheme, blocks=1)
        return
    model = quantized(name, scheme, blocks=1)
    assert torch.isfinite(logits(model)).all()
    if name == "autosmoothquant" and model.quark_report.transformed["model.layers.0"].get("reason") == "the best scales are all 1":
        # As in INT4 on FP8, where one scale of the weight spans all channels that would be scaled.
        assert torch.equal(logits(model), logits(quantized(None, scheme, blocks=1)))
        return
    assert len(validated(model)) == 1, "scale was moved in the block"
    for metrics in validated(model).values():
        assert metrics["applied"] == (metrics["error_after"] < metrics["error_before"] - metrics["standard_error"])
        assert metrics["tokens"] == 4 * 96 // 8
        assert metrics["held_out"]


def test_awq_makes_groups_of_four_bits_better() -> None:
    assert error(quantized("awq")) < 0.9 * error(quantized(None))


def test_the_reference_preset_keeps_what_does_harm_and_says_how_much(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="quark"):
        model = quantized("smoothquant", "int8", preset="reference", alpha=1.0)
    worse = [n for n, f in validated(model).items() if f["error_after"] >= f["error_before"] - f["standard_error"]]
    assert worse
    assert all(applied(model).values())
    assert sum("on 48 held-out tokens" in r.message for r in caplog.records) == len(worse)


def test_what_is_taken_back_leaves_no_trace() -> None:
    """With a share of 1 and the preset's cure left out, every block of this scheme is worse."""
    changed = quantized("smoothquant", "int4_wo_128", alpha=0.999)
    assert list(applied(changed).values()) == [False] * BLOCKS
    assert not scales(changed)
    assert all(f["error_after"] > f["error_before"] for f in validated(changed).values()), "scale had been moved in every block"
    plain = quantized(None)
    assert all(torch.equal(a, b) for a, b in zip(changed.state_dict().values(), plain.state_dict().values(), strict=True))


def test_the_best_preset_takes_a_share_of_one_half_if_none_is_given() -> None:
    assert quantized("smoothquant", "int8", alpha=1.0).quark_report.transformed != quantized("smoothquant", "int8").quark_report.transformed
    documented, half = quantized("smoothquant", "int8"), quantized("smoothquant", "int8", alpha=0.5)
    assert scales(documented)
    assert documented.quark_report.transformed == half.quark_report.transformed
    reference = [quantized("smoothquant", "int8", preset="reference", **alpha) for alpha in ({}, {"alpha": 1.0}, {"alpha": 0.5})]
    assert scales(reference[0]) == scales(reference[1]) != scales(reference[2])


def test_the_objective_asked_for_is_the_one_that_is_searched_by() -> None:
    """MSE and RMSE have the same minimum; that of MAE is another one."""
    by = {loss: quantized("autosmoothquant", "fp8", preset="reference", compute_scale_loss=loss) for loss in ("MSE", "RMSE", "MAE")}
    assert scales(by["MSE"]) == scales(by["RMSE"]) != scales(by["MAE"])


def test_a_mapping_that_a_variant_of_the_family_breaks_is_left_out_in_every_block(caplog: pytest.LogCaptureFixture) -> None:
    model = float_model()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, arguments: (torch.tanh(arguments[0]),))
    with caplog.at_level(logging.WARNING):
        model = ModelQuantizer(config("smoothquant", preset="reference")).quantize_model(model, DATA)
    refused = [r.getMessage() for r in caplog.records if "differs from its template" in r.getMessage()]
    assert len(refused) == 1
    assert "up_proj" in refused[0]
    kept = scales(model)
    assert kept
    assert not any("up_proj" in name for name in kept)


def test_which_mappings_were_probed_and_refused_goes_through_json_to_another_process() -> None:
    transform = Awq(AWQConfig())
    before, after = EqualizationRun(transform, 4), EqualizationRun(transform, 4)
    one, *others = mappings_of(LLMTemplate.get("llama").architecture)
    before._probed, before._refused = {one, *others}, set(others[:1])
    after.recall(json.loads(json.dumps(before.learned())))
    assert (after._probed, after._refused) == (before._probed, before._refused)


def test_where_inputs_are_rounded_too_more_of_their_range_goes_into_the_weights() -> None:
    """Inputs of down projections have outliers.

    One scale for all of them makes those costly, and weights alone do not notice.
    """
    made = config("autosmoothquant", "int8", preset="reference")
    both = ModelQuantizer(made).quantize_model(float_model(), DATA)
    made.global_quant_config = attrs.evolve(made.global_quant_config, input_tensors=None)
    weights_only = ModelQuantizer(made).quantize_model(float_model(), DATA)
    for i in range(BLOCKS):
        name = f"model.layers.{i}.mlp.up_proj"
        assert scales(both)[name] > 1.2 * scales(weights_only)[name]


@pytest.mark.parametrize(("scheme", "is_rounded"), [("int4_wo_128", False), ("mxfp4", True), ("int8", True)])
def test_awq_compares_by_errors_of_inputs_where_these_are_rounded(scheme: str, is_rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[float]]] = []

    def awq(parts: Sequence[Part], x_mean: Tensor, activations: Sequence[ActivationErrors], **more: Any) -> Choice:
        seen.append((len(parts), [float(a.error(torch.ones_like(x_mean)).abs().sum()) for a in activations]))
        return search.awq(parts, x_mean, activations, **more)

    monkeypatch.setattr(awq_transform, "awq", awq)
    quantized("awq", scheme, blocks=1)
    assert seen
    for parts, errors in seen:
        assert len(errors) == (parts if is_rounded else 0)
        assert all(error > 0 for error in errors)


def test_a_sample_of_tokens_is_spread_over_each_batch_until_it_is_complete() -> None:
    sample = TokenSample(1, torch.device("cpu"))
    for start in (0, 1000):
        sample.update(torch.arange(start, start + 640.0)[:, None])
    assert sample.value.flatten().tolist() == [*range(0, 640, 20), *range(1000, 1640, 20)]
    for _ in range(8):
        sample.update(torch.zeros(640, 1))
    assert len(sample.value) == SAMPLE


def test_after_awq_layers_that_share_an_outer_scale_have_the_same_one() -> None:
    model = quantized("awq", "nvfp4")
    for i in range(BLOCKS):
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            found = {float(layers(model)[f"model.layers.{i}.{name}"].weight_quantizer.qparams.outer_scale) for name in group}
            assert len(found) == 1
    assert len({float(layer.weight_quantizer.qparams.outer_scale) for layer in layers(model).values()}) > BLOCKS


def test_what_is_taken_back_in_every_block_is_said_and_no_longer_named(caplog: pytest.LogCaptureFixture) -> None:
    model = quantized("smoothquant", "int4_wo_128", alpha=0.999)
    assert [r.levelname for r in caplog.records if "'smoothquant' has changed no block, so the result does not name it" in r.message]
    assert model.quant_config.algo_config is None
    assert model.quark_plan.config.algo_config is None
    assert "left out, since it has changed no block: smoothquant" in model.quark_plan.notes
    assert not [note for note in model.quark_plan.notes if "transformed by" in note]


def test_a_checkpoint_does_not_name_what_was_taken_back_in_every_block(tmp_path: Path) -> None:
    made = config("smoothquant", alpha=0.999)
    export_safetensors(ModelQuantizer(made).quantize_model(tiny.tiny_model(torch.bfloat16), DATA), tmp_path / "memory")
    plan = quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "disk", made, DATA)
    assert plan.config.algo_config is None
    for place in ("memory", "disk"):
        written = json.loads((tmp_path / place / "config.json").read_text())["quantization_config"]
        assert not written["algo_config"]


def test_a_rounding_of_its_own_stays_where_its_scales_are_taken_back(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    harm = attrs.evolve(Validation(1.0, 2.0, 0.1, 9, is_held_out=True))
    monkeypatch.setattr("quark_algos.equalization.equalization.validated", lambda *_, **__: harm)
    model = quantized("awq")
    assert not any(applied(model).values())
    assert [a.name for a in model.quant_config.algo_config] == ["awq"]
    assert any("only its rounding is in the result" in r.message for r in caplog.records)


SEQUENCES = tiny.calibration_batches(8, 64)


@pytest.mark.thorough
@pytest.mark.parametrize("lasts", [(0, 4, 7), pytest.param((1, 2, 3, 5, 6), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "scheme"), [("smoothquant", "int8"), ("awq", "int4_wo_64")])
def test_what_is_applied_does_not_depend_on_the_order_of_samples_nor_on_batches(name: str, scheme: str, lasts: tuple[int, ...]) -> None:
    """Each of `lasts` comes last once, in a call each, and then all in calls of eight and of four.

    The same tokens are held out.
    """
    made = config(name, scheme)
    orders = [SEQUENCES[i + 1 :] + SEQUENCES[: i + 1] for i in lasts]
    first, *others = (
        ModelQuantizer(made).quantize_model(float_model(), data)
        for data in (*orders, torch.cat(SEQUENCES), list(torch.cat(SEQUENCES[::-1]).split(4)))
    )
    for other in others:
        assert applied(other) == applied(first)
        assert [f["tokens"] for f in validated(other).values()] == [2 * 64] * BLOCKS
        assert all(f["held_out"] for f in validated(other).values())


def test_one_call_of_all_sequences_is_divided_too() -> None:
    """A transform gets the other six of eight sequences."""
    made, shown = config("smoothquant", "int8"), []

    def remember(self: Any, block: BlockContext) -> Any:
        shown.append(block.statistics["self_attn.q_proj"][AbsMax].tokens)
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EqualizationRun, "apply", remember)
        ModelQuantizer(made).quantize_model(float_model(), torch.cat(SEQUENCES))
    assert shown == [6 * 64] * BLOCKS


@pytest.mark.parametrize("index", [0, 2])
def test_a_sample_that_is_padding_alone_changes_nothing(index: int) -> None:
    samples: list[Any] = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in DATA[:2]]
    expected = validated(ModelQuantizer(config("awq")).quantize_model(float_model(), samples))
    samples.insert(index, {"input_ids": DATA[2], "attention_mask": torch.zeros_like(DATA[2])})
    assert validated(ModelQuantizer(config("awq")).quantize_model(float_model(), samples)) == expected


def test_where_nothing_could_be_held_out_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = ModelQuantizer(config("awq")).quantize_model(float_model(), [torch.tensor([[5, 6, 7]])])
    assert [f["held_out"] for f in validated(model).values()] == [False] * BLOCKS
    assert any("there were too few tokens to hold any out" in r.message for r in caplog.records)


def test_a_model_without_any_of_the_mappings_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    made = config(None, "int8")
    made.algo_config = [user_mapping("module.self_attn.v_proj.weight.shape == module.self_attn.o_proj.weight.shape")]
    made.algo_config = [attrs.evolve(made.algo_config[0], scaling_layers=made.algo_config[0].scaling_layers[:1])]
    model = ModelQuantizer(made).quantize_model(float_model(), DATA)
    assert {f["reason"] for f in model.quark_report.transformed.values()} == {"no mapping of this block can be scaled"}
    assert any("has changed no block" in r.message for r in caplog.records)
    assert model.quant_config.algo_config is None


def test_the_order_in_which_algorithms_are_named_does_not_matter() -> None:
    one, other = quantized(["awq", "gptq"]), quantized(["gptq", "awq"])
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert {r.algorithm for r in one.quark_plan.quantized} == {"gptq"}
    assert any("awq" in note for note in one.quark_plan.notes)


def test_an_earlier_scale_makes_no_difference_to_smoothquant_so_that_two_equalizations_are_senseless() -> None:
    once, earlier = float_model(), float_model()
    blocks: Any = earlier.get_submodule("model.layers")
    with torch.no_grad():
        for block in blocks:
            scale = 2.0 ** torch.randint(-2, 3, (block.input_layernorm.weight.numel(),), generator=torch.Generator().manual_seed(0))
            block.input_layernorm.weight.div_(scale)
            for layer in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
                layer.weight.mul_(scale)
    own = config("smoothquant", "int8", alpha=0.5, preset="reference")
    norms = [
        [parameter for name, parameter in ModelQuantizer(own).quantize_model(model, DATA).named_parameters() if "layernorm" in name]
        for model in (once, earlier)
    ]
    for one, other in zip(*norms, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("names", "words"),
    [(["awq", "smoothquant"], "'awq' and 'smoothquant' .*have the same role"), (["gptq", "qronos"], "both choose the codes")],
)
def test_algorithms_that_exclude_each_other_are_refused_before_any_work(names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        quantized(names)


@pytest.mark.parametrize("name", ["awq", "smoothquant"])  # the latter's settings are called "smooth", as in AMD Quark
def test_an_algorithm_is_called_what_its_users_call_it(name: str) -> None:
    own = config(name)
    with pytest.raises(CalibrationError, match=f"needed by the algorithm '{name}'"):
        ModelQuantizer(own).quantize_model(float_model())
    assert any(f"transformed by {name} " in note for note in ModelQuantizer(own).plan(float_model()).notes)
    assert settings_told(own)["algorithms"] == (name,)
    own.algo_config = [*(own.algo_config or ()), *(own.algo_config or ())]
    with pytest.raises(ConfigError, match=f"the algorithm '{name}' is named twice"):
        ModelQuantizer(own).plan(float_model())


def test_exports_reload_to_the_same_logits(tmp_path: Path) -> None:
    model = quantized(["smoothquant", "gptq"], "int8")
    export_safetensors(model, tmp_path / "out")
    again = import_model_from_safetensors(None, str(tmp_path / "out"), device="cpu")
    assert torch.equal(logits(again), logits(model))


def test_from_disk_gives_the_checkpoint_that_the_model_in_memory_gives(tmp_path: Path) -> None:
    model = ModelQuantizer(config("awq")).quantize_model(tiny.tiny_model(torch.bfloat16), DATA)
    export_safetensors(model, tmp_path / "memory")
    quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "disk", config("awq"), DATA)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "disk" / file).read_bytes() == (tmp_path / "memory" / file).read_bytes()


def user_mapping(condition: str) -> AlgoConfig:
    return SmoothQuantConfig(
        alpha=0.3,
        preset="reference",
        scaling_layers=[
            {"prev_op": "self_attn.v_proj", "layers": ["self_attn.o_proj"], "inp": "self_attn.o_proj", "condition": condition},
            {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"},
        ],
    )


def test_user_mappings_are_the_only_ones_and_keep_their_conditions() -> None:
    shape = "module.self_attn.v_proj.weight.shape {} module.self_attn.o_proj.weight.shape"
    for operator, expected in (("==", {"mlp.up_proj"}), ("!=", {"mlp.up_proj", "self_attn.v_proj"})):
        made = config(None, "int8")
        made.algo_config = [user_mapping(shape.format(operator))]
        found = ModelQuantizer(made).quantize_model(float_model(), DATA).quark_report.transformed
        assert {n.split(".", 3)[3] for n, f in found.items() if "scale_max" in f} == expected


@pytest.mark.parametrize("text", ["__import__('os')", "module.a.weight.shape < module.b.weight.shape", "True", "module.a.shape == 1"])
def test_a_condition_that_is_no_comparison_of_shapes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has a wrong form"):
        Condition.parse(text)


def test_an_entry_without_layers_is_refused() -> None:
    made = config(None)
    made.algo_config = [AWQConfig(scaling_layers=[{"prev_op": "mlp.up_proj"}])]
    with pytest.raises(ConfigError, match="needs 'prev_op' and 'layers'"):
        ModelQuantizer(made).quantize_model(float_model(), DATA)
