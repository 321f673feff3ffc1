"""Checks of layer types: quantized layers compute the same as float layers, keep their attributes, and can be
exported and loaded.

Checks create a layer by calling its class with a size for each required argument, and try inputs until one
works.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from quark.checkpoint import export_safetensors, import_model_from_safetensors
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers import QuantizedLayer, counts_as, linear_weight
from quark.models.layers.layer_types import layer_type_of_class
from quark.runs import ModelQuantizer
from quark_devkit.check import NotApplicableError, assume, check, require
from quark_devkit.example_specs import int8_spec
from quark_devkit.subject import Subject

_SIZES = (32, 48, 3, 1, 1)
"""Values for the first arguments of a class: two different sizes, a kernel size, and more."""
_TOLERANCE = 1e-12
"""Difference of float64 outputs summed in two orders: 2 K u times the sum of the products' magnitudes, for K
= 48 inputs and a sum of 100. Another allocation or other strides may change the order, so the
last bits say nothing about a layer."""
_SINGLE = 2.0**-15
"""Relative error in norm of a float32 output summed in another order: 2 K u = 2^-17, times 4 for partial
cancellation.
"""
_QUANTIZED = 0.1
"""Relative error that is far too large for an output computed from 8-bit tensors."""


class _Small(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def float_layer(subject: Subject, *, groups: int = 1) -> nn.Module:
    """Return a float layer in evaluation mode, with all parameters and buffers filled."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        layer = _made(subject.load("layer"), groups)
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
    result: nn.Module = layer.eval()
    return result


def _made(layer_class: type[nn.Module], groups: int = 1) -> nn.Module:
    """Return a layer, created with a size for each argument without a default."""
    named = {} if groups == 1 else {"groups": groups}
    parameters = inspect.signature(layer_class).parameters.values()
    needed = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    most = len(_SIZES) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else needed
    torch.manual_seed(0)
    for count in range(needed, most + 1):
        try:
            return layer_class(*_SIZES[:count], **named)
        except Exception as error:  # any exception, since any class may be registered
            reason = f"{type(error).__name__}: {error}"
    raise NotApplicableError(f"{layer_class.__name__}{_SIZES[:needed]} cannot be created: {reason}")


def quantized_layer(subject: Subject, config: QLayerConfig, layer: nn.Module) -> QuantizedLayer:
    """Return the quantized layer for a float layer."""
    assume(subject.record.quantized is not None, "layers of this type stay float")
    quantized_class = subject.load("quantized")
    quantized: QuantizedLayer = quantized_class.from_float(layer, config)
    return quantized


def _inputs() -> Iterator[Tensor]:
    """Yield inputs to try: first numbers, with both sizes on every possible channel axis, then indices."""
    for size in _SIZES[:2]:
        yield from (torch.randn(2, 5, size), torch.randn(5, size), torch.randn(2, size, 8, 8), torch.randn(2, size, 8))
        yield torch.randn(2, size, 4, 4, 4)
    yield torch.arange(10).view(2, 5)


