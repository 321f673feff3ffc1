"""Patterns of layers that feed the cache match layers of vision towers too.

A vision tower has no cache, and calibration on text does not reach it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quark.config.architecture import Architecture
from quark.config.enums import Dtype
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.models.plan.quant_plan import make_plan

FACTS = Architecture(model_type="x", decoder_blocks="layers", exclude_layers_name="sight*", kv_layers_name="*v_proj")
CACHED = QTensorConfig(dtype=Dtype.fp8_e4m3, qscheme="per_tensor", observer_cls="PerTensorMinMaxObserver", is_dynamic=False)
WEIGHT = QTensorConfig(dtype=Dtype.fp8_e4m3, qscheme="per_tensor", observer_cls="PerTensorMinMaxObserver", is_dynamic=False)


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"v_proj": nn.Linear(4, 4)}) for _ in range(2))
        self.sight = nn.ModuleDict({"qkv_proj": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer["v_proj"](x) for layer in self.layers])  # type: ignore[index]


def planned(exclude: list[str], facts: Architecture | None = FACTS) -> dict[str, QLayerConfig | None]:
    """Return the plan of a configuration with one pattern for both places, as templates write it."""
    entry = QLayerConfig(weight=WEIGHT, output_tensors=CACHED)
    config = QConfig(
        QLayerConfig(weight=WEIGHT), exclude=exclude, layer_quant_config={"*v_proj": entry}, kv_cache_quant_config={"*v_proj": entry}
    )
    return {row.name: row.config for row in make_plan(Seeing(), config, facts).rows}


def test_excluded_layers_outside_the_decoder_blocks_stay_float_altogether() -> None:
    rows = planned(["sight*"])
    assert rows["sight.qkv_proj"] is None
    assert rows["layers.1.v_proj"] == QLayerConfig(weight=WEIGHT, output_tensors=CACHED)


def test_layers_outside_the_decoder_blocks_keep_the_quantization_that_is_not_for_the_cache() -> None:
    assert planned([])["sight.qkv_proj"] == QLayerConfig(weight=WEIGHT)


def test_where_no_decoder_blocks_are_known_patterns_mean_all_that_they_match() -> None:
    assert planned(["sight*"], None)["sight.qkv_proj"] == QLayerConfig(output_tensors=CACHED)
    assert planned([], None)["sight.qkv_proj"] == QLayerConfig(weight=WEIGHT, output_tensors=CACHED)
