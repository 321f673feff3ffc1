"""Padding is no token, for any consumer of calibration data.

A run on padded data gives the same bits as a run on the same sequences, unpadded and one by one. A padded
batch runs sequence by sequence, so sums have the same order, and no test here needs a tolerance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from quark.base.ranks import ALONE, Ranks
from quark.config.model import QConfig
from quark.plugins import observers
from quark.runs import quantize_checkpoint
from quark.runs.quantize_block import quantize_run
from quark.runs.run import plan_run
from quark.runs.sink import InPlaceSink
from quark.torch import LLMTemplate
from quark_devkit.small_models import saved, small_model
from quark_devkit.threads import in_threads
from quark_devkit.whole_runs import contents, shared_report

LENGTHS = (20, 33, 12, 28, 7)
PAD = 5
Data = list[dict[str, Any]]


def sequences(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(6, 90, (length,), generator=generator) for length in lengths]


def placed(rows: Sequence[Tensor], side: str, extra: int, pad: int) -> tuple[Tensor, Tensor]:
    """Return sequences as one padded batch, with its mask."""
    width = max(map(len, rows)) + extra
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        first = width - len(row) if side == "left" else 0
        ids[number, first : first + len(row)], mask[number, first : first + len(row)] = row, 1
    return ids, mask


def padded(rows: Sequence[Tensor], side: str, extra: int, size: int, pad: int = PAD) -> Data:
    batches = [placed(rows[i : i + size], side, extra, pad) for i in range(0, len(rows), size)]
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in batches]


def alone(rows: Sequence[Tensor]) -> Data:
    return padded(rows, "right", 0, 1)


def with_a_row_of_padding(data: Data) -> Data:
    return [{name: torch.cat([x, torch.full_like(x[:1], PAD * (name == "input_ids"))]) for name, x in batch.items()} for batch in data]


FORMS: dict[str, Callable[[Sequence[Tensor]], Data]] = {
    "right": lambda rows: padded(rows, "right", 3, 1),
    "left": lambda rows: padded(rows, "left", 3, 1),
    "batches": lambda rows: padded(rows, "left", 0, 3, pad=0),
    "one batch, ids that no model has": lambda rows: padded(rows, "right", 2, 9, pad=-1),
    "a row of padding": lambda rows: with_a_row_of_padding(padded(rows, "right", 1, 2)),
}
RUNS: dict[str, dict[str, Any]] = {
    "static inputs": {"scheme": "int8"},
    "static inputs and cache": {"scheme": "fp8", "kv_cache_scheme": "fp8"},
    "attention": {"scheme": "fp8", "kv_cache_scheme": "fp8", "attention_scheme": "fp8"},
    "two levels": {"scheme": "nvfp4"},
    "GPTQ": {"scheme": "int4_wo_64", "algorithm": ["gptq"]},
    "GPTQ, static inputs and cache": {"scheme": "fp8", "kv_cache_scheme": "fp8", "algorithm": ["gptq"]},
    "GPTQ in two passes": {"scheme": "fp8", "kv_cache_scheme": "fp8", "algorithm": ["gptq"], "activation_memory": 0},
    "GPTAQ": {"scheme": "int4_wo_64", "algorithm": ["gptaq"]},
    "Qronos": {"scheme": "int4_wo_64", "algorithm": ["qronos"]},
    "AWQ": {"scheme": "int4_wo_64", "algorithm": ["awq"]},
    "SmoothQuant": {"scheme": "fp8", "algorithm": ["smoothquant"], "kv_cache_scheme": "fp8"},
    "AutoSmoothQuant": {"scheme": "int8", "algorithm": ["autosmoothquant"]},
    "rotation": {"scheme": "int4_wo_64", "algorithm": ["rotation"]},
    "tuning": {"scheme": "int4_wo_64", "algorithm": ["tuning"]},
    "AutoRound": {"scheme": "int4_wo_64", "algorithm": ["autoround"], "algorithm_options": {"autoround": {"iters": 4}}},
}


@cache
def llama() -> nn.Module:
    """A model whose pad token has large activations, which would show if padding counted anywhere."""
    model = small_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[PAD] *= 30  # type: ignore[operator]
    return model


@cache
def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=1,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.get_input_embeddings().weight[PAD] *= 30  # type: ignore[operator]
    return model


def config_of(model: nn.Module, options: dict[str, Any]) -> QConfig:
    options = dict(options)
    memory = options.pop("activation_memory", None)
    config = LLMTemplate.get(str(model.config.model_type)).get_config(**options)  # type: ignore[union-attr]
    config.activation_memory = memory
    return config


def run_on(model: nn.Module, config: QConfig, data: Data, ranks: Ranks = ALONE) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the quantized model, and the report of the run without its times."""
    model = copy.deepcopy(model)
    run = plan_run(model, config.copied()).with_data(model, data, torch.device("cpu"), ranks)
    quantize_run(run, model, InPlaceSink(model))
    report: Any = model.quark_report
    figures = {name: value for name, value in report.to_dict().items() if name in ("weights", "histograms", "tokens")}
    depth = {name: {k: v for k, v in row.items() if k != "seconds"} for name, row in report.to_dict().get("blocks", {}).items()}
    of_rank = {"figures": figures, "depth": depth} if ranks.size == 1 else {}
    return {name: t.clone() for name, t in model.state_dict().items() if not t.is_meta}, {**shared_report(report), **of_rank}


