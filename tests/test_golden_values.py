"""Values and checkpoint tensors equal recordings of AMD Quark 0.13 bit for bit; each deliberate difference is a test with its reason."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import quark
from quark.config.layer import QLayerConfig
from quark.numbers import quantizer_for
from quark.plugins import documented_object

GOLDEN = Path(__file__).parent / "golden"
LAYERS = {
    "q_proj": "model.layers.0.self_attn.q_proj",
    "k_proj": "model.layers.0.self_attn.k_proj",
    "down_proj": "model.layers.0.mlp.down_proj",
}
SCHEMES = sorted(p.name for p in GOLDEN.iterdir() if (p / "outputs.safetensors").is_file())
SPECS = sorted(p.stem for p in (GOLDEN / "specs").glob("*.safetensors"))
PER_TOKEN = "ptpc_fp8"
CORRUPTED = ("amdfp4_global16", "amdfp4_global32")
NO_ZERO_SCALES = ("amdfp4", "amdfp4_g32")
ROUNDED_TWICE = "bfp16"
NOT_EXPORTED_BY_THE_REFERENCE = ("bfp16", "mx6")
REAL_ZERO_POINT = "Uint4PerChannelSpec-floatzp"


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return load_file(GOLDEN / "inputs.safetensors")


def recorded(scheme: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / scheme / "outputs.safetensors")


def layer_config(scheme: str) -> QLayerConfig:
    return quark.schemes().load_config(scheme)()


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs)]
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(*as_bytes)


def rounded(scheme: str, layer: str, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Values of a weight, and its checkpoint tensors; siblings share their outer scale where the scheme says so."""
    quantizer = quantizer_for(layer_config(scheme).weight, activation=False)
    weight = inputs[f"state.{LAYERS[layer]}.weight"]
    shared = None
    if quark.schemes().get(scheme).shares_global_scale and layer != "down_proj":
        shared = quantizer.observer()
        for sibling in ("q_proj", "k_proj", "v_proj"):
            shared.observe(inputs[f"state.model.layers.0.self_attn.{sibling}.weight"])
    qparams = quantizer.find_qparams(weight, shared)
    values = quantizer.fake_quantize(weight, qparams)
    # From the rounded values, as an export does: what a layer holds is enough to have its codes back.
    return values, quantizer.pack(quantizer.codes_of(values, qparams), qparams)


def exported(scheme: str, layer: str) -> dict[str, Tensor]:
    """The reference's checkpoint tensors of a weight, by suffix."""
    prefix = f"export.{LAYERS[layer]}.weight"
    return {key.removeprefix(prefix).lstrip("_"): t for key, t in recorded(scheme).items() if key.startswith(prefix)}


def test_every_scheme_was_recorded_but_those_that_the_reference_has_not() -> None:
    own = {name for name in quark.schemes().names() if quark.schemes().source(name).distribution == "quark-schemes"}
    assert own - set(SCHEMES) == {
        "mx9",
        "int2_wo_32",
        "int2_wo_64",
        "int3_wo_64",
        "int3_wo_128",
        "int8_wo_32",
        "int8_wo_per_channel",
        "fp8_per_head",
    }
    assert set(SCHEMES) < own


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s not in {*CORRUPTED, *NO_ZERO_SCALES, ROUNDED_TWICE}])
def test_weights_and_checkpoint_tensors_equal_the_recording_in_every_bit(scheme: str, layer: str, inputs: dict[str, Tensor]) -> None:
    values, packed = rounded(scheme, layer, inputs)
    assert torch.equal(values, recorded(scheme)[f"qdq.{layer}.weight"])
    theirs = exported(scheme, layer)
    if scheme in NOT_EXPORTED_BY_THE_REFERENCE:
        assert not theirs
        return
    assert packed.keys() == theirs.keys()
    assert [key for key in packed if not same_bits(packed[key], theirs[key])] == []


@pytest.mark.parametrize("layer", LAYERS)
def test_difference_the_reference_recorded_bfp16_weights_that_were_rounded_twice(layer: str, inputs: dict[str, Tensor]) -> None:
    """−128 is a mantissa, but its magnitude has the next exponent: rounding such a block again makes its step coarser. The reference's
    activations, rounded once, agree with ours."""
    once, _ = rounded(ROUNDED_TWICE, layer, inputs)
    theirs = recorded(ROUNDED_TWICE)[f"qdq.{layer}.weight"]
    twice, _ = quantizer_for(layer_config(ROUNDED_TWICE).weight, activation=False).round_to_nearest(once)
    assert torch.equal(twice, theirs)
    weight = inputs[f"state.{LAYERS[layer]}.weight"]
    assert (once - weight).square().sum() <= (theirs - weight).square().sum()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scheme", NO_ZERO_SCALES)
