"""The operators of torch that FX graph mode quantizes, as records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark.plugins import GraphOpRecord

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
"""Name of an operator, which is also the name of its layer type → class of the module."""


def operators_of_torch() -> Iterator[GraphOpRecord]:
    """Yield the records of torch's operators. Equivalent operators share a record."""
    for name, module in _LAYERS.items():
        yield _record(name, modules=module, inputs=("input",), layer_type=name, weight="weight", bias="bias")
    yield _record("embedding", modules="Embedding", inputs=("indices",), layer_type="embedding", weight="weight")
    yield from _arithmetic()
    # The parameters of these operators stay float.
    yield _record("layer_norm", modules="LayerNorm", inputs=("input",))
    yield _record("rms_norm", modules="RMSNorm", inputs=("input",))
    yield _record("group_norm", modules="GroupNorm", inputs=("input",))
    yield _record("batch_norm", modules="BatchNorm1d BatchNorm2d BatchNorm3d", inputs=("input",))
    yield _record("prelu", modules="PReLU", inputs=("self",))
    yield _record("clamp", "clamp hardtanh relu6", "Hardtanh ReLU6", continues=True)
    yield from _moves()


def _arithmetic() -> Iterator[GraphOpRecord]:
    """Yield the operators that compute new values from all of their tensors."""
    for name in ("add", "sub", "mul", "div", "mean"):
        yield _record(name)
    yield _record("softmax", modules="Softmax")
    yield _record("gelu", modules="GELU")
    yield _record("silu", modules="SiLU")
    yield _record("sigmoid", modules="Sigmoid")
    yield _record("tanh", modules="Tanh")
    yield _record("elu", modules="ELU")
    yield _record("leaky_relu", modules="LeakyReLU")
    yield _record("hardswish", modules="Hardswish")
    yield _record("hardsigmoid", modules="Hardsigmoid")
    yield _record("matmul", "matmul bmm mm")
    yield _record("attention", "scaled_dot_product_attention")
    yield _record("avg_pool", "avg_pool1d avg_pool2d avg_pool3d", "AvgPool1d AvgPool2d AvgPool3d")
    adaptive = "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"
    yield _record("adaptive_avg_pool", adaptive, "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d")
    yield _record("upsample_bilinear", "upsample_bilinear2d", "UpsamplingBilinear2d")


def _moves() -> Iterator[GraphOpRecord]:
    """Yield the operators whose output contains only values of the input, or 0."""

    def moves(name: str, operators: str = "", modules: str = "", **facts: Any) -> GraphOpRecord:
        return _record(name, operators, modules, moves_values=True, **facts)

    pools = "max_pool1d max_pool2d max_pool3d adaptive_max_pool2d max_pool2d_with_indices"
    yield moves("relu", modules="ReLU", continues=True)
    yield moves("cat", "cat stack")
    yield moves("max_pool", pools, "MaxPool1d MaxPool2d MaxPool3d AdaptiveMaxPool2d")
    yield moves("amax")
    yield moves("reshape", "reshape view _unsafe_view flatten unflatten squeeze unsqueeze", "Flatten Unflatten")
    yield moves("transpose", "transpose permute t mT numpy_T")
    yield moves("expand", "expand repeat")
    yield moves("slice", "slice select narrow index_select")
    yield moves("split", "split split_with_sizes chunk unbind")
    yield moves("roll")
    yield moves("pixel_shuffle", "pixel_shuffle pixel_unshuffle", "PixelShuffle PixelUnshuffle")
    yield moves("upsample_nearest", "upsample_nearest2d", "UpsamplingNearest2d")
    yield moves("pad", "pad constant_pad_nd", "ZeroPad2d ReflectionPad2d ReplicationPad2d")
    yield moves("identity", "contiguous clone alias detach", "Identity")


def _record(name: str, operators: str = "", modules: str = "", **facts: Any) -> GraphOpRecord:
    """Return the record of ``operators``. If ``operators`` is empty, it is the record of the operator called
    ``name``.
    """
    full_names = tuple(f"aten::{operator}" for operator in (operators or name).split())
    example = "quark_graph.examples:example"
    return GraphOpRecord(name=name, operators=full_names, modules=modules.split(), summary=" · ".join(full_names), example=example, **facts)