def differences(one: tuple[dict[str, Tensor], dict[str, Any]], other: tuple[dict[str, Tensor], dict[str, Any]]) -> list[str]:
    (tensors, report), (others, other_report) = one, other
    assert tensors.keys() == others.keys()
    found = [name for name, x in tensors.items() if not torch.equal(x.view(-1).view(torch.uint8), others[name].view(-1).view(torch.uint8))]
    return found + [f"report: {name}" for name in report if report[name] != other_report[name]]


@cache
def on_plain_data(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return run_on(llama(), config_of(llama(), RUNS[name]), alone(sequences()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RUNS)
def test_scales_statistics_and_figures_are_those_of_the_sequences(name: str, form: str) -> None:
    found = run_on(llama(), config_of(llama(), RUNS[name]), FORMS[form](sequences()))
    assert differences(found, on_plain_data(name)) == []


@pytest.mark.parametrize("size", [2, 4])
def test_a_batch_without_padding_has_the_scales_of_its_sequences_but_for_the_order_of_sums(size: int) -> None:
    """The batch runs as a whole: float32 sums of 128 products in another order differ by up to 1e-4."""
    rows = sequences((20,) * 4)
    config = config_of(llama(), RUNS["static inputs and cache"])
    (found, _), (expected, _) = run_on(llama(), config, padded(rows, "left", 0, size)), run_on(llama(), config, alone(rows))
    for name in (n for n in expected if "scale" in n):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=0)


EXPERTS: dict[str, dict[str, Any]] = {
    "static inputs, pooled": {"scheme": "fp8"},
    "GPTQ, static inputs, pooled": {"scheme": "fp8", "algorithm": ["gptq"]},
    "GPTQ in two passes": {"scheme": "fp8", "algorithm": ["gptq"], "activation_memory": 0},
    "AWQ": {"scheme": "int4_wo_64", "algorithm": ["awq"]},
}


@pytest.mark.parametrize("shows_all", [False, True])
@pytest.mark.parametrize("name", EXPERTS)
def test_padding_counts_in_no_expert(name: str, shows_all: bool) -> None:
    config = config_of(mixtral(), EXPERTS[name])
    config.calibrate_all_experts = shows_all
    expected = run_on(mixtral(), config, alone(sequences()))
    for form in FORMS.values():
        assert differences(run_on(mixtral(), config, form(sequences())), expected) == []


@pytest.mark.parametrize("name", ["GPTQ, static inputs and cache", "GPTQ in two passes", "SmoothQuant"])
def test_several_ranks_that_share_padded_data_come_to_the_same(name: str) -> None:
    config, rows = config_of(llama(), RUNS[name]), sequences()
    (expected,) = in_threads(lambda ranks: run_on(llama(), config, alone(rows), ranks), 1, is_deterministic=True)
    data = padded(rows, "left", 2, 2)
    for size in (2, 3):
        for tensors, report in in_threads(lambda ranks: run_on(llama(), config, data, ranks), size, is_deterministic=True):
            alone_report = {key: value for key, value in expected[1].items() if key in report}
            assert differences((tensors, report), (expected[0], alone_report)) == []


OBSERVERS = [r.name for r in observers() if r.name.startswith("per_tensor")]


@pytest.mark.parametrize("name", OBSERVERS)
def test_no_observer_sees_padding(name: str) -> None:
    config = config_of(llama(), {"scheme": "int8"})
    assert config.global_quant_config is not None
    assert config.global_quant_config.input_tensors is not None
    config.global_quant_config.input_tensors.observer_cls = name  # type: ignore[union-attr]
    expected = run_on(llama(), config, alone(sequences()))
    for form in ("left", "batches"):
        assert differences(run_on(llama(), config, FORMS[form](sequences())), expected) == []


def test_the_files_from_disk_are_those_of_the_sequences(tmp_path: Path) -> None:
    source, rows = saved(tmp_path / "source"), sequences()
    config = LLMTemplate.get("llama").get_config(scheme="fp8", kv_cache_scheme="fp8", algorithm=["gptq"])
    quantize_checkpoint(source, tmp_path / "alone", config, alone(rows))
    expected = contents(tmp_path / "alone")
    for number, form in enumerate(FORMS.values()):
        quantize_checkpoint(source, tmp_path / str(number), config, form(rows))
        assert contents(tmp_path / str(number)) == expected
