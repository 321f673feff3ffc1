"""Convolutions, embeddings and observers of activations against recordings of AMD Quark 0.13; each difference is a test with its reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.models.layers import QuantizedLayer
from quark.numbers import quantizer_for
from quark.torch import ModelQuantizer
from quark.torch.quantization import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
)

GOLDEN = Path(__file__).parent / "golden"
INT8 = Int8PerTensorSpec()
FP8 = FP8E4M3PerTensorSpec()
ROWS = Int8PerChannelSpec(ch_axis=0, symmetric=True)
CHANNELS = Int8PerChannelSpec(ch_axis=1, symmetric=True)
GROUPS = Int4PerGroupSpec(ch_axis=1, group_size=16)
DYNAMIC = FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True)
CASES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "conv2d-int8": (nn.Conv2d(32, 16, 3, padding=1), {"weight": ROWS, "input_tensors": INT8, "output_tensors": INT8, "bias": INT8}),
    "conv2d-grouped-fp8": (nn.Conv2d(32, 16, 3, groups=2), {"weight": FP8, "input_tensors": FP8}),
    "conv2d-int4-group": (nn.Conv2d(32, 16, 3, stride=2), {"weight": GROUPS}),
    "conv2d-mxfp4": (
        nn.Conv2d(32, 16, 3),
        {"weight": OCP_MXFP4Spec(ch_axis=1, is_dynamic=False), "input_tensors": OCP_MXFP4Spec(ch_axis=1, is_dynamic=True)},
    ),
    "conv2d-input-channels": (nn.Conv2d(32, 16, 3), {"weight": INT8, "input_tensors": CHANNELS}),
    "conv2d-dynamic": (nn.Conv2d(32, 16, 3), {"weight": FP8, "input_tensors": DYNAMIC}),
    "conv_transpose2d-int8": (nn.ConvTranspose2d(32, 16, 3, stride=2, groups=2), {"weight": INT8, "input_tensors": INT8}),
    # The reference's axis 1 of torch's transposed layout is the output channels, which are axis 0 here, as of
    # every other layer.
    "conv_transpose2d-outputs": (nn.ConvTranspose2d(32, 16, 3), {"weight": ROWS}),
    "embedding-int8": (nn.Embedding(16, 32), {"weight": ROWS}),
    "embedding_bag-int4": (nn.EmbeddingBag(16, 32), {"weight": GROUPS}),
}


def test_every_recorded_layer_is_compared() -> None:
    assert {path.stem for path in (GOLDEN / "layers").iterdir()} == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_a_quantized_layer_computes_what_was_recorded(case: str) -> None:
    layer, specs = CASES[case]
    recorded = load_file(GOLDEN / "layers" / f"{case}.safetensors")
    layer.load_state_dict({name.removeprefix("state."): tensor for name, tensor in recorded.items() if name.startswith("state.")})
    config = QConfig(global_quant_config=QLayerConfig(), layer_type_quant_config={type(layer): QLayerConfig(**specs)})
    with torch.no_grad():
        model = ModelQuantizer(config).quantize_model(nn.Sequential(layer), [recorded["x"]])
        quantized: Any = model[0]
        assert isinstance(quantized, QuantizedLayer)
        assert torch.equal(quantized.weight, recorded["qdq.weight"])
        if "qdq.bias" in recorded:
            assert torch.equal(quantized.bias, recorded["qdq.bias"])
        if "qdq.input" in recorded:
            assert torch.equal(quantized.input_quantizer(recorded["x"]), recorded["qdq.input"])
        step = 0.0 if quantized.output_quantizer is None else float(quantized.output_quantizer.scale)
        terms = 32 * 9  # of a sum, whose order is the library's own; a sum near the middle of a step may end in the next one
        difference = (model(recorded["x"]) - recorded["y"]).abs()
    bound = terms * torch.finfo(torch.float32).eps * float(recorded["y"].abs().max())
    assert float(difference.max()) <= bound + 1.01 * step
    assert float((difference > bound).float().mean()) < 0.01


def observed(name: str, observer: str) -> tuple[Tensor, float, float]:
    """All values, our scale, and the recorded one; ours has seen one batch after another."""
    recorded = load_file(GOLDEN / "observers" / f"{name}.safetensors")
    spec = QTensorConfig(dtype="int8", observer_cls=observer, qscheme="per_tensor", symmetric=True, is_dynamic=False)
    quantizer = quantizer_for(spec, activation=True)
    batches = [recorded[f"batch.{i}"] for i in range(3)]
    ours = quantizer.observer()
    for batch in batches:
        ours.observe(batch)
    return torch.cat([b.reshape(-1) for b in batches]), float(quantizer.qparams_from(ours).scale), float(recorded["scale"])


def squared_error(x: Tensor, scale: float) -> float:
    return float(((x / scale).round().clamp(-128, 127) * scale - x).double().square().sum())


def test_the_percentile_is_the_recorded_one_within_a_bin() -> None:
    x, ours, theirs = observed("percentile", "PerTensorPercentileObserver")
    assert ours == pytest.approx(theirs, abs=float(x.abs().max()) / 4200 / 127.5)


def test_the_power_of_two_is_the_recorded_one() -> None:
    _, ours, theirs = observed("power_of_two", "PerTensorPowOf2MinMaxObserver")
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "observer"),
    [
        ("mse", "PerTensorMSEObserver"),  # the reference tries the last three of 2048 bins alone
        ("histogram", "PerTensorHistogramObserver"),  # the reference's scale is 1, whatever the data
        ("histogram_pro", "PerTensorHistogramObserverPro"),  # the reference has 256 bins and narrows them step by step
        ("power_of_two_mse", "PerTensorPowOf2MinMSEObserver"),  # the reference takes the choice of most batches, each by itself
    ],
)
def test_searched_scales_have_no_more_error_than_the_recorded_ones(name: str, observer: str) -> None:
    """Up to one step of the scales that are tried, 16 to a halving: rounding errors grow with the square of the scale."""
    x, ours, theirs = observed(name, observer)
    assert squared_error(x, ours) <= squared_error(x, theirs) * 2 ** (2 / 16)