def input_of(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the first input that the float layer accepts: numbers of the given dtype, or indices.

    The input is the same each time.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = list(_inputs())
    for tried in inputs:
        x = tried.to(dtype) if tried.is_floating_point() else tried
        with suppress(Exception), torch.no_grad():  # any exception: layers raise anything for an input of the wrong shape
            if isinstance(layer(x), Tensor):
                return x
    raise NotApplicableError("the float layer accepts neither numbers nor indices of the usual shapes")


def _grouped_layers(subject: Subject) -> Iterator[nn.Module]:
    """Yield the float layer in float64. If its class supports groups, also yield a layer with two groups."""
    yield float_layer(subject).double()
    layer_class = subject.load("layer")
    if "groups" in inspect.signature(layer_class).parameters:
        yield float_layer(subject, groups=2).double()


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask of the float64 outputs whose difference is larger than another order of summation can
    cause."""
    return ~torch.isclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)


def output(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a layer, without gradients."""
    with torch.no_grad():
        y: Tensor = layer(x)
    return y


@check("layer_type")
def is_found_by_its_class(subject: Subject) -> None:
    """A layer of exactly the float class has this layer type, and no other layer type claims the class."""
    layer_class = subject.load("layer")
    found = layer_type_of_class(layer_class)
    require(found is not None and found.record is subject.record, f"is not the layer type of a {layer_class.__name__}")


@check("layer_type")
def is_planned_as_a_known_type(subject: Subject) -> None:
    """``planned_as`` names a layer type that is planned as itself, can be quantized, and has the same
    ``lookup``.
    """
    record = subject.record
    assume(record.planned_as is not None, "it is planned as itself")
    names = subject.catalog.layer_types.names()
    require(record.planned_as in names, f"is planned as '{record.planned_as}', which is not a layer type: the types are {', '.join(names)}")
    other = subject.catalog.layer_types.get(record.planned_as)
    require(
        other.planned_as is None and other.quantized is not None,
        f"is planned as '{other.name}', which is never quantized or is planned as another type",
    )
    require(other.lookup is record.lookup, f"says lookup={record.lookup}, but is planned as '{other.name}' with lookup={other.lookup}")


@check("layer_type")
def says_whether_it_takes_indices(subject: Subject) -> None:
    """``lookup`` is True if, and only if, the input of the layer is indices."""
    layer, lookup = float_layer(subject), subject.record.lookup
    takes_indices = not input_of(layer).is_floating_point()
    require(lookup is takes_indices, f"says lookup={lookup}, but the layer takes {'indices' if takes_indices else 'values'}")


@check("layer_type")
def computes_what_the_layer_computes(subject: Subject) -> None:
    """Without quantizers, the quantized layer returns the output of the float layer, in float64."""
    layer = float_layer(subject).double()
    x = input_of(layer, torch.float64)
    expected = output(layer, x)
    require(
        _close(output(quantized_layer(subject, QLayerConfig(), layer), x), expected), "computes a different output without any quantizer"
    )


@check("layer_type")
def keeps_what_the_layer_has(subject: Subject) -> None:
    """The quantized layer keeps the parameters, buffers, attributes, hooks and mode of the float layer. None
    of the tensors is copied.
    """
    layer = float_layer(subject)
    calls: list[object] = []
    layer.register_forward_hook(lambda *_: calls.append(None))
    layer.an_attribute_of_somebody = "kept"  # type: ignore[assignment]
    quantized = quantized_layer(subject, QLayerConfig(), layer)
    own = dict(quantized.named_parameters()) | dict(quantized.named_buffers())
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        require(name in own, f"loses the tensor '{name}' of the float layer")
        require(name == "weight" or own[name] is tensor, f"copies the tensor '{name}', so it is no longer tied")
    weights: list[Any] = [quantized.weight, layer.weight]
    require(weights[0].data_ptr() == weights[1].data_ptr(), "copies the weight before anything is rounded")
    require(getattr(quantized, "an_attribute_of_somebody", None) == "kept", "loses attributes of the float layer")
    require(quantized.training is layer.training, "is in a different mode (training or evaluation) from the float layer")
    output(quantized, input_of(float_layer(subject)))
    require(calls, "loses the hooks of the float layer")


@check("layer_type")
def keeps_dtype_and_device(subject: Subject) -> None:
    """The quantized layer keeps the dtype and device of the float layer; a meta layer gets no data."""
    for layer in (float_layer(subject).bfloat16(), float_layer(subject).to("meta")):
        weight: Any = layer.weight
        quantized: Any = quantized_layer(subject, QLayerConfig(), layer)
        require(quantized.weight.dtype is weight.dtype, f"has a weight in {quantized.weight.dtype} for a layer in {weight.dtype}")
        require(quantized.weight.device == weight.device, f"has a weight on {quantized.weight.device} for a layer on {weight.device}")


@check("layer_type")
def has_the_layout_it_says(subject: Subject) -> None:
    """The weight of a layer that is planned as linear has the shape ``[out, in]``; any other weight has the
    shape of the float class. ``transposed`` converts between the two.
    """
    layer = float_layer(subject).double()
    quantized: Any = quantized_layer(subject, QLayerConfig(), layer)
    require(quantized.weight.shape == linear_weight(layer).shape, "has a weight whose shape differs from `transposed` of the float weight")
    if counts_as(layer) is not nn.Linear:
        return
    x = input_of(layer, torch.float64)
    expected = (x.shape[-1], output(layer, x).shape[-1])
    require(tuple(quantized.weight.shape[::-1]) == expected, f"has a weight {list(quantized.weight.shape)} for {expected[0]} inputs")
    before = output(quantized, x)
    quantized.weight = nn.Parameter(torch.cat([quantized.weight[:1] + 1, quantized.weight[1:]]), requires_grad=False)
    changed = _differ(output(quantized, x), before).flatten(0, -2).any(0)
    is_of_one_output = bool(changed[0]) and not bool(changed[1:].any())
    require(is_of_one_output, "has a weight whose rows do not belong to its outputs, although rounding assumes that")


@check("layer_type")
def has_a_scale_for_each_output(subject: Subject) -> None:
    """With ``ch_axis=0``, the weight has a scale for each output, also in a layer with ``groups``. The weight
    of a lookup has a scale for each token.
    """
    spec = int8_spec().set(qscheme="per_channel", ch_axis=0)
    for layer in _grouped_layers(subject):
        x = input_of(layer, torch.float64)
        quantized: Any = quantized_layer(subject, QLayerConfig(weight=spec), layer)
        before, after = _with_one_scale_doubled(quantized)
        if not subject.record.lookup:
            before, after = (_outputs(quantized, values, x) for values in (before, after))
        count, scales = before.shape[0], quantized.weight_quantizer.scale.numel()
        require(scales == count, f"has {scales} scales, not {count}")
        changed = _differ(before, after).any(1)
        require(bool(changed[1]) and int(changed.sum()) == 1, "has weight scales per channel that do not belong to its outputs")


def _with_one_scale_doubled(quantized: Any) -> tuple[Tensor, Tensor]:
    """Return the rounded weight of a layer, and the weight with the same codes but with the second scale
    doubled."""
    quantizer, weight = quantized.weight_quantizer.quantizer, quantized.weight.detach()
    values, qparams = quantizer.round_to_nearest(weight)
    quantized.weight_quantizer.set_qparams(qparams)
    codes, doubled = quantizer.codes_of(values, qparams), qparams.map(torch.clone)
    doubled.scale.view(-1)[1:2] *= 2
    return quantizer.dequantize(codes, qparams).double(), quantizer.dequantize(codes, doubled).double()


def _outputs(quantized: Any, weight: Tensor, x: Tensor) -> Tensor:
    """Return the layer's output with the given weight, as ``[channels, values]``.

    In the output of a linear layer, the channel axis is the last one. In other layers, the axes of the kernel
    follow it.
    """
    quantized.weight = nn.Parameter(weight, requires_grad=False)
    return output(quantized, x).movedim(1 - weight.ndim, 0).flatten(1)


@check("layer_type")
def saves_what_the_float_layer_loads(subject: Subject) -> None:
    """Without quantizers, the quantized layer's state dict has the float layer's names, shapes and values,
    and can be loaded.
    """
    layer = float_layer(subject)
    quantized = quantized_layer(subject, QLayerConfig(), layer)
    expected, state = layer.state_dict(), quantized.state_dict()
    require(state.keys() == expected.keys(), f"saves {', '.join(state)}, but the float layer saves {', '.join(expected)}")
    differ = [name for name in expected if not torch.equal(state[name], expected[name])]
    require(not differ, f"saves values that differ from the float layer's in {', '.join(differ)}")
    quantized.load_state_dict(expected)
    x = input_of(layer)
    require(torch.allclose(output(quantized, x), output(layer, x), rtol=1e-5, atol=1e-6), "computes a different output after loading")


@check("layer_type")
def applies_its_quantizers(subject: Subject) -> None:
    """The input quantizer rounds the input of the layer, and the output quantizer rounds its output."""
    assume(not subject.record.lookup, "its input is indices")
    layer, spec = float_layer(subject).double(), int8_spec(is_dynamic=True)
    x = input_of(layer, torch.float64)
    quantized = quantized_layer(subject, QLayerConfig(input_tensors=spec), layer)
    assert quantized.input_quantizer is not None
    rounded = quantized.input_quantizer(x)
    require(_close(output(quantized, x), output(layer, rounded)), "does not round its input, or changes it in another way")
    quantized = quantized_layer(subject, QLayerConfig(output_tensors=spec), layer)
    assert quantized.output_quantizer is not None
    require(_close(output(quantized, x), quantized.output_quantizer(output(layer, x))), "does not round its output")


@check("layer_type")
def is_quantized_exported_and_loaded(subject: Subject) -> None:
    """In a model, the layer's weight is rounded, and the output stays close to the float output. After export
    and loading, the layer computes the same output.
    """
    assume(subject.record.quantized is not None, "layers of this type stay float")
    model, x = _Small(float_layer(subject)), input_of(float_layer(subject))
    before, weight = output(model, x), linear_weight(model.layer).clone()
    config = QConfig(global_quant_config=QLayerConfig(), layer_quant_config={"layer": QLayerConfig(weight=int8_spec())})
    with TemporaryDirectory(prefix="quark-conformance-", ignore_cleanup_errors=True) as directory:
        quantized: Any = ModelQuantizer(config).quantize_model(model)
        after = output(quantized, x)
        require(isinstance(quantized.layer, QuantizedLayer), "is not quantized although a pattern names it")
        require(not torch.equal(quantized.layer.weight, weight), "keeps its float weight although it has a weight quantizer")
        error = float((after - before).norm() / before.norm())
        require(error < _QUANTIZED, f"changes its output by {error:.0%} with an 8-bit weight")
        export_safetensors(quantized, Path(directory) / "out")
        loaded = import_model_from_safetensors(_Small(float_layer(subject)), Path(directory) / "out", device="cpu")
        again = float((output(loaded, x) - after).norm() / after.norm())
        require(again <= _SINGLE, "returns a different output after export and loading")
