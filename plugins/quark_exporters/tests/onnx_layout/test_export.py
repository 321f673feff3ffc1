"""Files of `export_onnx` compute the values of the quantized modules in onnxruntime, and hold codes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import quark
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, UnsupportedError
from quark.models.layers import QuantizerModule
from quark.torch import ModelQuantizer
from quark_exporters.onnx_layout.export import export_onnx

pytestmark = pytest.mark.thorough

IN, OUT = 256, 24


def spec(dtype: str, qscheme: str, *, dynamic: bool = False, symmetric: bool = True, **more: Any) -> QTensorConfig:
    observer = {"per_tensor": "PerTensorMinMaxObserver", "per_group": "PerGroupMinMaxObserver", "per_channel": "PerChannelMinMaxObserver"}
    named = {"observer_cls": observer[qscheme]} if qscheme in observer else {}
    return QTensorConfig(dtype=dtype, qscheme=qscheme, is_dynamic=dynamic, symmetric=symmetric, **{**named, **more})


GROUPS = {"ch_axis": -1, "group_size": 32}
OTHERS = {
    "uint8, zero points": QLayerConfig(
        weight=spec("uint8", "per_channel", symmetric=False, ch_axis=0), input_tensors=spec("uint8", "per_tensor", symmetric=False)
    ),
    "bias, output": QLayerConfig(
        weight=spec("int8", "per_channel", ch_axis=0), bias=spec("int16", "per_tensor"), output_tensors=spec("int8", "per_tensor")
    ),
    "int32 bias and input": QLayerConfig(
        weight=spec("int8", "per_channel", ch_axis=0), bias=spec("int32", "per_tensor"), input_tensors=spec("int32", "per_tensor")
    ),
    "uint16, zero points": QLayerConfig(
        weight=spec("uint16", "per_channel", symmetric=False, ch_axis=0), bias=spec("uint16", "per_tensor", symmetric=False)
    ),
    "int3, groups": QLayerConfig(
        weight=spec("int3", "per_group", **GROUPS), input_tensors=spec("int8", "per_group", dynamic=True, **GROUPS)
    ),
    "groups of rows": QLayerConfig(weight=spec("int8", "per_group", ch_axis=0, group_size=8)),
    "groups of rows, zero points": QLayerConfig(weight=spec("uint4", "per_group", symmetric=False, ch_axis=0, group_size=8)),
    "real zero points": QLayerConfig(weight=spec("uint4", "per_channel", symmetric=False, ch_axis=0, zero_point_type="float32")),
    "fp8, blocks": QLayerConfig(weight=spec("fp8_e4m3", "per_block", block_size=(8, 128), observer_cls="PerBlock2DMinMaxObserver")),
    "e5m2": QLayerConfig(weight=spec("fp8_e5m2", "per_tensor"), input_tensors=spec("fp8_e5m2", "per_tensor", dynamic=True)),
    "fp6, one scale": QLayerConfig(weight=spec("fp6_e2m3", "per_tensor"), input_tensors=spec("fp6_e2m3", "per_tensor")),
    "casts": QLayerConfig(weight=QTensorConfig(dtype="bfloat16"), input_tensors=QTensorConfig(dtype="float16")),
}
"""Specs of which no scheme is made."""


class Each(nn.Module):
    """One layer for each configuration, all of the same input."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(IN, OUT) for _ in names)
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def activations(seed: int = 0) -> Tensor:
    """Tokens of many sizes, one of them zeros."""
    x = torch.randn(3, 5, IN, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 2, 15).reshape(3, 5, 1)
    x[1, 2] = 0
    return x


def session(path: Path, *, optimized: bool = True) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # by default activations of 4-bit weights become INT8
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def outputs(path: Path, *inputs: Tensor, optimized: bool = True) -> list[Tensor]:
    run = session(path, optimized=optimized)
    feeds = {place.name: value.numpy() for place, value in zip(run.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in run.run(None, feeds)]


def initializers(path: Path) -> dict[str, ir.DataType]:
    return {name: value.dtype for name, value in ir.load(path).graph.initializers.items() if value.dtype is not None}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, QLayerConfig], Each, Path]:
    """One module with a layer for each configuration, and its file."""
    configs = {name: quark.schemes().get(name).config.load()() for name in quark.schemes().names() if name[:2] != "vq"} | OTHERS
    own = {f"layers.{i}": config for i, config in enumerate(configs.values())}
    module = ModelQuantizer(QConfig(QLayerConfig(), layer_quant_config=own)).quantize_model(Each(list(configs)).eval(), [activations(1)])
    path = tmp_path_factory.mktemp("onnx") / "each.onnx"
    dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    export_onnx(module, (torch.ones(2, 4, IN),), path, output_names=[f"y{i}" for i in range(len(configs))], dynamic_shapes=dynamic)
    return configs, module, path


