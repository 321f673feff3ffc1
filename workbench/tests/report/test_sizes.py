"""Sizes of a checkpoint: which tensors belong to which layer, and bits by weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import quark_tiny_model as tiny
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import plan_rows
from quark.torch import LLMTemplate
from quark_workbench.report.sizes import OTHER, files_of, sizes_of, stored_bytes


def rows() -> list[PlanRow]:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", exclude_layers=["*down_proj"])
    names = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj")
    return [row for row in plan_rows(tiny.tiny_model(), config) if row.name in names]


def checkpoint(directory: Path) -> dict[str, int]:
    """A checkpoint with two layers in four bits, one in float, and a tensor that belongs to no layer."""
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(50, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.weight_scale": torch.zeros(10, dtype=torch.bfloat16),
        "model.layers.1.mlp.up_proj.weight": torch.zeros(30, dtype=torch.uint8),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(7, dtype=torch.float32),
        "model.norm.weight": torch.zeros(3, dtype=torch.bool),
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({}))
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def test_tensors_count_for_the_layer_that_their_name_begins_with(tmp_path: Path) -> None:
    expected = checkpoint(tmp_path)
    assert stored_bytes(tmp_path) == expected
    plan = rows()
    weights = {row.name: row.shape[0] * row.shape[1] for row in plan}
    up, float_layer = weights["model.layers.0.mlp.up_proj"], weights["model.layers.0.mlp.down_proj"]
    float_bytes = 2 * (2 * up + float_layer) + 100
    found = sizes_of(plan, ["model.layers.0", "model.layers.1"], float_bytes, 2, tmp_path)
    assert found["stored_bytes"] == sum(expected.values())
    assert found["float_bytes"] == float_bytes
    assert found["layers"] == pytest.approx(
        {
            "model.layers.0.mlp.up_proj": 8 * 220 / up,
            "model.layers.1.mlp.up_proj": 8 * 30 / up,
            "model.layers.0.mlp.down_proj": 8 * 28 / float_layer,
        }
    )
    assert found["effective_bits"] == pytest.approx(8 * 250 / (2 * up)), "of the layers that are quantized alone"
    kinds = {entry["kind"]: entry for entry in found["kinds"]}
    assert kinds[OTHER] == {
        "kind": OTHER, "layers": 0, "weights": 50, "float_bytes": 100, "stored_bytes": 3, "quantized": False, "bits": 8 * 3 / 50
    }  # fmt: skip
    (both,) = (entry for entry in found["kinds"] if entry["layers"] == 2)
    sizes = {"weights": 2 * up, "float_bytes": 4 * up, "stored_bytes": 250, "bits": 8 * 250 / (2 * up)}
    assert both == {"kind": both["kind"], "layers": 2, "quantized": True, **sizes}
    (single,) = (entry for entry in found["kinds"] if entry["layers"] == 1)
    assert single["quantized"] is False


@pytest.mark.parametrize("is_stored_once", [True, False])
def test_layers_whose_weight_is_stored_once_are_named_with_it(is_stored_once: bool, tmp_path: Path) -> None:
    plan = [row for row in plan_rows(tiny.tiny_model(), QConfig(QLayerConfig())) if row.name in ("lm_head", "model.embed_tokens")]
    tensors = {"model.embed_tokens.weight": torch.zeros(64, dtype=torch.int8)}
    save_file(tensors | ({} if is_stored_once else {"lm_head.weight": torch.zeros(9)}), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    (kind,) = sizes_of(plan, ["model.layers.0"], 2 * 1024 * 256, 2, tmp_path)["kinds"]
    assert (kind["kind"], kind["stored_bytes"]) == ("model.embed_tokens", 64)
    assert kind.get("tied", []) == (["lm_head"] if is_stored_once else [])


def test_what_files_do_not_tell_is_none(tmp_path: Path) -> None:
    found = sizes_of(rows(), ["model.layers.0", "model.layers.1"], 10**9, 2, tmp_path)
    assert (found["stored_bytes"], found["effective_bits"], found["layers"]) == (None, None, {})
    assert all(entry["stored_bytes"] is None and entry["bits"] is None for entry in found["kinds"])


def test_a_layer_without_weight_in_its_configuration_is_not_quantized(tmp_path: Path) -> None:
    import attrs

    checkpoint(tmp_path)
    plan = [attrs.evolve(row, config=QLayerConfig()) for row in rows()]
    assert sizes_of(plan, [], 10**9, 2, tmp_path)["effective_bits"] is None


def test_files_are_listed_by_name_without_the_report_and_large_ones_are_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    monkeypatch.setattr("quark_workbench.report.sizes.SMALL", 4)
    for name, text in (("b", "12345"), ("a", "1234"), ("quark_report.json", "x")):
        (tmp_path / name).write_text(text)
    digest = {text: hashlib.sha256(text.encode()).hexdigest() for text in ("1234", "12345")}
    small, large = {"name": "a", "bytes": 4, "sha256": digest["1234"]}, {"name": "b", "bytes": 5}
    assert files_of(tmp_path, hashes_weights=False) == [small, large | {"sha256": None}]
    assert files_of(tmp_path, hashes_weights=True) == [small, large | {"sha256": digest["12345"]}]
