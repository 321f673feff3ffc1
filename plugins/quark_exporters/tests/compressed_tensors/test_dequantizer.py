"""`quark_exporters.compressed_tensors`.

Values against recordings of the package and a formula, and checkpoints that are refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quark.checkpoint import FloatTensor
from quark.errors import CheckpointError, ConfigError, UnsupportedError
from quark_exporters.compressed_tensors.arguments import group_of
from quark_exporters.compressed_tensors.dequantizer import CompressedTensorsDequantizer

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
RECORDED = load_file(GOLDEN / "weights.safetensors")
INT4 = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}


def block(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, **more}


def float_tensors(quantization: dict[str, Any], stored: dict[str, Tensor]) -> list[FloatTensor]:
    return list(CompressedTensorsDequantizer().float_tensors(quantization, {name: t.to("meta") for name, t in stored.items()}))


def test_the_recordings_are_those_of_the_manifest() -> None:
    manifest = json.loads((GOLDEN / "MANIFEST.json").read_text())
    assert {name: hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() for name in manifest["sha256"]} == manifest["sha256"]


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_that_the_package_decompresses(case: str) -> None:
    stored = {f"a.{name.removeprefix(f'{case}.')}": tensor for name, tensor in RECORDED.items() if name.startswith(f"{case}.")}
    expected = stored.pop("a.decompressed")
    (one,) = float_tensors(CASES[case], stored)
    assert (one.name, one.shape) == ("a.weight", tuple(expected.shape))
    assert {*one.sources, *one.left_out} == stored.keys(), "nothing of the layer is left over"
    assert torch.equal(one.make({name: stored[name] for name in one.sources}, expected.dtype), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_taken_from_words_lowest_bits_first(bits: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 64))
    per_word = 32 // bits
    unsigned = (codes + 2 ** (bits - 1)).astype(np.uint64).reshape(3, -1, per_word)
    words = (unsigned << (bits * np.arange(per_word, dtype=np.uint64))).sum(-1).astype(np.uint32).view(np.int32)
    stored = {"a.weight_packed": torch.from_numpy(words), "a.weight_scale": torch.ones(3, 1)}
    (one,) = float_tensors(block(INT4 | {"num_bits": bits}), stored)
    assert np.array_equal(one.make(stored, torch.float32).numpy(), codes)


def test_columns_grouped_by_their_activations_have_the_scale_of_their_group() -> None:
    stored = {
        "a.weight_packed": torch.full((2, 2), 0x11111111 * 9 - 2**32, dtype=torch.int64).to(torch.int32),  # each code is 9 - 8
        "a.weight_scale": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "a.weight_g_idx": torch.tensor([0, 1] * 8, dtype=torch.int32),
    }
    (one,) = float_tensors(block(INT4 | {"strategy": "group", "group_size": 8}), stored)
    assert one.make(stored, torch.float32).tolist() == [[1.0, 2.0] * 8, [3.0, 4.0] * 8]


@pytest.mark.parametrize("order", [[-1] * 16, [-1] + [0] * 15])
def test_columns_that_no_order_has_grouped_have_the_scale_of_their_place(order: list[int]) -> None:
    """A group of -1 says that columns were not ordered.

    ``weight_g_idx`` is made so before any calibration.
    """
    stored = {
        "a.weight_packed": torch.full((2, 2), 0x11111111 * 9 - 2**32, dtype=torch.int64).to(torch.int32),  # each code is 9 - 8
        "a.weight_scale": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "a.weight_g_idx": torch.tensor(order, dtype=torch.int32),
    }
    (one,) = float_tensors(block(INT4 | {"strategy": "group", "group_size": 8}), stored)
    assert one.make(stored, torch.float32).tolist() == [[1.0] * 8 + [2.0] * 8, [3.0] * 8 + [4.0] * 8]


def test_a_shape_that_contradicts_the_words_is_refused_when_it_is_read() -> None:
    stored = {
        "a.weight_packed": torch.zeros(2, 2, dtype=torch.int32),
        "a.weight_scale": torch.ones(2, 1),
        "a.weight_shape": torch.tensor([2, 15]),
    }
    (one,) = float_tensors(block(INT4), stored)
    with pytest.raises(ValueError, match=r"'a\.weight_shape' says \[2, 15\], but .* have the shape \[2, 16\]"):
        one.make(stored, torch.float32)


@pytest.mark.parametrize(
    ("quantization", "kind", "message"),
    [
        (block(INT4 | {"num_bits": 3}), UnsupportedError, "'a' has packed codes of 3 bits"),
        (block(INT4, format="mxfp6-pack-quantized"), UnsupportedError, "the format 'mxfp6-pack-quantized'"),
        (block(INT4, sparsity_config={"format": "sparse-24-bitmask"}), UnsupportedError, "sparse checkpoints"),
        (block(INT4, transform_config={"config_groups": {"u": {}}}), UnsupportedError, "transforms run with this model"),
        (block(INT4 | {"symmetric": False}), CheckpointError, r"lacks 'a\.weight_zero_point'"),
        (block(INT4 | {"strategy": "group", "group_size": 64}), CheckpointError, "groups of 64 columns do not match"),
        ({"config_groups": {}}, ConfigError, "no group of quantization_config targets it"),
        ({"config_groups": {"g": {"targets": ["re:(a+)+$"], "weights": INT4}}}, ConfigError, "may take forever"),
        ({"config_groups": {"g": {"targets": ["re:("], "weights": INT4}}}, ConfigError, "not a regular expression"),
    ],
)
def test_what_cannot_be_dequantized_is_refused(quantization: dict[str, Any], kind: type[Exception], message: str) -> None:
    stored = {"a.weight_packed": torch.zeros(2, 2, dtype=torch.int32), "a.weight_scale": torch.ones(2, 1)}
    with pytest.raises(kind, match=message):
        float_tensors(quantization, stored)


def test_a_group_that_names_a_layer_goes_before_one_for_its_type() -> None:
    named, by_type = {"num_bits": 8}, {"num_bits": 4}
    groups = {"a": {"targets": ["Linear"], "weights": by_type}, "b": {"targets": [r"re:.*\.down_proj$"], "weights": named}}
    assert group_of({"config_groups": groups}, "model.layers.0.mlp.down_proj")["weights"] is named
    assert group_of({"config_groups": groups}, "model.layers.0.mlp.up_proj")["weights"] is by_type
