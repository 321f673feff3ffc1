"""The operators of torch that FX graph mode quantizes, as records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark.plugins.model_records import GraphOpRecord

__all__ = ["operators_of_torch"]

_LAYERS = {
    "linear": "Linear",
    "conv1d": "Conv1d",
    "conv2d": "Conv2d",
    "conv3d": "Conv3d",
    "conv_transpose1d": "ConvTranspose1d",
    "conv_transpose2d": "ConvTranspose2d",
    "conv_transpose3d": "ConvTranspose3d",
}
"""Name, which is that of the operator and of the layer type too: module class."""

_ARITHMETIC = {
    "add": (("add",), ()),
    "sub": (("sub",), ()),
    "mul": (("mul",), ()),
    "div": (("div",), ()),
    "matmul": (("matmul", "bmm", "mm"), ()),
    "attention": (("scaled_dot_product_attention",), ()),
    "softmax": (("softmax",), ("Softmax",)),
    "mean": (("mean",), ()),
    "avg_pool": (("avg_pool1d", "avg_pool2d", "avg_pool3d"), ("AvgPool1d", "AvgPool2d", "AvgPool3d")),
    "adaptive_avg_pool": (
        ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
        ("AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d"),
    ),
    "upsample_bilinear": (("upsample_bilinear2d",), ("UpsamplingBilinear2d",)),
    "gelu": (("gelu",), ("GELU",)),
    "silu": (("silu",), ("SiLU",)),
    "sigmoid": (("sigmoid",), ("Sigmoid",)),
    "tanh": (("tanh",), ("Tanh",)),
    "elu": (("elu",), ("ELU",)),
    "leaky_relu": (("leaky_relu",), ("LeakyReLU",)),
    "hardswish": (("hardswish",), ("Hardswish",)),
    "hardsigmoid": (("hardsigmoid",), ("Hardsigmoid",)),
}
"""Name: operators, module classes. They compute new values of all their tensors."""

_NORMS = {
    "layer_norm": (("layer_norm",), ("LayerNorm",)),
    "rms_norm": (("rms_norm",), ("RMSNorm",)),
    "group_norm": (("group_norm",), ("GroupNorm",)),
    "batch_norm": (("batch_norm",), ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")),
    "prelu": (("prelu",), ("PReLU",)),
}
"""As `_ARITHMETIC`, with parameters that stay float."""

_MOVES = {
    "relu": (("relu",), ("ReLU",)),
    "cat": (("cat", "stack"), ()),
    "max_pool": (
        ("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "max_pool2d_with_indices"),
        ("MaxPool1d", "MaxPool2d", "MaxPool3d", "AdaptiveMaxPool2d"),
    ),
    "amax": (("amax",), ()),
    "reshape": (("reshape", "view", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"), ("Flatten", "Unflatten")),
    "transpose": (("transpose", "permute", "t", "mT", "numpy_T"), ()),
    "expand": (("expand", "repeat"), ()),
    "slice": (("slice", "select", "narrow", "index_select"), ()),
    "split": (("split", "split_with_sizes", "chunk", "unbind"), ()),
    "roll": (("roll",), ()),
    "pixel_shuffle": (("pixel_shuffle", "pixel_unshuffle"), ("PixelShuffle", "PixelUnshuffle")),
    "upsample_nearest": (("upsample_nearest2d",), ("UpsamplingNearest2d",)),
    "pad": (("pad", "constant_pad_nd"), ("ZeroPad2d", "ReflectionPad2d", "ReplicationPad2d")),
    "identity": (("contiguous", "clone", "alias", "detach"), ("Identity",)),
}
"""As `_ARITHMETIC`, for operators whose output values are input values, or 0."""


def operators_of_torch() -> Iterator[GraphOpRecord]:
    """Yield a record for each operator, or group of operators that differ in no way that matters here."""
    for name, module in _LAYERS.items():
        yield _record(name, (name,), (module,), inputs=("input",), layer_type=name, weight="weight", bias="bias")
    yield _record("embedding", ("embedding",), ("Embedding",), inputs=("indices",), layer_type="embedding", weight="weight")
    for name, (operators, modules) in _ARITHMETIC.items():
        yield _record(name, operators, modules)
    for name, (operators, modules) in _NORMS.items():
        yield _record(name, operators, modules, inputs=("self" if name == "prelu" else "input",))
    yield _record("clamp", ("clamp", "hardtanh", "relu6"), ("Hardtanh", "ReLU6"), continues=True)
    for name, (operators, modules) in _MOVES.items():
        yield _record(name, operators, modules, moves_values=True, continues=name == "relu")


def _record(name: str, operators: tuple[str, ...], modules: tuple[str, ...] = (), **facts: Any) -> GraphOpRecord:
    return GraphOpRecord(
        name=name,
        operators=tuple(f"aten::{operator}" for operator in operators),
        modules=modules,
        summary=" · ".join(f"aten::{operator}" for operator in operators),
        example="quark.runs.graph.examples:example",
        **facts,
    )
