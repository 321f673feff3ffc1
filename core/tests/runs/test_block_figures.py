"""Figures of a run by block: sizes, seconds, and the work of forwards and statistics."""

from __future__ import annotations

from quark.torch import LLMTemplate, ModelQuantizer
from quark_tiny_model import calibration_batches, tiny_model


def test_a_block_has_the_work_of_its_forwards_and_statistics() -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_64", algorithm="gptq")
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(tiny_model(), calibration_batches(4, 64))
    for block in model.model.layers:
        linear = [module for name, module in block.named_modules() if name.endswith("_proj")]
        size = sum(module.weight.numel() for module in linear)
        assert len(linear) == 7
    rows = [row for name, row in model.quark_report.blocks.items() if name.startswith("model.layers.")]
    assert len(rows) == len(model.model.layers)
    assert [row["flops"]["forward"] for row in rows] == [2 * 4 * 64 * size] * len(rows)
    assert all(row["flops"]["statistics"] > 0 for row in rows)


def test_a_run_without_data_has_no_work_of_forwards() -> None:
    model = ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_64")).quantize_model(tiny_model())
    assert not any("flops" in row for row in model.quark_report.blocks.values())