@pytest.mark.parametrize("optimized", [False, True])
def test_every_scheme_computes_in_onnxruntime_what_it_computes_here(
    exported: tuple[dict[str, QLayerConfig], Each, Path], optimized: bool
) -> None:
    """Sums are in another order.

    A sum of K products of float32 numbers errs by at most K units in the last place of the sum of their
    magnitudes. Codes are the same, all of them."""
    configs, module, path = exported
    x = activations()
    with torch.no_grad():
        expected = module(x)
    bound = IN * 2.0**-23 * (x.abs().amax(-1, keepdim=True) * IN * 8 + 8)
    for name, found, y in zip(configs, outputs(path, x, optimized=optimized), expected, strict=True):
        assert bool(((found - y).abs() <= bound / 64).all()), name


def test_the_file_passes_onnx_s_own_checker(exported: tuple[dict[str, QLayerConfig], Each, Path]) -> None:
    onnx.checker.check_model(exported[2], full_check=True)


def test_weights_are_stored_as_codes(exported: tuple[dict[str, QLayerConfig], Each, Path]) -> None:
    configs, _, path = exported
    types = initializers(path)
    assert not any(name.endswith("weight") for name in types)
    stored = {name: types[f"layers.{i}.weight_quantizer.codes"].name for i, name in enumerate(configs)}
    expected = {
        "int4_wo_32": "INT4",
        "uint4_wo_64": "UINT4",
        "int8": "INT8",
        "fp8": "FLOAT8E4M3FN",
        "mxfp4": "UINT4",
        "nvfp4": "UINT4",
        "int4_fp8": "INT4",
        "mxfp6_e2m3": "INT8",
        "e5m2": "FLOAT8E5M2",
        "casts": "BFLOAT16",
    }
    assert {name: stored[name] for name in expected} == expected
    scales = {name: types[f"layers.{list(configs).index(name)}.weight_quantizer.scales"].name for name in ("nvfp4", "mxfp4", "int4_wo_32")}
    assert scales == {"nvfp4": "FLOAT8E4M3FN", "mxfp4": "FLOAT8E4M3FN", "int4_wo_32": "FLOAT"}


def test_weights_in_int8_have_zero_points(exported: tuple[dict[str, QLayerConfig], Each, Path]) -> None:
    """onnxruntime reads them where it makes codes unsigned: where products of bytes saturate."""
    nodes = [node for node in ir.load(exported[2]).graph if node.op_type == "DequantizeLinear"]
    weights = [[value for value in node.inputs if value is not None] for node in nodes]
    weights = [values for values in weights if str(values[0].name).endswith(".codes") and values[0].dtype == ir.DataType.INT8]
    assert len(weights) >= 3
    assert {len(values) for values in weights} == {3}


def test_a_file_says_nothing_of_where_it_was_made(exported: tuple[dict[str, QLayerConfig], Each, Path]) -> None:
    content = exported[2].read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in content
    assert b"site-packages" not in content


