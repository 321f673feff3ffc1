"""Values and checkpoint tensors equal recordings of AMD Quark 0.13 bit for bit; each deliberate difference is a test with its reason."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import quark
from quark.numerics import quantizer_for
from quark.plugins import documented_object
from quark.specs.layer import QLayerConfig

GOLDEN = Path(__file__).parent / "golden"
LAYERS = {
    "q_proj": "model.layers.0.self_attn.q_proj",
    "k_proj": "model.layers.0.self_attn.k_proj",
    "down_proj": "model.layers.0.mlp.down_proj",
}
SCHEMES = sorted(p.name for p in GOLDEN.iterdir() if (p / "outputs.safetensors").is_file())
SPECS = sorted(p.stem for p in (GOLDEN / "specs").glob("*.safetensors"))
PER_TOKEN = "ptpc_fp8"
REAL_ZERO_POINT = "Uint4PerChannelSpec-floatzp"


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return load_file(GOLDEN / "inputs.safetensors")


def recorded(scheme: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / scheme / "outputs.safetensors")


def layer_config(scheme: str) -> QLayerConfig:
    return quark.schemes().load(scheme, "config")()


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs)]
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(*as_bytes)


def test_every_scheme_that_is_registered_was_recorded() -> None:
    assert quark.schemes().names() == SCHEMES


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_equal_the_recording(scheme: str, layer: str, inputs: dict[str, Tensor]) -> None:
    weight = inputs[f"state.{LAYERS[layer]}.weight"]
    values, _ = quantizer_for(layer_config(scheme).weight, activation=False).round_to_nearest(weight)
    assert torch.equal(values, recorded(scheme)[f"qdq.{layer}.weight"])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoint_tensors_equal_the_recording_in_every_bit(scheme: str, layer: str, inputs: dict[str, Tensor]) -> None:
    quantizer = quantizer_for(layer_config(scheme).weight, activation=False)
    values, qparams = quantizer.round_to_nearest(inputs[f"state.{LAYERS[layer]}.weight"])
    # From the rounded values, as an export does: what a layer holds is enough to have its codes back.
    packed = quantizer.pack(quantizer.quantize(values, qparams), qparams)
    prefix = f"export.{LAYERS[layer]}.weight"
    theirs = {key.removeprefix(prefix).lstrip("_"): t for key, t in recorded(scheme).items() if key.startswith(prefix)}
    assert packed.keys() == theirs.keys()
    assert [key for key in packed if not same_bits(packed[key], theirs[key])] == []


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != PER_TOKEN])
def test_activations_equal_the_recording(scheme: str, layer: str, inputs: dict[str, Tensor]) -> None:
    spec = layer_config(scheme).input_tensors
    if spec is None:
        assert f"qdq.{layer}.input" not in recorded(scheme)
        return
    ours = quantizer_for(spec, activation=True).fake_quantize(inputs[f"input.{layer}"])
    assert torch.equal(ours, recorded(scheme)[f"qdq.{layer}.input"])


@pytest.mark.parametrize("layer", LAYERS)
def test_difference_activations_have_a_scale_for_each_token_at_any_rank(layer: str, inputs: dict[str, Tensor]) -> None:
    """The reference shares a scale over the batch at each position, so a sample's values depend on its neighbours; runtimes go by token."""
    quantizer = quantizer_for(layer_config(PER_TOKEN).input_tensors, activation=True)
    x = inputs[f"input.{layer}"]
    theirs = recorded(PER_TOKEN)[f"qdq.{layer}.input"]
    assert not torch.equal(quantizer.fake_quantize(x), theirs)
    assert torch.equal(quantizer.fake_quantize(x), quantizer.fake_quantize(x.reshape(-1, x.shape[-1])).reshape(x.shape))
    # The same arithmetic: with a batch of one, where position and token are the same, the reference's rule gives our values.
    shared = torch.stack([quantizer.fake_quantize(x[:, t].reshape(1, -1)).reshape(x[:, t].shape) for t in range(x.shape[1])], dim=1)
    assert torch.equal(shared, theirs)


@pytest.mark.parametrize("case", [c for c in SPECS if c != REAL_ZERO_POINT])
def test_a_single_spec_equals_the_recording(case: str) -> None:
    data = load_file(GOLDEN / "specs" / f"{case}.safetensors")
    values, _ = quantizer_for(spec_of(case), activation=False).round_to_nearest(data["x"])
    assert torch.equal(values, data["y"])


def test_difference_a_real_zero_point_is_added_before_rounding() -> None:
    """By definition ``code = round(x / scale + zero_point)``: the ends of the range are exact. The reference rounds first, and its
    simulation then differs from its export."""
    data = load_file(GOLDEN / "specs" / f"{REAL_ZERO_POINT}.safetensors")
    values, _ = quantizer_for(spec_of(REAL_ZERO_POINT), activation=False).round_to_nearest(data["x"])
    assert not torch.equal(values, data["y"])
    low, high = data["x"].amin(1), data["x"].amax(1)
    step = (high - low) / 15
    usual = step > 2.0**-23  # a narrower range gets the step 1, as in the reference
    assert torch.all((values - data["x"]).abs().amax(1)[usual] <= step[usual] * 0.5 * (1 + 1e-5))
    ours, theirs = ((v.amin(1) - low).abs()[usual] / step[usual] for v in (values, data["y"]))
    assert ours.max() < 1e-5, "the smallest value of a channel is a code of its own"
    assert theirs.max() > 0.1


def spec_of(case: str) -> object:
    """The spec that a recording's name says, ``<class>-<options>``."""
    name, _, option = case.partition("-")
    helper = documented_object(name)
    fields = set(helper.__annotations__) | {a.name for a in helper.__attrs_attrs__}
    options = {
        "sym": {"symmetric": True},
        "asym": {"symmetric": False},
        "floatzp": {"symmetric": False, "zero_point_type": "float32"},
    }.get(option, {"scale_calculation_mode": option} if option in ("even", "floor", "ceil") else {})
    axis = {"ch_axis": 0 if "PerChannel" in name else -1} if "ch_axis" in fields else {}
    group = {"group_size": 32} if "group_size" in fields else {}
    return helper(**options, **axis, **group, is_dynamic=False).to_quantization_spec()