def test_difference_no_block_scale_is_0(scheme: str, layer: str, inputs: dict[str, Tensor]) -> None:
    """The reference rounds small scales to 0, computes with 2^-23 instead and exports the 0: what it evaluates is not what it writes. Ours
    are the smallest E5M3 number there, which also leaves the smaller error."""
    weight = inputs[f"state.{LAYERS[layer]}.weight"]
    values, packed = rounded(scheme, layer, inputs)
    theirs, theirs_values = exported(scheme, layer), recorded(scheme)[f"qdq.{layer}.weight"]
    zero = theirs["scale"] == 0
    size = weight.shape[1] // zero.shape[1]
    elements = zero.repeat_interleave(size, 1)
    assert zero.any()
    assert packed["scale"][zero].unique().tolist() == [1]
    assert torch.equal(packed["scale"][~zero], theirs["scale"][~zero])
    assert torch.equal(values[~elements], theirs_values[~elements])
    assert torch.equal(packed[""][~elements[:, ::2]], theirs[""][~elements[:, ::2]])
    error, as_exported = ((v - weight)[elements].square().sum() for v in (values, torch.zeros_like(weight)))
    assert error <= as_exported


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scheme", CORRUPTED)
def test_difference_e5m3_scales_under_a_global_one_are_encoded_and_not_cast(scheme: str, layer: str, inputs: dict[str, Tensor]) -> None:
    """The reference casts these scales to bytes as if they were whole numbers: its weights are off by nearly as much as they are large."""
    weight = inputs[f"state.{LAYERS[layer]}.weight"]
    values, packed = rounded(scheme, layer, inputs)
    theirs = recorded(scheme)[f"qdq.{layer}.weight"]
    relative = [float((v - weight).norm() / weight.norm()) for v in (values, theirs)]
    assert relative[0] < 0.12, "half a step of E2M1, of values spread over each block"
    assert relative[1] > 0.9
    assert {k: (t.shape, t.dtype) for k, t in packed.items()} == {k: (t.shape, t.dtype) for k, t in exported(scheme, layer).items()}
    # By the definition: the largest block's scale is the largest E5M3 number, 254, and the outer scale spans
    # the whole group of siblings.
    if layer == "down_proj":
        assert packed["scale"].max() == 254
        assert packed["scale_2"] == weight.abs().max() / (6 * 114688)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != PER_TOKEN])
def test_activations_equal_the_recording(scheme: str, layer: str, inputs: dict[str, Tensor]) -> None:
    spec = layer_config(scheme).input_tensors
    if spec is None:
        assert f"qdq.{layer}.input" not in recorded(scheme)
        return
    quantizer = quantizer_for(spec, activation=True)
    x = inputs[f"input.{layer}"]
    ours = quantizer.fake_quantize(x)
    assert torch.equal(ours, recorded(scheme)[f"qdq.{layer}.input"])


@pytest.mark.parametrize("layer", LAYERS)
def test_difference_activations_have_a_scale_for_each_token_at_any_rank(layer: str, inputs: dict[str, Tensor]) -> None:
    """The reference shares a scale over the batch at each position, so a sample's values depend on its neighbours; runtimes go by token."""
    quantizer = quantizer_for(layer_config(PER_TOKEN).input_tensors, activation=True)
    x = inputs[f"input.{layer}"]
    theirs = recorded(PER_TOKEN)[f"qdq.{layer}.input"]
    assert not torch.equal(quantizer.fake_quantize(x), theirs)
    assert torch.equal(quantizer.fake_quantize(x), quantizer.fake_quantize(x.reshape(-1, x.shape[-1])).reshape(x.shape))
    # The same arithmetic: with a batch of one, where position and token are the same, the reference's rule
    # gives our values.
    shared = torch.stack([quantizer.fake_quantize(x[:, t].reshape(1, -1)).reshape(x[:, t].shape) for t in range(x.shape[1])], dim=1)
    assert torch.equal(shared, theirs)


@pytest.mark.parametrize("case", [c for c in SPECS if c != REAL_ZERO_POINT and not c.startswith("AmdFP4")])
def test_a_single_spec_equals_the_recording(case: str) -> None:
    data = load_file(GOLDEN / "specs" / f"{case}.safetensors")
    quantizer = quantizer_for(spec_of(case), activation=False)
    values, qparams = quantizer.round_to_nearest(data["x"])
    assert torch.equal(values, data["y"])
    packed = quantizer.pack(quantizer.codes_of(values, qparams), qparams)
    assert torch.equal(quantizer.dequantize(*quantizer.unpack(packed, tuple(values.shape))), values)


@pytest.mark.parametrize("case", [c for c in SPECS if c.startswith("AmdFP4")])
def test_difference_blocks_too_small_for_an_e5m3_scale_are_the_only_ones(case: str) -> None:
    """As for the schemes: the reference's scale of such blocks is 0, and it computes with 2^-23 in its place."""
    data = load_file(GOLDEN / "specs" / f"{case}.safetensors")
    quantizer = quantizer_for(spec_of(case), activation=False)
    values, qparams = quantizer.round_to_nearest(data["x"])
    small = quantizer.granularity.rows(data["x"]).abs().amax(1) / 6 < 2.0**-18
    same = (quantizer.granularity.rows(values) == quantizer.granularity.rows(data["y"])).all(1)
    assert small.any()
    assert same[~small].all()
    assert qparams.scale.min() == 2.0**-17


def test_difference_a_real_zero_point_is_added_before_rounding() -> None:
    """By definition ``code = round(x / scale + zero_point)``: the ends of the range are exact.

    The reference rounds first, and its
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
    fields = {a.name for a in helper.__attrs_attrs__}
    options = {
        "sym": {"symmetric": True},
        "asym": {"symmetric": False},
        "floatzp": {"symmetric": False, "zero_point_type": "float32"},
    }.get(option, {"scale_calculation_mode": option} if option in ("even", "floor", "ceil") else {})
    axis = {"ch_axis": 0 if "PerChannel" in name else -1} if "ch_axis" in fields else {}
    size = int(option) if option.isdigit() else 32
    group = {field: size for field in ("group_size", "block_size") if field in fields}
    static = {"is_dynamic": False} if "is_dynamic" in fields else {}
    return helper(**options, **axis, **group, **static).to_quantization_spec()