class Convolutions(nn.Module):
    """Modules that are no linear layers, and a quantizer called on a parameter and a sum, as in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.conv = nn.Conv2d(8, 6, 3)
        self.kernel = nn.Parameter(torch.randn(4, 6, 1, 1))
        self.of_kernel = QuantizerModule(spec("int8", "per_channel", ch_axis=0), activation=False)
        self.of_kernel.set_qparams(self.of_kernel.quantizer.find_qparams(self.kernel.detach()))
        self.of_sum = QuantizerModule(spec("uint8", "per_tensor", dynamic=False, symmetric=False), activation=True)
        self.of_sum.set_qparams(self.of_sum.quantizer.find_qparams(torch.linspace(-4, 4, 9)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.embed(ids).movedim(-1, 1))
        return nn.functional.conv2d(self.of_sum(x + 1), self.of_kernel(self.kernel))


def test_quantizers_may_be_anywhere_in_a_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = QLayerConfig(weight=spec("int8", "per_tensor"))
    lookup = QLayerConfig(weight=spec("int4", "per_group", ch_axis=-1, group_size=8))
    config = QConfig(QLayerConfig(), layer_type_quant_config={"Conv2d": weights}, layer_quant_config={"embed": lookup})
    module = ModelQuantizer(config).quantize_model(Convolutions().eval(), [torch.randint(16, (2, 5, 5))])
    ids = torch.randint(16, (2, 5, 5))
    export_onnx(module, (ids,), tmp_path / "m.onnx")
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    with torch.no_grad():
        expected = module(ids)
    (found,) = outputs(tmp_path / "m.onnx", ids)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    types = initializers(tmp_path / "m.onnx")
    assert types["embed.weight_quantizer.codes"].name == "INT4"
    assert types["of_kernel.codes"].name == "INT8"
    assert {"conv.weight", "kernel", "embed.weight"}.isdisjoint(types)


def small(scheme: str = "int8", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """A quantized layer, and an input."""
    torch.manual_seed(0)
    x = torch.randn(2, 64, dtype=dtype)
    config = QConfig(global_quant_config=quark.schemes().get(scheme).config.load()())
    return ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(64, 32)).to(dtype).eval(), [x]), x


def test_tracing_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    module, x = small()
    before, classes = module(x), [type(m) for m in module.modules()]
    export_onnx(module, (x,), tmp_path / "m.onnx")
    assert [type(m) for m in module.modules()] == classes
    assert not any("forward" in vars(m) for m in module.modules())
    assert torch.equal(module(x), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_16_bits_have_the_same_codes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Inputs are rounded in float32, as here.

    No provider of onnxruntime multiplies bfloat16 on a CPU: that file is checked alone.
    """
    module, x = small("mxfp4", dtype)
    export_onnx(module, (x,), tmp_path / "m.onnx")
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    if dtype is torch.float16:
        (found,) = outputs(tmp_path / "m.onnx", x)
        torch.testing.assert_close(found, module(x), rtol=2**-9, atol=2**-9)  # two roundings of the sum


def test_large_tensors_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark_exporters.onnx_layout.export.LARGEST", 1000)
    module, x = small()
    export_onnx(module, (x,), tmp_path / "m.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert (tmp_path / "m.onnx.data").stat().st_size >= 64 * 32
    (found,) = outputs(tmp_path / "m.onnx", x)
    torch.testing.assert_close(found, module(x))


def test_rounded_values_are_stored_where_codes_are_not_wanted(tmp_path: Path) -> None:
    module, x = small("mxfp4")
    export_onnx(module, (x,), tmp_path / "m.onnx", weight_format="fake_quantized")
    assert initializers(tmp_path / "m.onnx")["0.weight"].name == "FLOAT"
    torch.testing.assert_close(outputs(tmp_path / "m.onnx", x)[0], module(x))


def test_weights_that_were_changed_are_refused(tmp_path: Path) -> None:
    module, x = small()
    module[0].weight.data += 1e-3  # type: ignore[index, operator]
    with pytest.raises(ConfigError, match=r"'0\.weight_quantizer' cannot be stored as codes.*Quantize the model again"):
        export_onnx(module, (x,), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


def test_what_cannot_be_traced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot trace this Branching .*control flow that depends on data"):
        export_onnx(Branching(), (torch.ones(2),), tmp_path / "m.onnx")


def test_an_opset_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="opset=17: earlier opsets than 21 lack 4-bit integers"):
        export_onnx(Branching(), (torch.ones(2),), tmp_path / "m.onnx", opset=17)


def test_an_opset_that_torch_does_not_reach_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: real(*args, **{**kwargs, "opset_version": 21}))
    with pytest.raises(UnsupportedError, match=r"torch can convert this model to opset 21, but not to opset 23\. Choose another"):
        export_onnx(torch.nn.Linear(2, 2), (torch.ones(1, 2),), tmp_path / "m.onnx", opset=23)
    assert not list(tmp_path.iterdir())


def test_no_model_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    export_onnx(model, (torch.zeros(2, 16),), tmp_path / "model.onnx")
    del model
    gc.collect()
    assert [weight() for weight in weights] == [None] * 4
