"""A whole export of the recorded model equals the reference's, tensor for tensor.

Bit for bit but for scales of what products give.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import quark
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

GOLDEN = Path(__file__).resolve().parents[3] / "tests" / "golden"
RECORDED_WITH_CACHE = ("fp8", "mxfp4", "ptpc_fp8")
OWN_LAYOUT = ("bfp16", "mx6", "mx9")
ZERO_SCALES = ("amdfp4", "amdfp4_g32")
CORRUPTED = ("amdfp4_global16", "amdfp4_global32")
DIFFERENT = {*OWN_LAYOUT, *ZERO_SCALES, *CORRUPTED}
"""Why these differ on purpose is tested in tests/test_golden_values.py."""
TERMS = 256
"""Of the longest sum in the recorded model."""


def exports(scheme: str, out: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The projections' tensors of our export, and of the recorded one."""
    inputs = load_file(GOLDEN / "inputs.safetensors")
    model = LlamaForCausalLM(LlamaConfig(**json.loads((GOLDEN / "model_config.json").read_text()))).eval()
    model.load_state_dict({k.removeprefix("state."): v for k, v in inputs.items() if k.startswith("state.")})
    # The reference takes scales of the cache from the outputs of the projections.
    cache = {"kv_cache_scheme": "fp8", "kv_cache_post_rope": False} if scheme in RECORDED_WITH_CACHE else {}
    config = LLMTemplate.get("llama").get_config(scheme=scheme, **cache)
    ModelQuantizer(config).quantize_model(model, list(inputs["calib_ids"].split(1)))
    export_safetensors(model, out)
    ours = {k: v for k, v in load_file(out / "model.safetensors").items() if "proj" in k}
    recording = load_file(GOLDEN / scheme / "outputs.safetensors") if scheme != "mx9" else {}
    return ours, {k.removeprefix("export."): v for k, v in recording.items() if k.startswith("export.")}


def are_equal(ours: Tensor, theirs: Tensor, name: str) -> bool:
    """Whether a tensor is that of the recording.

    Scales of inputs and outputs come from products, which each CPU sums in its own order.
    """
    if "put_scale" in name and ours.dtype is torch.float32:
        return torch.allclose(ours, theirs, rtol=TERMS * torch.finfo(torch.float32).eps, atol=0)
    return torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def kinds(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {k: (v.shape, v.dtype) for k, v in tensors.items()}


@pytest.mark.parametrize("scheme", [s for s in quark.schemes().names() if s not in DIFFERENT and (GOLDEN / s).is_dir()])
def test_the_export_equals_the_recording(scheme: str, tmp_path: Path) -> None:
    ours, theirs = exports(scheme, tmp_path / "out")
    assert kinds(ours) == kinds(theirs)
    assert [k for k in ours if not are_equal(ours[k], theirs[k], k)] == []


@pytest.mark.parametrize("scheme", [*ZERO_SCALES, *CORRUPTED])
def test_a_deliberate_difference_keeps_names_shapes_and_dtypes(scheme: str, tmp_path: Path) -> None:
    ours, theirs = exports(scheme, tmp_path / "out")
    assert kinds(ours) == kinds(theirs)
    for name in (k for k in ours if k.endswith("_scale_2")):
        assert are_equal(ours[name], theirs[name], name)
    if scheme in ZERO_SCALES:
        scales = [k for k in ours if k.endswith("weight_scale")]
        assert all(torch.equal(ours[k][theirs[k] > 0], theirs[k][theirs[k] > 0]) for k in scales)


@pytest.mark.parametrize(("scheme", "bytes_of_a_block"), [("bfp16", 8), ("mx6", 11), ("mx9", 17)])
def test_block_floats_lie_in_bytes_with_their_exponents_beside_them(scheme: str, bytes_of_a_block: int, tmp_path: Path) -> None:
    """The reference cannot export them. A block of 8, 16 and 16: mantissas, then the bits of pairs.

    E + 127 as the scale.
    """
    ours, theirs = exports(scheme, tmp_path / "out")
    assert not theirs
    weight, scale = (ours[f"model.layers.0.mlp.down_proj.{name}"] for name in ("weight", "weight_scale"))
    block = 8 if scheme == "bfp16" else 16
    assert weight.shape == (128, 256 // block * bytes_of_a_block)
    assert (scale.shape, scale.dtype) == ((128, 256 // block), torch.uint8)
    assert set(ours) == {f"{k.rpartition('.')[0]}.{name}" for k in ours for name in ("weight", "weight_scale")}
